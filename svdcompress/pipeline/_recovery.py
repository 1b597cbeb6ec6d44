"""How a pruned network recovers where the recipe leaves that to the network (`recover.optimizer: auto`)."""

from __future__ import annotations

from typing import Any

from torch import nn

from svdcompress.recipe import Distillation, Recipe, RecoverSection

LR, WEIGHT_DECAY, WARMUP, ANSWERS, TEMPERATURE = 0.01, 5e-4, "5%", 0.9, 3.0
"""Of the SGD that brings pruned classifiers with batch normalisation further than Adam does (benchmarks/recovery.py and
recovery_auto.py)."""


def for_recovery(recipe: Recipe, model: nn.Module) -> tuple[Recipe, str | None]:
    """A recipe whose `recover.optimizer` is settled, and what to say of it. model: the dense one.

    auto is SGD with the dense model's answers as targets for a classifier with convolutions and batch normalisation, unless
    another learning rate, weight decay or distillation is asked for; else it is Adam with the settings as they are. A schedule
    that is asked for stays, as do layers as targets.
    """
    recover = recipe.recover
    if recover.optimizer != "auto":
        return recipe, None
    asked, said = _asked(recover), None
    fits = recover.epochs > 0 and recipe.task == "classification" and not recipe.data.unlabelled and _normalised(model)
    settings: dict[str, Any] = {"optimizer": "adam"}
    if fits and asked:
        said = f"recover.optimizer auto: Adam, as {' and '.join(asked)} {'is' if len(asked) == 1 else 'are'} set; "
        said += "--set recover.optimizer=sgd brings networks with batch normalisation further, with a larger learning rate"
    elif fits:
        own = recover.schedule
        schedule = own if own != type(own)() else own.model_copy(update={"warmup": WARMUP})
        distill = recover.distill.model_copy(update={"weight": ANSWERS, "temperature": TEMPERATURE})
        settings = {"optimizer": "sgd", "lr": LR, "weight_decay": WEIGHT_DECAY, "schedule": schedule, "distill": distill}
        said = (
            f"recover.optimizer auto: SGD at {LR:g} with the dense model's answers, as the network has batch normalisation "
            f"(--set recover.optimizer=adam: Adam at {recover.lr:g}, without them)"
        )
    return recipe.model_copy(update={"recover": recover.model_copy(update=settings)}), said


def _asked(recover: RecoverSection) -> list[str]:
    """What of `recover` is not as it is by itself, and says that somebody has thought of an optimizer."""
    plain = RecoverSection()
    found = [f"recover.{name}" for name in ("lr", "weight_decay") if getattr(recover, name) != getattr(plain, name)]
    own, default = recover.distill, Distillation()
    answers = [name for name in ("weight", "temperature") if getattr(own, name) != getattr(default, name)]
    return found + [f"recover.distill.{name}" for name in answers]


def _normalised(model: nn.Module) -> bool:
    return any(isinstance(layer, nn.BatchNorm2d) for layer in model.modules())
