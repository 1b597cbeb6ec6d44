"""A batch of inputs: its size, slices of it, and whether it can be predicted at all."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from svdcompress.batch import map_tensors
from svdcompress.errors import DataError, ModelError, UsageError


def batch_size(inputs: Any) -> int:
    """The size of the first dimension of the first tensor in a tensor, tuple or mapping.

    Raises UsageError if there is no tensor, DataError for an empty batch, a single number or values that are not finite.
    """
    found: list[Tensor] = []
    map_tensors(inputs, found.append)
    if not found:
        raise UsageError(f"x: a {type(inputs).__name__} without a tensor; give a tensor, a tuple of them, or a dict by name")
    for value in found:
        # A sum is finite only if all its terms are: seven times faster than looking at each number.
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
    """Inputs `start` to `stop` of a batch of `size`: tensors with that first dimension are cut, others are kept whole."""

    def cut(tensor: Tensor) -> Tensor:
        return tensor[start:stop] if tensor.dim() > 0 and tensor.shape[0] == size else tensor

    return map_tensors(inputs, cut)


def check_rows(heads: Any, rows: int, ahead: int = 0) -> None:
    """Raise ModelError unless each head (a tensor, or a tuple of them) has one row for each of `rows` inputs.

    ahead: number of dimensions before the rows, such as that of the draws. Sums are kept by input: with fewer rows, some of
    them would stay 0.
    """
    for head in tree_leaves(heads):
        if not isinstance(head, Tensor):
            continue  # likelihoods report what they cannot read themselves
        found = head.shape[ahead] if head.dim() > ahead else 0
        if found != rows:
            what = f"{found} row{'s' * (found != 1)}" if head.dim() > ahead else "a single number"
            raise ModelError(
                f"the model's output has {what} for {rows} inputs; a prediction takes one row for each input, in their order. "
                "A model that pools over its first dimension treats the batch as one input: add a batch dimension in front"
            )


def device_of(model: nn.Module) -> torch.device:
    """The device of a model's first parameter or buffer (the CPU if it has none)."""
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device
    return torch.device("cpu")
