"""Convolutions over few positions and many channels, whose images a CPU with AMX would take one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

AMX = bool(getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)())
"""Whether this CPU multiplies tiles."""

FEW = 16
"""Positions of an image up to which its product is too small for AMX, whose tiles have 16 rows."""

MANY = 128 * 128 * 9
"""Weights from which laying images of 2 x 2 side by side pays, and so many for each four positions more: below, copying them
takes what it saves."""


def side_by_side(
    call: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None, padding: int, across: int
) -> Tensor:
    """`call(x, weight, bias)`, a convolution whose images lie in one row of one image, with the padding between them.

    With AMX oneDNN makes a product of its own for each image: of 512 channels on 2 x 2 positions a step in
    bfloat16 takes five times as long as so, on 4 x 4 twice.

    call: a convolution with that padding, stride 1. x: (batch, channels, rows, columns); weight: (outputs, channels, *kernel).
    across: columns that a window covers beside its first one.
    """
    batch, channels, rows, columns = x.shape
    wide = columns + padding  # of one image to the next: a window reaches no further than the padding
    row = F.pad(x, (0, padding)).permute(1, 2, 0, 3).reshape(1, channels, rows, batch * wide)
    found = call(row, weight, bias)[0]
    if found.shape[-1] != batch * wide:
        found = F.pad(found, (0, batch * wide - found.shape[-1]))
    found = found.unflatten(-1, (batch, wide))[..., : columns + 2 * padding - across].permute(2, 0, 1, 3)
    return found.contiguous()  # models may call view on it


def laid(x: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any, groups: int) -> tuple[int, int] | None:
    """The last two arguments of `side_by_side` for a convolution in bfloat16, if that gives the same faster on this CPU."""
    fits = x.dim() == 4 and x.shape[1:2] == weight.shape[1:2] and groups == 1 and _both(stride) == (1, 1)
    if not fits or isinstance(padding, str) or not has_many_weights(weight) or not AMX:
        return None
    positions = x.shape[2:].numel()
    if x.shape[0] < 2 or positions > FEW or 4 * weight.numel() < MANY * positions:
        return None
    gap, across = _both(padding)[1], (weight.shape[3] - 1) * _both(dilation)[1]
    return (gap, across) if gap <= across < x.shape[3] + 2 * gap else None


def has_many_weights(weight: Tensor) -> bool:
    """Whether a kernel has enough weights, and more than one position."""
    return weight.dim() == 4 and weight.shape[2:].numel() > 1 and weight.numel() >= MANY


def _both(value: Any) -> tuple[int, int]:
    return (value[0], value[-1]) if isinstance(value, Sequence) else (value, value)
