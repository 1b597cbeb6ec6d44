"""Turning the graph of one draw into a graph that loops over draws.

Every node that does not depend on noise is computed once, before the loop: among them the mean and variance of a first layer
with noise on its output. The loop's body holds the rest, and adds each draw's statistics to sums, so that memory does not
grow with the number of samples. What depends on the sums comes after the loop.

A round of the loop makes several draws at once where possible: calling a node costs as much as computing some thousand
numbers, and a batch of one row has few. Nodes after the last layer whose weights are drawn work on the rows of all draws
(see `_rows`). Nodes before that, where each draw has its own weights, form an inner loop over the draws of the round.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from svdcompress.errors import ExportError
from svdcompress.export._build import Builder, dependent, inner_nodes, read_by, replace
from svdcompress.export._draw import NOISE, SAMPLES, SUM, DrawModule, chunk_name
from svdcompress.export._guards import at_least, checked_outputs, checked_samples
from svdcompress.export._noise import Call
from svdcompress.export._posterior import Posterior
from svdcompress.export._rows import RowsError, led_by_batch, repeat_rows
from svdcompress.export._trace import OWN, merge_constants

if TYPE_CHECKING:
    import onnx_ir as ir

ROUND = 2**16
"""Limit on numbers in the widest activation of a round of several draws: 256 KiB of float32. Measured: half is slower."""


def add_loop(model: ir.Model, draw: DrawModule, several: bool) -> Rounds:
    """Turn the graph of a `Traced` into that of a file, in place. Its inputs are then the model's, `samples`, and `noise`
    (samples, numbers).

    several: make several draws in a round; raises RowsError if the graph does not allow it.
    """
    import onnx_ir as ir

    if several and any(None in shape for shape in draw.sums):
        raise RowsError("the shape of the outputs is open")
    graph = model.graph
    inputs = {value.name: value for value in graph.inputs}
    statistics, outputs = graph.outputs[: len(draw.sums)], graph.outputs[len(draw.sums) :]
    totals = [inputs[f"{SUM}{i}"] for i in range(len(draw.sums))]
    chunks = [inputs[chunk_name(i)] for i in range(len(draw.calls))]
    data = [value for value in graph.inputs if value not in (*totals, *chunks) and value.name != SAMPLES]
    noise = ir.Value(name=NOISE, shape=ir.Shape([SAMPLES, "numbers"]), type=ir.TensorType(ir.DataType.FLOAT))

    nodes = list(graph)
    _batch_of_inputs(nodes, totals, data[0])
    noisy, late = dependent(nodes, chunks), dependent(nodes, totals)
    for node in noisy:
        graph.remove(node)
    parts = _Parts(noisy, statistics, list(zip(chunks, draw.calls, strict=True)), several)
    op = Builder(graph)
    rounds = Rounds(op, draw, data, inputs[SAMPLES], parts)
    replace(nodes, inputs[SAMPLES], rounds.samples)
    if several:
        repeat_rows(op, parts.tail, data, rounds.copies, op.shape(rounds.rows))
    body = rounds.make_body(noise)
    # Open dimensions start at 1: the first addition gives the sums the shape of a draw.
    shapes = [[1 if size is None else size for size in shape] for shape in draw.sums]
    starts = [op("ConstantOfShape", op.shape(rounds.batch, *shape), value=ir.Tensor(np.zeros(1))) for shape in shapes]
    results = op.many("Loop", len(starts), rounds.trips, op.constant(True), *starts, body=body)
    for total, result in zip(totals, results, strict=True):
        replace(late, total, result)
    rounds.loop = results[0].producer()
    graph.inputs[:] = [*data, inputs[SAMPLES], noise]
    graph.outputs[:] = checked_outputs(op, outputs)
    try:
        graph.sort()
    except ValueError as error:  # a cycle
        raise ExportError(
            f"monte_carlo: the draws depend on their own sums ({error}); please report it, with the model"
        ) from error
    return rounds


def _batch_of_inputs(nodes: Sequence[ir.Node], totals: Sequence[ir.Value], first: ir.Value) -> None:
    """Let the size of the batch be that of the first input: `torch.export` may have read it from the sums, which have it, too,
    but are the result of the loop that needs it."""
    for node in (inner for outer in nodes for inner in inner_nodes(outer)):
        start, end = node.attributes.get_int("start", 0), node.attributes.get_int("end", None)
        if node.op_type == "Shape" and node.inputs[0] in totals and (start, end) == (0, 1):
            node.replace_input_with(0, first)


class _Parts:
    """The nodes of a draw in two parts: those up to the last that reads a drawn parameter, and those that follow.

    head: the nodes that read drawn parameters and those they depend on; empty if no parameter is drawn, or if a round makes
    a single draw. tail: the rest. crossing: values of the head that the tail reads, or that are statistics. width: numbers
    in the widest of them, for one row of the batch.
    """

    def __init__(
        self, nodes: list[ir.Node], statistics: Sequence[ir.Value], chunks: list[tuple[ir.Value, Call]], several: bool
    ) -> None:
        self.nodes, self.statistics, self.chunks, self.several = nodes, list(statistics), chunks, several
        self.head = self._head() if several else []
        inside = set(self.head)
        self.tail = [node for node in nodes if node not in inside]
        made = {value for node in self.head for value in node.outputs}
        self.crossing = [value for value in dict.fromkeys([*read_by(self.tail), *statistics]) if value in made]
        self.width = 1
        if several:
            self._check(inside)

    def _head(self) -> list[ir.Node]:
        drawn = {value for value, call in self.chunks if call.posterior is not None}
        found: set[ir.Node] = set()
        wanted: set[ir.Value] = set()
        for node in reversed(self.nodes):
            read = read_by([node])
            if any(value in drawn for value in read) or any(value in wanted for value in node.outputs):
                found.add(node)
                wanted.update(read)
        return [node for node in self.nodes if node in found]

    def _check(self, inside: set[ir.Node]) -> None:
        """Raises RowsError unless several draws of the tail can be rows of one batch."""
        read = set(read_by(self.tail))
        for value, call in self.chunks:
            if value in read and (call.shape[:1] != (None,) or None in call.shape[1:] or call.fixed):
                raise RowsError(f"the noise of {call.layer} has the shape {call.shape}")
        for value in self.crossing:
            if not led_by_batch(value) or value.shape is None or not all(isinstance(dim, int) for dim in value.shape[1:]):
                raise RowsError(f"{value.name} has the shape {value.shape}")
            self.width = max(self.width, int(np.prod([int(str(dim)) for dim in value.shape[1:]])))


class Rounds:
    """How many draws a round of the loop makes, and the loop's body.

    batch, samples, copies (draws in a round), rows (of all copies), trips (number of rounds): int64 scalars of the graph.
    sizes: numbers of noise that each call takes in a draw, a vector. loop: the Loop node. body: its graph. pieces: the
    round's noise, a value (copies, size) for each call.
    """

    loop: ir.Node | None
    body: ir.Graph
    pieces: list[ir.Value]

    def __init__(self, op: Builder, draw: DrawModule, data: Sequence[ir.Value], samples: ir.Value, parts: _Parts) -> None:
        self.op, self.draw, self.parts = op, draw, parts
        one = self.one = op.constant(1)
        self.batch = at_least(op, op("Squeeze", op("Shape", data[0], start=0, end=1)), one, "batch_must_be_1_or_more")
        self.samples = checked_samples(op, samples, data, parts.nodes)
        self.copies, self.rows, self.trips = one, self.batch, self.samples
        if parts.several:
            most = op("Div", op.constant(ROUND), self._numbers())
            self.trips = self._rounded_up(self.samples, op("Max", most, one))
            self.copies = self._rounded_up(self.samples, self.trips)  # evenly: the last round makes few draws in vain
            self.rows = op("Mul", self.copies, self.batch)
        sizes = op("Mul", self.batch, op.constant([call.per_row for call in draw.calls]))
        fixed = [call.fixed for call in draw.calls]
        self.sizes = op("Add", sizes, op.constant(fixed)) if any(fixed) else sizes

    def _numbers(self) -> ir.Value:
        """Numbers for one draw in the largest tensor that a round holds for all of its draws."""
        parameters = sum(call.posterior.mean.numel() for call in self.draw.calls if call.posterior is not None)
        width = self.draw.widest if not self.parts.head else self.parts.width
        numbers = self.op("Mul", self.batch, self.op.constant(width))
        return self.op("Max", numbers, self.op.constant(parameters)) if parameters else numbers

    def _rounded_up(self, value: ir.Value, by: ir.Value) -> ir.Value:
        op = self.op
        return op("Div", op("Add", value, op("Sub", by, self.one)), by)

    def make_body(self, noise: ir.Value) -> ir.Graph:
        """The loop's body: one round, with its statistics added to the sums."""
        import onnx_ir as ir

        parts, draw = self.parts, self.draw
        index, going = _counter("round"), _going("going")
        shapes = [ir.Shape(["batch", *shape]) for shape in draw.sums]
        double = ir.TensorType(ir.DataType.DOUBLE)
        before = [ir.Value(name=f"{OWN}sum_{i}", shape=shape, type=double) for i, shape in enumerate(shapes)]
        self.body = ir.Graph([index, going, *before], [], nodes=[], name="draw")
        op = Builder(self.body, constants=self.op.graph, stem="body_")
        places = self._places(op, index)
        self.pieces = self._read(op, noise, places)
        values = [
            op("Reshape", piece, self.op.constant([-1])) if call.posterior is None else self._placed(op, piece, call.posterior)
            for piece, call in zip(self.pieces, draw.calls, strict=True)
        ]
        if parts.head:
            self._add_head(op, values)
        for (chunk, _), value in zip(parts.chunks, values, strict=True):
            replace(parts.tail, chunk, value)
        self.body.extend(parts.tail)
        new = [self._summed(op, value, places, shape) for value, shape in zip(parts.statistics, draw.sums, strict=True)]
        after = [op("Identity", going), *(op("Add", old, value) for old, value in zip(before, new, strict=True))]
        for output, like in zip(after, (going, *before), strict=True):
            output.type, output.shape = like.type, like.shape
        self.body.outputs.extend(after)
        return self.body

    def _places(self, op: Builder, index: ir.Value) -> ir.Value:
        """Indices of the draws in the round, (copies,). The last round may go beyond `samples`."""
        outer = self.op
        if not self.parts.several:
            return op("Reshape", index, outer.constant([1]))
        steps = outer("Range", outer.constant(0), self.copies, self.one)
        return op("Add", op("Mul", index, self.copies), steps)

    def _read(self, op: Builder, noise: ir.Value, places: ir.Value) -> list[ir.Value]:
        """The round's noise, read from the input: for each call that of all draws, (copies, size)."""
        if self.parts.several:
            places = op("Min", places, self.op("Sub", self.samples, self.one))
        block = op("Gather", noise, places, axis=0, name="noise_must_have_a_row_for_each_sample")
        name = "noise_must_have_the_batch's_numbers"
        return op.many("Split", len(self.draw.calls), block, self.sizes, axis=1, name=name)

    def _placed(self, op: Builder, piece: ir.Value, posterior: Posterior) -> ir.Value:
        """A drawn parameter for all draws of the round, (copies, *its shape), or for its only one, of its shape."""
        outer, mask = self.op, posterior.mask
        mean, std = (tensor.flatten() if mask is None else tensor[mask] for tensor in (posterior.mean, posterior.std))
        noise = op("Reshape", piece, outer.shape(self.copies, posterior.count))
        drawn = op("Add", op("Mul", noise, outer.constant(std.numpy(), np.float32)), outer.constant(mean.numpy(), np.float32))
        if mask is not None:  # all others take the 0 that is padded at the end
            places = np.where(mask.flatten().numpy(), mask.flatten().cumsum(0).numpy() - 1, posterior.count)
            padded = op("Pad", drawn, outer.constant([0, 0, 0, 1]))
            drawn = op("Gather", padded, outer.constant(places, np.int32), axis=1)
        copies = [self.copies] if self.parts.several else []
        return op("Reshape", drawn, outer.shape(*copies, *posterior.mean.shape))

    def _add_head(self, op: Builder, values: list[ir.Value]) -> None:
        """Add the inner loop; the tail then reads the crossing values for the rows of all draws."""
        import onnx_ir as ir

        parts = self.parts
        index, going = _counter("draw"), _going("drawing")
        body = ir.Graph([index, going], [], nodes=[], name="head")
        inner, read = Builder(body, constants=self.op.graph, stem="head_"), set(read_by(parts.head))
        for i, ((chunk, call), value) in enumerate(zip(parts.chunks, values, strict=True)):
            if chunk in read:
                source = value if call.posterior is not None else self.pieces[i]
                replace(parts.head, chunk, inner("Gather", source, index, axis=0))
        body.extend(parts.head)
        still = inner("Identity", going)
        still.type, still.shape = going.type, going.shape
        body.outputs.extend([still, *parts.crossing])
        stacked = op.many("Loop", len(parts.crossing), self.copies, self.op.constant(True), body=body)
        for value, draws in zip(parts.crossing, stacked, strict=True):
            assert value.shape is not None
            rows = op("Reshape", draws, self.op.shape(self.rows, *(int(str(dim)) for dim in value.shape[1:])))
            replace(parts.tail, value, rows)
            parts.statistics = [rows if statistic is value else statistic for statistic in parts.statistics]

    def _summed(self, op: Builder, value: ir.Value, places: ir.Value, shape: tuple[int | None, ...]) -> ir.Value:
        """A statistic summed over the round's draws, except those beyond `samples`."""
        if not self.parts.several:
            return value
        outer = self.op
        sizes = [size for size in shape if size is not None]  # all of them, or there would not be several draws in a round
        draws = op("Reshape", value, outer.shape(self.copies, self.batch, *sizes))
        counts = op("Reshape", op("Less", places, self.samples), outer.constant([-1, *[1] * (1 + len(shape))]))
        return op("ReduceSum", op("Where", counts, draws, outer.constant(0, np.float64)), outer.constant([0]), keepdims=0)


def _counter(name: str) -> ir.Value:
    import onnx_ir as ir

    return ir.Value(name=f"{OWN}{name}", shape=ir.Shape([]), type=ir.TensorType(ir.DataType.INT64))


def _going(name: str) -> ir.Value:
    import onnx_ir as ir

    return ir.Value(name=f"{OWN}{name}", shape=ir.Shape([]), type=ir.TensorType(ir.DataType.BOOL))


def finish(model: ir.Model) -> None:
    """Merge equal constants, remove unused nodes and sort the graph."""
    import onnx_ir.passes.common as passes

    merge_constants(model)

    passes.RemoveUnusedNodesPass()(model)
    model.graph.sort()
