"""Explains a loss that is not finite: in which layer such values first appear, and what to try."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from svdcompress.batch import call, map_tensors
from svdcompress.errors import TrainingError
from svdcompress.hooks import hooked

INPUTS = "in the input batch"


class NotFinite(TrainingError):
    """A loss that is not finite.

    stage: the stage in which it occurred; section: the section of the recipe whose settings may be changed on resuming.
    where: its step and epoch, in words. keeps_norms: whether batch normalizations kept their running statistics. rate: the
    learning rate at which the steps may have been too large; None if the inputs were not finite.
    """

    def __init__(
        self,
        message: str,
        stage: str = "",  # so that it can be pickled, with its attributes, for the other processes of a launch
        section: str | None = None,
        *,
        where: str = "",
        keeps_norms: bool = False,
        rate: float | None = None,
    ) -> None:
        super().__init__(message)
        self.stage, self.section, self.where = stage, section or stage, where
        self.keeps_norms, self.rate = keeps_norms, rate


def explain(
    model: nn.Module,
    inputs: Any,
    names: tuple[str, str],
    where: tuple[int, int],
    value: float,
    kept: str,
    autocast: AbstractContextManager[Any],
    keeps_norms: bool = False,
    rate: float | None = None,
) -> NotFinite:
    """The error for a loss that is not finite; the model is run once more on the batch, as in training, to find the layer.

    names: of the stage, and of its section of the recipe. where: its step and epoch. keeps_norms: whether batch normalizations
    kept their running statistics. rate: the learning rate of the stage.
    """
    (stage, section), at = names, f"at step {where[0]} (epoch {where[1] + 1})"
    with autocast:
        first = first_nonfinite(model, inputs)
    cause = f"the first values that are not finite are {first}" if first else "the model's output is finite, its loss is not"
    norms = ""
    if keeps_norms:
        norms = " Batch normalizations keep their running statistics here, which does not work well with large learning rates: "
        norms += f"{section}.norms=batch, in a new run, lets batches update them."
    return NotFinite(
        f"{stage}: the loss is {value} {at}: {cause}. "
        f"Try a smaller learning rate ({section}.lr), clipping ({section}.clip=1) or {section}.precision=no, or look at the "
        f"data. {kept}{norms}",
        stage,
        section,
        where=at,
        keeps_norms=keeps_norms,
        rate=None if first == INPUTS else rate,
    )


@torch.no_grad()
def first_nonfinite(model: nn.Module, inputs: Any) -> str:
    """Where values that are not finite first appear: the inputs, a layer's weights or its output; "" if nowhere."""
    found: list[str] = []

    def finite(value: Any) -> bool:
        bad: list[Tensor] = []
        map_tensors(value, lambda t: bad.append(t) if t.is_floating_point() and not torch.isfinite(t).all() else None)
        return not bad

    def before(name: str):
        def hook(module: nn.Module, args: tuple) -> None:
            if not found and not finite(list(module.parameters(recurse=False))):
                found.append(f"the weights of layer {name!r}")

        return hook

    def after(name: str):
        def hook(module: nn.Module, args: tuple, output: Any) -> None:
            if not found and not finite(output):
                found.append(f"the output of layer {name!r}")

        return hook

    if not finite(inputs):
        return INPUTS
    leaves = [(name, module) for name, module in model.named_modules() if not list(module.children())]
    ahead = (module.register_forward_pre_hook(before(name)) for name, module in leaves)
    with hooked(ahead), hooked(module.register_forward_hook(after(name)) for name, module in leaves):
        call(model, inputs)
    return found[0] if found else ""
