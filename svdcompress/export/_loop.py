"""From the graph of one draw to a graph that loops over draws.

Every node that depends on no noise is computed once, ahead of the loop: the first variational layer's mean and variance
among them. The loop's body holds the rest, and adds each draw's statistics to sums, so that memory does not grow with the
number of samples. What depends on the sums comes after the loop.

Where the model is narrow, a round of the loop makes several draws at once: calling a node costs as much as some thousand
numbers, and a batch of one row has few.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from svdcompress.export._build import Builder, dependent, replace
from svdcompress.export._draw import NOISE, SAMPLES, SUM, Draw
from svdcompress.export._rows import repeat_rows
from svdcompress.export._trace import OWN

if TYPE_CHECKING:
    import onnx_ir as ir

ROUND = 2**16
"""Numbers in the widest activation of a round that makes several draws: 256 KiB of float32. Measured: half is slower."""

FLAT, COUNT = f"{OWN}noise", f"{OWN}numbers"


def add_loop(model: ir.Model, draw: Draw, several: bool) -> None:
    """Turn the graph of a `Traced` into that of a file; inputs: the model's, `samples`, and `noise` (samples, numbers).

    several: have a round make several draws; raises RowsError where the graph is not of that kind.
    """
    import onnx_ir as ir

    graph = model.graph
    inputs = {value.name: value for value in graph.inputs}
    statistics, outputs = graph.outputs[: len(draw.sums)], graph.outputs[len(draw.sums) :]
    totals = [inputs[f"{SUM}{i}"] for i in range(len(draw.sums))]
    data = [value for value in graph.inputs if value not in totals and value.name not in (SAMPLES, NOISE)]
    noise = ir.Value(name=NOISE, shape=ir.Shape([SAMPLES, "numbers"]), type=ir.TensorType(ir.DataType.FLOAT))

    nodes = list(graph)
    noisy, late = dependent(nodes, [inputs[NOISE]]), dependent(nodes, totals)
    for node in noisy:
        graph.remove(node)
    op = Builder(graph)
    rounds = _Rounds(op, draw, data, inputs[SAMPLES], several)
    replace(nodes, inputs[SAMPLES], rounds.samples)
    if several:
        repeat_rows(op, noisy, data, rounds.copies, op.shape(rounds.rows))
    body = rounds.body(noisy, statistics, inputs[NOISE], noise)
    starts = [op("ConstantOfShape", op.shape(rounds.batch, *shape), value=ir.Tensor(np.zeros(1))) for shape in draw.sums]
    results = op.many("Loop", len(starts), rounds.trips, op.constant(True), *starts, body=body)
    for total, result in zip(totals, results, strict=True):
        replace(late, total, result)
    graph.inputs[:] = [*data, inputs[SAMPLES], noise]
    graph.outputs[:] = outputs
    graph.sort()


class _Rounds:
    """How many draws a round of the loop makes, and its body.

    batch, samples, copies (draws of a round), rows (of all copies), trips (rounds): int64 scalars of the graph.
    """

    def __init__(self, op: Builder, draw: Draw, data: Sequence[ir.Value], samples: ir.Value, several: bool) -> None:
        self.op, self.draw, self.several = op, draw, several
        one = self.one = op.constant(1)
        rows = op("Squeeze", op("Shape", data[0], start=0, end=1))
        self.batch = self._checked(rows, "batch_must_be_1_or_more")
        scalar = op("Reshape", samples, op.constant([]), name="samples_must_be_one_number")
        self.samples = self._checked(scalar, "samples_must_be_1_or_more")
        for value in data:
            if value.dtype is not None and value.dtype.is_floating_point():
                self.samples = op("Add", self.samples, self._unless_finite(value))
        self.copies, self.rows, self.trips = one, self.batch, self.samples
        if several:
            most = op("Div", op.constant(ROUND), op("Mul", self.batch, op.constant(draw.widest)))
            self.trips = self._rounded_up(self.samples, op("Max", most, one))
            self.copies = self._rounded_up(self.samples, self.trips)  # evenly: few draws are made in vain in the last round
            self.rows = op("Mul", self.copies, self.batch)
        numbers = op("Mul", self.rows, op.constant(sum(call.per_row for call in draw.calls)))
        op("Add", numbers, op.constant(sum(call.fixed for call in draw.calls)), name=COUNT)

    def _checked(self, value: ir.Value, name: str) -> ir.Value:
        """A scalar once it is known to be 1 or more: ONNX has no assertions, but a Gather beyond the end of a tensor fails,
        with the node's name in the runtime's message."""
        return self.op("Add", value, self._zero_unless(self.op("Less", value, self.one), name))

    def _unless_finite(self, value: ir.Value) -> ir.Value:
        """0 for an input of finite numbers. Maximum pooling, for one, would hide a NaN and leave a sure prediction."""
        op = self.op
        total = op("ReduceSum", op("Mul", value, op.constant(0, np.float32)), keepdims=0)  # 0, or NaN
        return self._zero_unless(op("IsNaN", total), f"{value.name}_must_be_finite")

    def _zero_unless(self, wrong: ir.Value, name: str) -> ir.Value:
        op = self.op
        return op("Gather", op.constant([0]), op("Cast", wrong, to=7), name=name)

    def _rounded_up(self, value: ir.Value, by: ir.Value) -> ir.Value:
        op = self.op
        return op("Div", op("Add", value, op("Sub", by, self.one)), by)

    def body(self, nodes: Sequence[ir.Node], statistics: Sequence[ir.Value], one_noise: ir.Value, noise: ir.Value) -> ir.Graph:
        """The loop's body: a round, its statistics added to the sums."""
        import onnx_ir as ir

        index = ir.Value(name=f"{OWN}round", shape=ir.Shape([]), type=ir.TensorType(ir.DataType.INT64))
        going = ir.Value(name=f"{OWN}going", shape=ir.Shape([]), type=ir.TensorType(ir.DataType.BOOL))
        shapes = [ir.Shape(["batch", *shape]) for shape in self.draw.sums]
        double = ir.TensorType(ir.DataType.DOUBLE)
        before = [ir.Value(name=f"{OWN}sum_{i}", shape=shape, type=double) for i, shape in enumerate(shapes)]
        body = ir.Graph([index, going, *before], [], nodes=[], name="draw")
        op = Builder(body, constants=self.op.graph, stem="body_")
        places = self._places(op, index) if self.several else index
        replace(nodes, one_noise, self._read(op, noise, places))
        body.extend(nodes)
        new = [self._summed(op, value, places, shape) for value, shape in zip(statistics, self.draw.sums, strict=True)]
        after = [op("Identity", going), *(op("Add", old, value) for old, value in zip(before, new, strict=True))]
        for output, like in zip(after, (going, *before), strict=True):
            output.type, output.shape = like.type, like.shape
        body.outputs.extend(after)
        return body

    def _places(self, op: Builder, index: ir.Value) -> ir.Value:
        """Which draws the round makes, by number: (copies,). The last round may go beyond `samples`."""
        outer = self.op
        steps = outer("Range", outer.constant(0), self.copies, self.one)
        return op("Add", op("Mul", index, self.copies), steps)

    def _read(self, op: Builder, noise: ir.Value, places: ir.Value) -> ir.Value:
        """The round's noise from the input: for each call of a layer that of all draws, one after the other."""
        name = "noise_must_have_a_row_for_each_sample"
        if not self.several:
            return op("Identity", op("Gather", noise, places, axis=0, name=name), name=FLAT)
        outer, calls = self.op, self.draw.calls
        last = outer("Sub", self.samples, self.one)
        block = op("Gather", noise, op("Min", places, last), axis=0, name=name)  # (copies, numbers)
        sizes = outer("Mul", self.batch, outer.constant([call.per_row for call in calls]))
        parts = op.many("Split", len(calls), block, sizes, axis=1, name="noise_must_have_the_batch's_numbers")
        flat = outer.constant([-1])
        return op("Concat", *(op("Reshape", part, flat) for part in parts), axis=0, name=FLAT)

    def _summed(self, op: Builder, value: ir.Value, places: ir.Value, shape: tuple[int, ...]) -> ir.Value:
        """A statistic of the round's draws, summed over those that count."""
        if not self.several:
            return value
        outer = self.op
        draws = op("Reshape", value, outer.shape(self.copies, self.batch, *shape))
        counts = op("Reshape", op("Less", places, self.samples), outer.constant([-1, *[1] * (1 + len(shape))]))
        return op("ReduceSum", op("Where", counts, draws, outer.constant(0, np.float64)), outer.constant([0]), keepdims=0)


def draw_inside(model: ir.Model) -> None:
    """Have the loop draw its noise itself, standard normal, instead of reading it from an input.

    All noise of a round comes from one generator node: neighbouring nodes of onnxruntime start from neighbouring seeds, and so
    begin alike. It is unseeded: a seed in the file would have every session replay the same noise. Normal numbers come by
    pairs from uniform ones (Box & Muller 1958), which is cheaper than onnxruntime's RandomNormal.
    """
    graph = model.graph
    graph.inputs.pop()
    old = next(value for node in graph.all_nodes() for value in node.outputs if value.name == FLAT)
    count = next(value for node in graph for value in node.outputs if value.name == COUNT)
    place = old.producer()
    assert place is not None and place.graph is not None
    outer, op = Builder(graph, stem="outer_"), Builder(place.graph, constants=graph, stem="drawn_")
    half = outer("Div", outer("Add", count, outer.constant(1)), outer.constant(2))
    like = outer("ConstantOfShape", outer.shape(outer("Mul", half, outer.constant(2))))
    pair = op.many("Split", 2, op("RandomUniformLike", like, dtype=1), axis=0, num_outputs=2)
    number = lambda value: outer.constant(value, np.float32)  # noqa: E731
    above_zero = op("Max", op("Sub", number(1), pair[0]), number(2**-25))
    radius = op("Sqrt", op("Mul", op("Log", above_zero), number(-2)))
    angle = op("Mul", pair[1], number(2 * math.pi))
    both = op("Concat", op("Mul", radius, op("Cos", angle)), op("Mul", radius, op("Sin", angle)), axis=0)
    drawn = op("Slice", both, outer.constant([0]), outer.shape(count), name=f"{OWN}drawn")
    replace(list(place.graph), old, drawn)


def finish(model: ir.Model) -> None:
    """Take out what nothing reads, and put all in order."""
    import onnx_ir.passes.common as passes

    passes.RemoveUnusedNodesPass()(model)
    model.graph.sort()
