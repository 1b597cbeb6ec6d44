"""How a pruned network recovers if the recipe leaves the optimizer open (`recover.optimizer: auto`)."""

from __future__ import annotations

from typing import Any

from torch import nn

from svdcompress.recipe import BY_SGD, Recipe, RecoverSection, left_open


def for_recovery(recipe: Recipe, model: nn.Module) -> tuple[Recipe, str | None]:
    """The recipe with `recover.optimizer: auto` resolved, and a note about it or None. model: the dense one.

    "auto" is SGD for a classifier with batch normalization of images (BatchNorm2d), with the values of `BY_SGD` for those
    fields that are not set (one that is set to its default stays); else it is Adam. Other settings have no influence on the
    choice, so that a run which is resumed with another learning rate keeps its optimizer.
    """
    recover = recipe.recover
    if recover.optimizer != "auto":
        return recipe, None
    fits = recipe.task == "classification" and not recipe.data.unlabelled and _normalised(model)
    section = recover.model_copy(update={"optimizer": "sgd" if fits else "adam"})
    said = None
    if fits:
        chosen = left_open(recover)
        section = _with(section, {field: BY_SGD[field] for field in chosen})
        kept = [f"recover.{field}" for field in BY_SGD if field not in chosen]
        stays = f"; {' and '.join(kept)} as set" if kept else ""
        answers = " with the dense model's answers" if section.distill.weight else ""
        without = " without them" if "distill.weight" in chosen else ""
        said = (
            f"recover.optimizer auto: SGD at {section.lr:g}{answers}, as the network has batch normalization{stays} "
            f"(for Adam at {recover.lr:g}{without}: --set recover.optimizer=adam)"
        )
    return recipe.model_copy(update={"recover": section}), said if recover.epochs else None


def steady(asked: Recipe, resolved: Recipe) -> RecoverSection | None:
    """What recovers by Adam if SGD was chosen for `recover.optimizer: auto` and running statistics stay; None if it was not.

    asked: the recipe before `for_recovery`; resolved: after it. A rate that is set counts up to Adam's own.
    """
    section = resolved.recover
    if asked.recover.optimizer != "auto" or section.optimizer != "sgd":
        return None
    rate = min(asked.recover.lr, RecoverSection().lr)
    return asked.recover.model_copy(update={"optimizer": "adam", "lr": rate, "distill": section.distill})


def slowed(section: RecoverSection, rate: float | None) -> RecoverSection:
    """The section with a learning rate of at most `rate` (None: its own)."""
    return section if rate is None else section.model_copy(update={"lr": min(section.lr, rate)})


def _with(section: Any, settings: dict[str, Any]) -> Any:
    """A copy of a section with values for some fields, and for those of its own sections, named with dots."""
    own: dict[str, Any] = {}
    inner: dict[str, dict[str, Any]] = {}
    for field, value in settings.items():
        name, dot, rest = field.partition(".")
        if dot:
            inner.setdefault(name, {})[rest] = value
        else:
            own[name] = value
    own |= {name: _with(getattr(section, name), values) for name, values in inner.items()}
    return section.model_copy(update=own)


def _normalised(model: nn.Module) -> bool:
    return any(isinstance(layer, nn.BatchNorm2d | nn.SyncBatchNorm) for layer in model.modules())
