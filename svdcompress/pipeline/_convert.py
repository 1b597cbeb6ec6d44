"""From a recipe's settings to converted models, schedules of beta, and masks that leave something."""

from __future__ import annotations

from torch import nn

from svdcompress.convert import convert
from svdcompress.errors import PruneError
from svdcompress.objective import AdditiveWarmup, Constant, CosineWarmup, LinearWarmup, Schedule
from svdcompress.recipe import BetaSchedule, Recipe, in_epochs
from svdcompress.relevance import Masks


def converted(model: nn.Module, recipe: Recipe) -> nn.Module:
    """A model converted as the recipe says, in place: first the layers that rules name, then the rest."""
    settings = recipe.convert
    base = {name: getattr(settings, name) for name in ("prior", "share", "log_sigma2", "threshold")}
    for rule in settings.layers:
        own = {name: getattr(rule, name) if getattr(rule, name) is not None else value for name, value in base.items()}
        convert(model, include=[rule.match] if isinstance(rule.match, str) else rule.match, exclude=settings.exclude, **own)
    return convert(model, include=settings.include, exclude=settings.exclude, **base)


def make_schedule(beta: BetaSchedule, epochs: int) -> Schedule:
    """The schedule that a recipe names, in epochs."""
    if beta.name == "constant":
        return Constant(beta.final)
    if beta.name == "additive":
        return AdditiveWarmup(beta.step, beta.final)
    kind = CosineWarmup if beta.name == "cosine" else LinearWarmup
    return kind(in_epochs(beta.start, epochs), in_epochs(beta.stop, epochs), beta.final)


def check_some_left(masks: Masks) -> None:
    """Raises PruneError, saying what to try, for masks that leave nothing of a layer."""
    for layer in masks.layers:
        if not layer.kept:
            raise PruneError(
                f"nothing is left of layer {layer.name!r}: the model would be a constant. "
                "Lower train.beta.final, raise relevance.threshold, or train longer before beta rises (train.beta.start)"
            )
