"""A look at whether this CPU computes convolutions right in bfloat16, before they are trained on."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.conv import _ConvNd

from svdcompress.batch import call
from svdcompress.convert import as_it_was
from svdcompress.errors import TrainingError
from svdcompress.train._work import Work

OFF = 0.5
"""Distance from what float32 gives of the same numbers, relative to it, from which a result is wrong; else it is below 0.01."""


def refuse_wrong(work: Work) -> None:
    """Compute each convolution of the model and its teacher for one batch in bfloat16 and in float32.

    oneDNN has had kernels for bfloat16 that were wrong without a word for some shapes (PyTorch issues 163347 and 169688;
    wide kernels, which `in_parts` avoids), so what it gives is looked at. Other devices and precisions are not.

    Raises TrainingError where one is far from the other, with the layer's name.
    """
    if work.device.type != "cpu" or work.accelerator.mixed_precision != "bf16":
        return
    for whose, model in (("", work.model), ("the teacher's ", work.teacher.model if work.teacher is not None else None)):
        for name, off in _distances(work, model).items() if model is not None else ():
            if off > OFF:
                raise TrainingError(
                    f"{work.section}.precision: in bfloat16 this CPU computes {whose}layer {name!r} wrong ({off:.1f} times its "
                    f"result away from float32): a fault of torch {torch.__version__} on this machine. "
                    f"Set {work.section}.precision=no, or train on a GPU"
                )


def _distances(work: Work, model: nn.Module) -> dict[str, float]:
    """By how much the convolutions' results in bfloat16 differ from those in float32, relative to these."""
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
            busy = True  # this call is hooked, too
            # With what bfloat16 has of the numbers: rounding alone is no fault, however much of it a sum cancels down to.
            weights = {key: _rounded(value) for key, value in layer._parameters.items() if value is not None}
            named = {key: _rounded(value) for key, value in named.items()}
            with torch.autocast("cpu", enabled=False):
                exact = functional_call(layer, weights, tuple(map(_rounded, given)), named)
            busy = False
            if not exact.isfinite().all() or not exact.any():  # the training tells of the former
                return
            off = float((output.float() - exact).norm() / exact.norm())
            found[name] = max(math.inf if math.isnan(off) else off, found.get(name, 0.0))

        return look

    handles = [layer.register_forward_hook(hook(name), with_kwargs=True) for name, layer in layers]
    try:
        with as_it_was(model, False), torch.no_grad(), work.autocast(), work.right:
            call(model, work.first_batch("right")[0])
    except Exception:  # of the user's model or data: training will meet it too, and say whose it is
        return found
    finally:
        for handle in handles:
            handle.remove()
    return found


def _rounded(value: Any) -> Any:
    return value.bfloat16().float() if isinstance(value, Tensor) and value.is_floating_point() else value
