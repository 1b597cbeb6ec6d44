"""Finds the heads in an output: the one place that separates means and log variances."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from svdcompress.batch import main_output
from svdcompress.errors import ModelError, UsageError

PAIR_ADVICE = (
    "return mean and log variance as a pair and nothing else, or both in one tensor, which is 'prediction' in a dict if there "
    "are further outputs"
)
"""What to do about several outputs."""


class HeadsError(ModelError):
    """An output that cannot be split into the heads that its likelihood reads."""


def class_axis(rank: int, dim: int) -> int:
    """The dimension of classes or heads, counted from the front. Raises UsageError if the output has no such dimension."""
    axis = dim + rank if dim < 0 else dim
    if not 1 <= axis < rank:
        raise UsageError(f"dim: {dim}; the class dimension of an output with {rank} dimensions is 1 to {rank - 1}")
    return axis


def is_pair(output: Any) -> bool:
    """Whether an output is two tensors and nothing else: mean and log variance apart. Of any other output, such as a tuple of
    three tensors, a likelihood reads the main tensor."""
    return isinstance(output, tuple | list) and len(output) == 2 and all(isinstance(part, Tensor) for part in output)


def gaussian_heads(output: Any, dim: int = 1) -> tuple[Tensor, Tensor]:
    """Mean and log variance: a pair of equal tensors (`is_pair`), or one tensor with the means in the first half of its
    dimension `dim`.

    Raises HeadsError for halves of different shapes, and for two tensors beside None, which an ONNX file leaves out;
    UsageError if there is no such dimension.
    """
    if is_pair(output):
        mean, log_variance = output
        if mean.shape == log_variance.shape:
            return mean, log_variance
        shapes = f"{tuple(mean.shape)} and {tuple(log_variance.shape)}"
        raise HeadsError(f"task 'gaussian' needs means and log variances of the same shape, not {shapes}; {PAIR_ADVICE}")
    if isinstance(output, tuple | list) and is_pair([part for part in output if part is not None]):
        raise HeadsError(f"task 'gaussian' cannot tell what two tensors and None are; {PAIR_ADVICE}")
    values = main_output(output)
    axis = class_axis(values.dim(), dim) if values.dim() > 1 else 0
    count = values.shape[axis] if axis else 1
    if count % 2:
        hint = "" if isinstance(output, Tensor) else f" in the first tensor; {PAIR_ADVICE}"
        raise HeadsError(f"task 'gaussian' needs means and log variances: an even number of outputs, not {count}{hint}")
    mean, log_variance = values.chunk(2, axis)
    return mean, log_variance
