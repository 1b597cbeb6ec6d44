"""Several draws in one pass: the nodes that depend on noise work on the batch repeated, one copy of it for each draw.

What they read from nodes that do not depend on noise is adapted: values with the batch first are repeated, and shapes are
computed again. This requires that rows of a batch do not affect each other, which the comparison with PyTorch checks.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from svdcompress.export._build import Builder, dependent, read_by, replace

if TYPE_CHECKING:
    import onnx_ir as ir


class RowsError(Exception):
    """A graph whose batch cannot be repeated."""


def repeat_rows(op: Builder, noisy: Sequence[ir.Node], data: Sequence[ir.Value], copies: ir.Value, rows: ir.Value) -> None:
    """Make the noisy nodes read values for all copies of the batch. Values must still have their traced shapes.

    data: the model's inputs. copies: their number, a scalar. rows: copies * batch, of shape (1,).
    """
    quiet = list(op.graph)
    values = {output for node in dependent(quiet, data, through_shapes=False) for output in node.outputs} | set(data)
    shapes = {output for node in dependent(quiet, data) for output in node.outputs} - values
    made: dict[ir.Value, ir.Value] = {}
    for value in read_by(noisy):
        if value in values:
            new = _repeated(op, value, copies)
        elif value in shapes:
            new = _recomputed(op, value, rows, values, shapes, made)
        else:
            continue
        if new is not value:
            replace(noisy, value, new)


def led_by_batch(value: ir.Value) -> bool:
    """Whether the batch is the first dimension. Raises RowsError if it is elsewhere, or if the shape is unknown."""
    if value.shape is None:
        raise RowsError(f"the shape of {value.name} is unknown")
    batch = [re.search(r"\bbatch\b", str(dim)) is not None for dim in value.shape]
    if any(batch[1:]) or (batch and batch[0] and str(value.shape[0]) != "batch"):
        raise RowsError(f"{value.name} has the shape {value.shape}")
    return bool(batch) and batch[0]


def _repeated(op: Builder, value: ir.Value, copies: ir.Value) -> ir.Value:
    if not led_by_batch(value):
        return value
    assert value.shape is not None
    return op("Tile", value, op.shape(copies, *[1] * (len(value.shape) - 1)))


def _recomputed(
    op: Builder, value: ir.Value, rows: ir.Value, values: set[ir.Value], shapes: set[ir.Value], made: dict[ir.Value, ir.Value]
) -> ir.Value:
    """A value that depends on shapes alone, computed again for `rows` rows."""
    if value not in shapes:
        return value
    if value not in made:
        node = value.producer()
        assert node is not None
        if node.op_type == "Shape" and node.inputs[0] in values:
            made[value] = _shape(op, node, rows)
        elif (
            len(node.outputs) == 1
            and node.op_type != "Size"
            and not any(attr.type.name.startswith("GRAPH") for attr in node.attributes.values())
        ):
            inputs = [i if i is None else _recomputed(op, i, rows, values, shapes, made) for i in node.inputs]
            attributes: Any = node.attributes
            made[value] = op(node.op_type, *inputs, **attributes)
        else:
            raise RowsError(f"{node.op_type} of a shape")
    return made[value]


def _shape(op: Builder, node: ir.Node, rows: ir.Value) -> ir.Value:
    source, output = node.inputs[0], node.outputs[0]
    assert source is not None
    start, end = (node.attributes[name].as_int() if name in node.attributes else None for name in ("start", "end"))
    if not led_by_batch(source) or (start is not None and start > 0):
        return output
    if start in (None, 0) and end == 1:
        return rows
    if start in (None, 0) and end is None:
        return op("Concat", rows, op("Shape", source, start=1), axis=0)
    raise RowsError(f"part {start} to {end} of a shape")
