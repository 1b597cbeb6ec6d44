"""A check, before training, that this CPU computes convolutions correctly in bfloat16."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.conv import _ConvNd

from svdcompress.batch import call
from svdcompress.convert import as_it_was
from svdcompress.errors import TrainingError
from svdcompress.hooks import hooked
from svdcompress.train._precision import computing
from svdcompress.train._work import Work

OFF = 0.5
"""A result is wrong above this relative distance from that of float32 on the same numbers; right ones are below 0.01."""


def refuse_wrong(work: Work) -> None:
    """Compare each convolution of the model and its teacher in bfloat16 with the same in float32, on one batch.

    oneDNN has had kernels for bfloat16 that were silently wrong for some shapes (PyTorch issues 163347 and 169688; wide
    kernels, which `in_parts` avoids), so its results are checked. Other devices and precisions are not.

    Raises TrainingError, with the layer's name, if the two are far apart.
    """
    if work.device.type != "cpu" or work.accelerator.mixed_precision != "bf16":
        return

    def batch() -> Any:
        return work.first_batch("right")[0]

    for whose, model in (("", work.model), ("the teacher's ", work.teacher.model if work.teacher is not None else None)):
        found = {} if model is None else _distances(model, batch, work.lower)
        for name, off in found.items():
            if off > OFF:
                raise TrainingError(
                    f"{work.section}.precision: this CPU computes {whose}layer {name!r} incorrectly in bfloat16 (off from "
                    f"float32 by {off:.1f} times its result): a bug in torch {torch.__version__} on this machine. Set "
                    f"{work.section}.precision=no, or train on a GPU"
                )


def is_right(model: nn.Module, inputs: Any, precision: str, device: torch.device | str) -> bool:
    """Whether a model, which is on the device, computes its convolutions correctly in a precision from `resolved_precision`."""
    if torch.device(device).type != "cpu" or precision != "bf16":
        return True
    found = _distances(model, lambda: inputs, lambda: computing(precision, device, [model]))
    return all(off <= OFF for off in found.values())


def _distances(
    model: nn.Module, batch: Callable[[], Any], lower: Callable[[], AbstractContextManager[Any]]
) -> dict[str, float]:
    """How much each convolution's results in bfloat16 differ from those in float32, relative to the latter. batch: gives
    inputs; lower: the context of bfloat16."""
    layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, _ConvNd)]
    if not layers:
        return {}
    found: dict[str, float] = {}

    def hook(name: str) -> Any:
        busy = False

        def look(layer: nn.Module, given: tuple[Any, ...], named: dict[str, Any], output: Tensor) -> None:
            nonlocal busy
            if busy or not isinstance(output, Tensor):
                return
            busy = True  # the call below triggers this hook, too
            # On numbers rounded to bfloat16: rounding alone is no fault, even if little else is left of a sum that cancels.
            weights = {key: _rounded(value) for key, value in layer._parameters.items() if value is not None}
            named = {key: _rounded(value) for key, value in named.items()}
            with torch.autocast("cpu", enabled=False):
                exact = functional_call(layer, weights, tuple(map(_rounded, given)), named)
            busy = False
            if not exact.isfinite().all() or not exact.any():  # training reports the former
                return
            off = float((output.float() - exact).norm() / exact.norm())
            found[name] = max(math.inf if math.isnan(off) else off, found.get(name, 0.0))

        return look

    hooks = (layer.register_forward_hook(hook(name), with_kwargs=True) for name, layer in layers)
    try:
        with hooked(hooks), as_it_was(model, False), torch.no_grad(), lower():
            call(model, batch())
    except Exception:  # from the user's model or data: training will meet it too, and explain it
        return found
    return found


def _rounded(value: Any) -> Any:
    return value.bfloat16().float() if isinstance(value, Tensor) and value.is_floating_point() else value
