"""Checks within a Monte-Carlo graph. ONNX has no assertions, but a Gather beyond the end of a tensor fails, with the node's
name in the runtime's message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from svdcompress.export._build import Builder, dependent

if TYPE_CHECKING:
    import onnx_ir as ir

MOST_SAMPLES = 2**31 - 1
"""Maximum number of samples: more would take years, and a good deal more would overflow the arithmetic of the rounds."""


def at_least(op: Builder, value: ir.Value, least: ir.Value, name: str) -> ir.Value:
    """A scalar that has to be no less than another; otherwise the node `name` fails."""
    return op("Add", value, _zero_unless(op, op("Less", value, least), name))


def checked_samples(op: Builder, samples: ir.Value, data: Sequence[ir.Value], noisy: Sequence[ir.Node]) -> ir.Value:
    """`samples` as a scalar; a node fails unless it is in range, floating inputs are finite and indices are 0 or more. noisy:
    nodes that are no longer in the graph, which may look up indices, too."""
    scalar = op("Reshape", samples, op.constant([]), name="samples_must_be_one_number")
    scalar = at_least(op, scalar, op.constant(1), "samples_must_be_1_or_more")
    too_many = op("Div", scalar, op.constant(MOST_SAMPLES + 1))
    scalar = op("Add", scalar, op("Gather", op.constant([0]), too_many, name="samples_must_be_below_2_to_the_31"))
    for value in data:
        if value.dtype is not None and value.dtype.is_floating_point():
            # Max pooling, for example, could hide a NaN and leave a confident prediction.
            scalar = op("Add", scalar, _zero_unless(op, _not_finite(op, value), f"{value.name}_must_be_finite"))
        # ONNX counts indices below 0 from the end, where PyTorch's embedding fails: -1 would be the last word.
        below = op.constant(0)
        for index in (indices := _looked_up(op, value, noisy)):
            negative = op("Less", index, op("CastLike", op.constant(0), index))
            below = op("Add", below, op("ReduceSum", op("Cast", negative, to=7), keepdims=0))
        if indices:
            wrong = op("Less", op.constant(0), below)
            scalar = op("Add", scalar, _zero_unless(op, wrong, f"{value.name}_must_be_0_or_more"))
    return scalar


def _looked_up(op: Builder, data: ir.Value, noisy: Sequence[ir.Node]) -> list[ir.Value]:
    """Indices computed from an input (or the input itself) by which rows of a constant matrix, or of a drawn one, are taken."""
    quiet = list(op.graph)
    known = {data, *(output for node in dependent(quiet, [data], through_shapes=False) for output in node.outputs)}
    found = []
    for node in (*quiet, *noisy):
        index = node.inputs[1] if node.op_type == "Gather" else None
        matrix = node.inputs[0].shape if index is not None and node.inputs[0] is not None else None
        if index in known and (index is data or (matrix is not None and len(matrix) == 2 and node.inputs[0] not in known)):
            found.append(index)
    return list(dict.fromkeys(found))


def checked_outputs(op: Builder, outputs: Sequence[ir.Value]) -> list[ir.Value]:
    """The file's outputs; a node fails unless mean and variance are finite, which they are not if any draw is not."""
    mean, variance = (next(value for value in outputs if value.name == name) for name in ("mean", "variance"))
    zero = _zero_unless(op, _not_finite(op, op("Add", mean, variance)), "outputs_must_be_finite", np.float32)
    checked = []
    for value in outputs:
        name = value.name
        value.name = f"{name}_unchecked"
        result = op("Add", value, zero)
        result.name, result.type, result.shape = name, value.type, value.shape
        checked.append(result)
    return checked


def _not_finite(op: Builder, value: ir.Value) -> ir.Value:
    return op("IsNaN", op("ReduceSum", op("Mul", value, op.constant(0, np.float32)), keepdims=0))  # 0 * infinity is NaN


def _zero_unless(op: Builder, wrong: ir.Value, name: str, dtype: type = np.int64) -> ir.Value:
    return op("Gather", op.constant([0], dtype), op("Cast", wrong, to=7), name=name)
