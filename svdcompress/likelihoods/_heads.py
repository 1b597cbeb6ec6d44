"""Finds the heads in an output: the one place that separates means and log variances."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from svdcompress.batch import main_output
from svdcompress.errors import ModelError, UsageError


class HeadsError(ModelError):
    """An output that cannot be split into the heads that its likelihood reads."""


def class_axis(rank: int, dim: int) -> int:
    """The dimension of classes or heads, counted from the front. Raises UsageError if the output has no such dimension."""
    axis = dim + rank if dim < 0 else dim
    if not 1 <= axis < rank:
        raise UsageError(f"dim: {dim}; the class dimension of an output with {rank} dimensions is 1 to {rank - 1}")
    return axis


def gaussian_heads(output: Any, dim: int = 1) -> tuple[Tensor, Tensor]:
    """Mean and log variance: a pair of equal tensors, or one tensor with the means in the first half of its dimension `dim`.

    Raises HeadsError for halves of different shapes, UsageError if there is no such dimension.
    """
    if isinstance(output, tuple | list) and len(output) == 2:
        mean, log_variance = output
        if mean.shape == log_variance.shape:
            return mean, log_variance
        shapes = f"{tuple(mean.shape)} and {tuple(log_variance.shape)}"
        raise HeadsError(f"task 'gaussian' needs means and log variances of the same shape, not {shapes}")
    values = main_output(output)
    axis = class_axis(values.dim(), dim) if values.dim() > 1 else 0
    count = values.shape[axis] if axis else 1
    if count % 2:
        raise HeadsError(f"task 'gaussian' needs means and log variances: an even number of outputs, not {count}")
    mean, log_variance = values.chunk(2, axis)
    return mean, log_variance
