"""Rearranges torch's convolutions in bfloat16 so that a CPU computes them correctly, and none far slower than necessary."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from svdcompress.layers._in_parts import goes_wrong, has_wide_kernel, in_bfloat16, in_parts
from svdcompress.layers._side_by_side import AMX, has_many_weights, laid, side_by_side

_DIRECT = (F.conv1d, F.conv2d, F.conv3d)
_TENSORS = ("input", "weight", "bias")
_MORE = (("stride", 1), ("padding", 0), ("dilation", 1), ("groups", 1))
"""The arguments of F.conv2d after the bias, with their defaults."""

_TRANSPOSED = 6
"""Position of the argument `transposed` of torch.convolution."""


def _argument(args: Any, kwargs: dict[str, Any], place: int, name: str, default: Any) -> Any:
    return args[place] if len(args) > place else kwargs.get(name, default)


class _Arranged(TorchFunctionMode):
    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        direct = func in _DIRECT or (func is torch.convolution and not _argument(args, kwargs, _TRANSPOSED, "transposed", True))
        if not direct:
            return func(*args, **kwargs)
        x, weight, bias = (_argument(args, kwargs, place, name, None) for place, name in enumerate(_TENSORS))
        if x is None or weight is None or not in_bfloat16(x):  # torch reports missing tensors itself
            return func(*args, **kwargs)
        named = {name: value for name, value in kwargs.items() if name not in _TENSORS}

        def call(x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
            return func(x, weight, bias, *args[3:], **named)

        if goes_wrong(x, weight):
            return in_parts(call, x, weight, bias)
        if func is F.conv2d:
            more = [_argument(args, kwargs, place, *rest) for place, rest in enumerate(_MORE, 3)]
            if (how := laid(x, weight, *more)) is not None:
                return side_by_side(call, x, weight, bias, *how)
        return func(*args, **kwargs)


def arranged_convolutions(models: Iterable[nn.Module]) -> AbstractContextManager[Any]:
    """Context in which torch's bfloat16 convolutions on a CPU, also those of dense layers, are computed by `in_parts` or
    `side_by_side` where needed. It does nothing if no model has weights that need them, since it makes every torch call a
    little slower."""
    weights = [parameter for model in models for parameter in model.parameters()]
    wanted = any(map(has_wide_kernel, weights)) or (AMX and any(map(has_many_weights, weights)))
    return _Arranged() if wanted else nullcontext()
