"""Convolutions over few positions and many channels, whose images a CPU with AMX would compute one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

AMX = bool(getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)())
"""Whether this CPU has AMX, which multiplies tiles."""

FEW = 16
"""Number of positions up to which an image's product is too small for AMX, whose tiles have 16 rows."""

MANY = 128 * 128 * 9
"""Number of weights from which laying images of 2 x 2 positions side by side pays; larger images need that many for every
four positions. With fewer weights, copying the images takes the time that it saves."""


def side_by_side(
    call: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None, padding: int, across: int
) -> Tensor:
    """`call(x, weight, bias)`, a convolution, with all images side by side in a single image and the padding between them.

    With AMX, oneDNN computes a separate product for each image: with 512 channels, a step in bfloat16 takes five times as
    long as side by side on 2 x 2 positions, and twice as long on 4 x 4.

    call: a convolution with this padding, stride 1. x: (batch, channels, rows, columns); weight: (outputs, channels, *kernel).
    across: columns that a window covers in addition to its first.
    """
    batch, channels, rows, columns = x.shape
    wide = columns + padding  # from one image to the next: a window reaches no further than the padding
    row = F.pad(x, (0, padding)).permute(1, 2, 0, 3).reshape(1, channels, rows, batch * wide)
    found = call(row, weight, bias)[0]
    if found.shape[-1] != batch * wide:
        found = F.pad(found, (0, batch * wide - found.shape[-1]))
    found = found.unflatten(-1, (batch, wide))[..., : columns + 2 * padding - across].permute(2, 0, 1, 3)
    return found.contiguous()  # models may call view on it


def laid(x: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any, groups: int) -> tuple[int, int] | None:
    """The last two arguments of `side_by_side` for a bfloat16 convolution; None if invalid or no faster on this CPU."""
    fits = x.dim() == 4 and x.shape[1:2] == weight.shape[1:2] and groups == 1 and _both(stride) == (1, 1)
    if not fits or isinstance(padding, str) or not has_many_weights(weight) or not AMX:
        return None
    positions = x.shape[2:].numel()
    if x.shape[0] < 2 or positions > FEW or 4 * weight.numel() < MANY * positions:
        return None
    gap, across = _both(padding)[1], (weight.shape[3] - 1) * _both(dilation)[1]
    return (gap, across) if gap <= across < x.shape[3] + 2 * gap else None


def has_many_weights(weight: Tensor) -> bool:
    """Whether a weight is that of a 2d convolution with enough weights and more than one kernel position."""
    return weight.dim() == 4 and weight.shape[2:].numel() > 1 and weight.numel() >= MANY


def _both(value: Any) -> tuple[int, int]:
    return (value[0], value[-1]) if isinstance(value, Sequence) else (value, value)
