"""The learning rate of log sigma2 where a recipe leaves it open, and the warning if the threshold is out of reach."""

from __future__ import annotations

import math

from torch import nn

from svdcompress.errors import counted
from svdcompress.layers import Threshold
from svdcompress.objective import Schedule
from svdcompress.pipeline._convert import make_schedule
from svdcompress.recipe import Recipe, TrainSection
from svdcompress.train import Reach, distances, factors, frozen_layers, rate_of_log_sigma2, reach, steps_of

MOST = 0.1
"""The largest learning rate of log sigma2 that "auto" chooses: one step changes a variance by about a tenth."""


def rate_of_variances(recipe: Recipe, model: nn.Module, examples: int, final: float, world: int = 1) -> float | None:
    """train.lr_log_sigma2 as a number (None: the rate of the means). model: converted, before training. final: the last beta.

    With "auto" it is the rate of the means, or higher if log sigma2 alone needs that to bring nine of ten weights to the
    threshold, up to `MOST`.
    """
    wanted = recipe.train.lr_log_sigma2
    if wanted != "auto":
        return wanted
    train, schedule = training_of(recipe, final)
    up = factors(train, steps_of(train, examples, world), schedule)[0]
    ways = [found[-1] for found in distances(model, harshest(recipe)).values()]
    if not (ways and up > 0):
        return None
    return max(rate_of_log_sigma2(recipe.train, None), min(float(f"{max(ways) / up:.2g}"), MOST))


def training_of(recipe: Recipe, final: float) -> tuple[TrainSection, Schedule]:
    """The settings and the beta schedule to assume for the training of the variances: the recipe's. For a search, the
    schedules that it ignores (see `passed_over`) are reset to their defaults, so that settings without effect don't affect
    decisions."""
    train, plain = recipe.train, TrainSection()
    if recipe.search.wanted:
        train = train.model_copy(update={"schedule": plain.schedule, "beta": plain.beta})
    return train, make_schedule(train.beta, train.epochs, final)


def reach_of(recipe: Recipe, model: nn.Module, examples: int, final: float, rate: float | None, world: int = 1) -> Reach:
    """How far the training that a recipe asks for can bring the weights of a converted model towards the threshold."""
    train, schedule = training_of(recipe, final)
    return reach(model, train, examples, schedule, lr_log_sigma2=rate, threshold=harshest(recipe), world=world)


def harshest(recipe: Recipe) -> Threshold | None:
    """The threshold that drops the most weights, of those that a recipe may choose from; None: each layer's own. A search
    does not use the candidates."""
    settings = recipe.relevance
    if recipe.search.wanted:
        return settings.threshold
    numbers = [limit for limit in settings.candidates if isinstance(limit, int | float)]
    return min(numbers) if numbers else settings.candidates[0] if settings.candidates else settings.threshold


def about_frozen(recipe: Recipe, model: nn.Module) -> list[str]:
    """A warning if layers of a converted model are frozen, as training can't drop their weights; [] otherwise."""
    names = list(frozen_layers(model))
    if not names:
        return []
    some = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    are, wanted = "is" if len(names) == 1 else "are", recipe.search.wanted
    still = " A search removes units of theirs all the same, but only other layers are trained after that." if wanted else ""
    return [
        f"{counted(len(names), 'layer')} to be pruned {are} frozen (requires_grad=False): {some}. Training changes neither "
        f"weights nor variances there, so it can't drop any of these weights.{still} Unfreeze them in the model, or leave them "
        "dense (convert.exclude)"
    ]


def out_of_reach(recipe: Recipe, found: Reach) -> list[str]:
    """A warning if less than half of the weights can reach the threshold, with what to set; [] otherwise."""
    if found.enough or not recipe.train.epochs or found.mostly_frozen:  # no training would help; `frozen` says so
        return []
    cures = []
    if found.times is not None:
        longer = math.ceil(found.times * recipe.train.epochs)
        cures += [
            f"{found.times:{'.2g' if found.times < 10 else '.0f'}} times the steps (--epochs {longer}, or smaller batches)"
        ]
        if recipe.train.optimizer == "sgd":  # SGD's learning rate does not apply to log sigma2
            cures += [f"--set train.lr_log_sigma2={found.lr_log_sigma2 * found.times:.2g}"]
        else:
            cures += [f"--set train.lr={recipe.train.lr * found.times:.2g}"]
    limit = harshest(recipe)
    cures += (
        ["a lower threshold, such as --threshold 1"] if limit is None or (isinstance(limit, int | float) and limit > 1) else []
    )
    cures += ["--set train.lr_log_sigma2=auto"] if recipe.train.lr_log_sigma2 is None else []
    return [f"training is too short for most weights to reach the threshold: {found}. Try {'; or '.join(cures)}"]
