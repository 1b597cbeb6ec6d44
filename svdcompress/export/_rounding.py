"""Rounding weights to a few bits: each channel's step size is the one whose error counts the least."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from svdcompress.errors import UsageError

if TYPE_CHECKING:
    from onnx import GraphProto

SHARES = np.linspace(0.5, 1.0, 26)
"""Where the last step may be, as shares of a channel's largest weight: below 1, steps are finer, but clip a few weights."""

MANY = 8
"""Bits from which on the last step is at the largest weight: clipping it costs more than finer steps gain."""


def steps(array: np.ndarray, bits: int, axis: int = 0, importance: np.ndarray | None = None) -> np.ndarray:
    """The step size of each channel along an axis, float64, in a shape that broadcasts; 0 for a channel of zeros.

    array: of any shape (...). Below 8 bits, the one of SHARES with the smallest sum of squared rounding errors is taken,
    where each weight's counts times its `importance` (of the array's shape, at least 0; None: all alike). With 1 / sigma2 of
    a Gaussian posterior, the sum is twice what rounding adds to the KL divergence from it.
    """
    last = 2 ** (bits - 1) - 1
    others = tuple(dim for dim in range(array.ndim) if dim != axis)
    whole = np.abs(array.astype(np.float64)).max(others, keepdims=True, initial=0.0) / last
    if bits >= MANY:
        return whole
    weights = 1.0 if importance is None else importance.astype(np.float64)
    best, least = whole, np.full(whole.shape, np.inf)
    for share in SHARES[::-1]:  # the largest first: it is kept unless another is better
        step = share * whole
        error = (weights * (codes(array, step, bits) * step - array) ** 2).sum(others, keepdims=True)
        best, least = np.where(error < least, step, best), np.minimum(error, least)
    return best


def codes(array: np.ndarray, step: np.ndarray, bits: int) -> np.ndarray:
    """The nearest whole number of steps for each weight, float64, one of 2**bits - 1; 0 where the step is 0."""
    last = 2 ** (bits - 1) - 1
    return np.clip(np.rint(array / np.where(step > 0, step, 1.0)), -last, last)


def of_weight(importance: Mapping[str, np.ndarray], name: str, array: np.ndarray, flipped: bool) -> np.ndarray | None:
    """The importance given for a weight, in the graph's layout; None if there is none.

    flipped: whether the graph holds the weight transposed. Raises UsageError for another shape, and for numbers that are not
    finite or below 0.
    """
    if name not in importance:
        return None
    found = np.asarray(importance[name], np.float64)
    found = found.T if flipped else found
    if found.shape != array.shape:
        raise UsageError(f"importance: {name!r} has the shape {found.shape}, but the weight has {array.shape}")
    if not np.isfinite(found).all() or (found < 0).any():
        raise UsageError(f"importance: {name!r} has numbers that are below 0 or not finite")
    return found


def flipped(graph: GraphProto) -> set[str]:
    """Names of the weights that a graph holds transposed, compared with those of the Linear layers they come from."""
    matrices = {tensor.name for tensor in graph.initializer if len(tensor.dims) == 2}
    return second_dimension(graph) & matrices


def second_dimension(graph: GraphProto) -> set[str]:
    """Names of the weights with the output channels in their second dimension; in all others they are in the first."""
    found = set()
    for node in graph.node:
        transposed = any(attribute.name == "transB" and attribute.i for attribute in node.attribute)
        if node.op_type in ("ConvTranspose", "MatMul") or (node.op_type == "Gemm" and not transposed):
            found.update(node.input[1:2])
    return found
