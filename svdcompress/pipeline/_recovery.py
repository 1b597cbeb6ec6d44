"""How a pruned network recovers if the recipe leaves the optimizer open (`recover.optimizer: auto`)."""

from __future__ import annotations

from typing import Any

from torch import nn

from svdcompress.recipe import Recipe, RecoverSection

BY_SGD: dict[str, Any] = {
    "lr": 0.01,
    "weight_decay": 5e-4,
    "schedule": {"warmup": "5%"},
    "distill": {"weight": 0.9, "temperature": 3.0},
}
"""Settings for SGD, which brings pruned classifiers with batch normalization further than Adam does (benchmarks/recovery.py
and recovery_auto.py)."""


def for_recovery(recipe: Recipe, model: nn.Module) -> tuple[Recipe, str | None]:
    """The recipe with `recover.optimizer: auto` resolved, and a note about it or None. model: the dense one.

    "auto" is SGD for a classifier with batch normalization of images (BatchNorm2d), with the values of `BY_SGD` for those
    fields that have their defaults; else it is Adam. Other settings have no influence on the choice, so that a run which is
    resumed with another learning rate keeps its optimizer.
    """
    recover = recipe.recover
    if recover.optimizer != "auto":
        return recipe, None
    fits = recipe.task == "classification" and not recipe.data.unlabelled and _normalised(model)
    section = recover.model_copy(update={"optimizer": "sgd" if fits else "adam"})
    said = None
    if fits:
        section, kept = _filled(section, RecoverSection(), BY_SGD, "recover.")
        stays = f"; {' and '.join(kept)} as set" if kept else ""
        said = (
            f"recover.optimizer auto: SGD at {section.lr:g} with the dense model's answers, as the network has batch "
            f"normalization{stays} (for Adam at {recover.lr:g} without them: --set recover.optimizer=adam)"
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


def _filled(section: Any, plain: Any, settings: dict[str, Any], prefix: str) -> tuple[Any, list[str]]:
    """The section with `settings` in place of its defaults, and the names of fields that the user has set to something else."""
    found, kept = {}, []
    for name, value in settings.items():
        own, default = getattr(section, name), getattr(plain, name)
        if isinstance(value, dict):
            found[name], inner = _filled(own, default, value, f"{prefix}{name}.")
            kept += inner
        elif own != default:
            kept.append(f"{prefix}{name}")
        else:
            found[name] = value
    return section.model_copy(update=found), kept


def _normalised(model: nn.Module) -> bool:
    return any(isinstance(layer, nn.BatchNorm2d | nn.SyncBatchNorm) for layer in model.modules())
