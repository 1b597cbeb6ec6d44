"""Splits convolutions that torch gets wrong in bfloat16 on some CPUs into parts that it gets right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

WIDE = 5
"""Positions along an axis from which a kernel counts as wide: with 3, all results were right up to 4,096 channels."""

MOST = 8192
"""Largest number of products summed for one element of the output; with more, a wide kernel may go wrong."""


def in_parts(call: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`call(x, weight, bias)`, a convolution; with a wide kernel in bfloat16 on a CPU, computed over parts of the input
    channels.

    With AMX, oneDNN silently multiplies such a result by the length of the kernel (torch 2.13: a kernel of 1 x 64 over 1,024
    channels gives 64 times the result, and takes four times as long as in float32; gradients are right). The parts are added
    in float32, and their sum is rounded again.

    call: a convolution without transposition. x: (batch, channels, *space), or without the batch; weight: (outputs, channels,
    *kernel). A grouped convolution is left as it is.
    """
    if not goes_wrong(x, weight):
        return call(x, weight, bias)
    x, weight, axis = x.to(torch.bfloat16), weight.to(torch.bfloat16), 1 - weight.dim()
    channels = max(1, MOST // weight[0, 0].numel())
    parts = zip(x.split(channels, axis), weight.split(channels, 1), strict=True)
    total: Any = sum(call(part, kernel, None).float() for part, kernel in parts)
    if bias is not None:
        total = total + bias.float().reshape(-1, *[1] * (weight.dim() - 2))
    return total.to(torch.bfloat16)


def goes_wrong(x: Tensor, weight: Tensor) -> bool:
    """Whether torch may get the convolution of x with this weight wrong."""
    return has_wide_kernel(weight) and in_bfloat16(x) and x.shape[1 - weight.dim()] == weight.shape[1]


def in_bfloat16(x: Tensor) -> bool:
    """Whether x is on a CPU and convolutions compute with it in bfloat16."""
    if x.device.type != "cpu":
        return False
    casts = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16
    return x.dtype == torch.bfloat16 or (casts and x.dtype != torch.float64)  # autocast leaves float64 as it is


def has_wide_kernel(weight: Tensor) -> bool:
    """Whether a weight has a kernel that is wide, over enough channels for torch to get it wrong."""
    return weight.dim() > 2 and max(weight.shape[2:]) >= WIDE and weight.shape[1:].numel() > MOST
