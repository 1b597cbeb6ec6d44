"""A batch of inputs: its size, slices of it, and whether it can be predicted at all."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from svdcompress.batch import map_tensors
from svdcompress.errors import DataError, UsageError


def batch_size(inputs: Any) -> int:
    """The first dimension of the first tensor of a tensor, tuple or mapping.

    Raises UsageError where there is no tensor, DataError for an empty batch or for values that are not finite.
    """
    found: list[Tensor] = []
    map_tensors(inputs, found.append)
    if not found:
        raise UsageError(f"x: a {type(inputs).__name__} without a tensor; give a tensor, a tuple of them, or a dict by name")
    for value in found:
        # A sum is finite only if all that it sums is: seven times faster than looking at each number.
        if value.is_floating_point() and not value.sum().isfinite() and not bool(value.isfinite().all()):
            bad = int((~value.isfinite()).sum())
            raise DataError(f"x: {bad:,} of the {value.numel():,} values are not finite (NaN or infinite)")
    shape = tuple(found[0].shape)
    if not shape:
        raise DataError("x: a single number; inputs have the batch as their first dimension")
    if shape[0] == 0:
        raise DataError(f"x: a batch of 0 inputs, shape {shape}; there is nothing to predict")
    return shape[0]


def take(inputs: Any, start: int, stop: int, size: int) -> Any:
    """Inputs `start` to `stop` of a batch of `size`: whatever has that first dimension is cut, the rest goes along."""

    def cut(tensor: Tensor) -> Tensor:
        return tensor[start:stop] if tensor.dim() > 0 and tensor.shape[0] == size else tensor

    return map_tensors(inputs, cut)


def device_of(model: nn.Module) -> torch.device:
    """Where a model's first parameter or buffer is (the CPU if it has none)."""
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device
    return torch.device("cpu")
