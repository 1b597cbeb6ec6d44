"""Convolutions that torch gets wrong in bfloat16 on some CPUs, in parts that it gets right."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

WIDE = 5
"""Positions along an axis from which a kernel is wide: with 3 all was right, up to 4,096 channels."""

MOST = 8192
"""Products that are summed for one number of the output; with more a wide kernel may go wrong."""

_CALLS = (F.conv1d, F.conv2d, F.conv3d, torch.convolution)
_TRANSPOSED = 6
"""Where torch.convolution has that argument."""


def in_parts(call: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`call(x, weight, bias)`, a convolution; in bfloat16, on a CPU, by groups of input channels where its kernel is wide.

    With AMX oneDNN multiplies such a result by the length of the kernel, without a word (torch 2.13: a kernel of 1 x 64 over
    1,024 channels gives 64 times the result, and takes four times as long as in float32; gradients are right). Parts are added
    in float32 and rounded once more.

    call: a convolution without transposition. x: (batch, channels, *space), or without the batch; weight: (outputs, channels,
    *kernel). One of several groups is left as it is.
    """
    if not _wrong(x, weight):
        return call(x, weight, bias)
    x, weight, axis = x.to(torch.bfloat16), weight.to(torch.bfloat16), 1 - weight.dim()
    channels = max(1, MOST // weight[0, 0].numel())
    parts = zip(x.split(channels, axis), weight.split(channels, 1), strict=True)
    total: Any = sum(call(part, kernel, None).float() for part, kernel in parts)
    if bias is not None:
        total = total + bias.float().reshape(-1, *[1] * (weight.dim() - 2))
    return total.to(torch.bfloat16)


def _wrong(x: Tensor, weight: Tensor) -> bool:
    if not _wide(weight) or x.device.type != "cpu":
        return False
    casts = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16
    half = x.dtype == torch.bfloat16 or (casts and x.dtype != torch.float64)  # which autocast leaves as it is
    return half and x.shape[1 - weight.dim()] == weight.shape[1]


def _wide(weight: Tensor) -> bool:
    return weight.dim() > 2 and max(weight.shape[2:]) >= WIDE and weight.shape[1:].numel() > MOST


def _transposed(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> bool:
    if func is not torch.convolution:
        return False
    return args[_TRANSPOSED] if len(args) > _TRANSPOSED else kwargs["transposed"]


class _InParts(TorchFunctionMode):
    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _CALLS or len(args) < 2 or _transposed(func, args, kwargs) or not _wrong(*args[:2]):
            return func(*args, **kwargs)
        named = {name: value for name, value in kwargs.items() if name != "bias"}
        bias = args[2] if len(args) > 2 else kwargs.get("bias")
        x, weight = args[:2]
        return in_parts(lambda x, weight, none: func(x, weight, none, *args[3:], **named), x, weight, bias)


def convolutions_in_parts(models: Iterable[nn.Module]) -> AbstractContextManager[Any]:
    """Within it `in_parts` does all convolutions of torch, those of dense layers too; nothing where no model has a wide one,
    as every call of torch takes a little longer then."""
    wide = any(_wide(parameter) for model in models for parameter in model.parameters())
    return _InParts() if wide else nullcontext()
