"""From the graph of one draw to a graph that loops over draws.

Every node that depends on no noise is computed once, ahead of the loop: the first variational layer's mean and variance
among them. The loop's body holds the rest, and adds each draw's statistics to sums, so that memory does not grow with the
number of samples. What depends on the sums comes after the loop.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from svdcompress.export._draw import NOISE, SAMPLES, SUM
from svdcompress.export._trace import OWN

if TYPE_CHECKING:
    import onnx_ir as ir


def add_loop(model: ir.Model, sums: Sequence[tuple[int, ...]]) -> None:
    """Turn the graph of a `Traced` into that of a file; inputs: the model's, `samples`, and `noise` (samples, numbers).

    sums: shapes of the sums for one row of the batch.
    """
    import onnx_ir as ir

    graph = model.graph
    inputs = {value.name: value for value in graph.inputs}
    statistics, outputs = graph.outputs[: len(sums)], graph.outputs[len(sums) :]
    totals = [inputs[f"{SUM}{i}"] for i in range(len(sums))]
    data = [value for value in graph.inputs if value not in totals and value.name not in (SAMPLES, NOISE)]
    noise = ir.Value(name=NOISE, shape=ir.Shape([SAMPLES, "numbers"]), type=ir.TensorType(ir.DataType.FLOAT))

    nodes = list(graph)
    noisy, late = _dependent(nodes, [inputs[NOISE]]), _dependent(nodes, totals)
    for node in noisy:
        graph.remove(node)
    op = _Builder(graph)
    trip = _checked(op, data[0], inputs[SAMPLES], nodes)
    starts = [_zeros(op, data[0], shape) for shape in sums]
    body = _body(op, noisy, statistics, sums, inputs[NOISE], noise)
    results = op(
        "Loop",
        trip,
        op.constant(True),
        *starts,
        outputs=[ir.Value(name=f"{OWN}total_{i}") for i in range(len(sums))],
        body=body,
    )
    for total, result in zip(totals, results, strict=True):
        _replace(late, total, result)
    graph.inputs[:] = [*data, inputs[SAMPLES], noise]
    graph.outputs[:] = outputs
    for name in [name for name, value in graph.initializers.items() if not value.uses()]:
        del graph.initializers[name]
    graph.sort()


def draw_inside(model: ir.Model, per_row: int, fixed: int) -> None:
    """Have the loop draw its noise itself, standard normal, instead of reading it from an input.

    All noise of a draw comes from one generator node: neighbouring nodes of onnxruntime start from neighbouring seeds, and so
    begin alike. It is unseeded: a seed in the file would have every session replay the same noise.

    per_row, fixed: numbers of a draw for each row of the batch, and beside them.
    """
    graph = model.graph
    noise = graph.inputs[-1]
    (read,) = (node for node in graph.all_nodes() if noise in node.inputs)
    op = _Builder(graph)
    numbers = op("Add", op("Mul", _batch(op, graph.inputs[0]), op.constant([per_row])), op.constant([fixed]))
    read.graph.insert_before(
        read, node := _node("RandomNormalLike", [op("ConstantOfShape", numbers)], {"dtype": 1}, [f"{OWN}drawn"])
    )
    read.outputs[0].replace_all_uses_with(node.outputs[0])
    read.graph.remove(read, safe=True)
    graph.inputs.pop()
    graph.sort()


def _checked(op: _Builder, data: ir.Value, samples: ir.Value, readers: Iterable[ir.Node]) -> ir.Value:
    """`samples` once it and the batch are known to be 1 or more: ONNX has no assertions, but a Gather beyond the end of a
    tensor fails, with the node's name in the runtime's message."""
    one, empty = op.constant(1), op.constant([0])
    trip = scalar = op("Reshape", samples, op.constant([]), name="samples_must_be_one_number")
    for value, name in ((scalar, "samples_must_be_1_or_more"), (op("Squeeze", _batch(op, data)), "batch_must_be_1_or_more")):
        bad = op("Cast", op("Less", value, one), to=7)
        trip = op("Add", trip, op("Gather", empty, bad, name=name))
    _replace(readers, samples, trip)
    return trip


def _body(
    op: _Builder,
    nodes: Sequence[ir.Node],
    statistics: Sequence[ir.Value],
    sums: Sequence[tuple[int, ...]],
    one_noise: ir.Value,
    noise: ir.Value,
) -> ir.Graph:
    """The loop's body: one draw, added to the sums."""
    import onnx_ir as ir

    index = ir.Value(name=f"{OWN}index", shape=ir.Shape([]), type=ir.TensorType(ir.DataType.INT64))
    going = ir.Value(name=f"{OWN}going", shape=ir.Shape([]), type=ir.TensorType(ir.DataType.BOOL))
    row = _node("Gather", [noise, index], {"axis": 0}, [f"{OWN}row"], name="noise_must_have_a_row_for_each_sample")
    _replace(nodes, one_noise, row.outputs[0])
    double = ir.TensorType(ir.DataType.DOUBLE)
    before = [ir.Value(name=f"{OWN}before_{i}", shape=ir.Shape(["batch", *shape]), type=double) for i, shape in enumerate(sums)]
    adds = [_node("Add", pair, {}, [f"{OWN}after_{i}"]) for i, pair in enumerate(zip(before, statistics, strict=True))]
    go_on = _node("Identity", [going], {}, [f"{OWN}go_on"])
    outputs = [go_on.outputs[0], *(add.outputs[0] for add in adds)]
    for output, like in zip(outputs, (going, *before), strict=True):
        output.type, output.shape = like.type, like.shape
    return ir.Graph([index, going, *before], outputs, nodes=[row, *nodes, *adds, go_on], name="draw")


def _zeros(op: _Builder, data: ir.Value, shape: tuple[int, ...]) -> ir.Value:
    whole = op("Concat", _batch(op, data), op.constant(list(shape)), axis=0) if shape else _batch(op, data)
    return op("ConstantOfShape", whole, value=_tensor(np.zeros(1)))


def _batch(op: _Builder, data: ir.Value) -> ir.Value:
    return op("Shape", data, start=0, end=1)


# Graphs


class _Builder:
    """Appends nodes and constants to a graph, under names of their own."""

    def __init__(self, graph: ir.Graph) -> None:
        self.graph = graph

    def __call__(
        self,
        kind: str,
        *inputs: ir.Value,
        name: str | None = None,
        outputs: Sequence[ir.Value] | None = None,
        **attributes: Any,
    ) -> Any:
        node = _node(kind, inputs, attributes, outputs or [self._free(kind.lower())], name)
        self.graph.append(node)
        return node.outputs[0] if outputs is None else node.outputs

    def constant(self, value: Any) -> ir.Value:
        import onnx_ir as ir

        array = np.array(value, dtype=bool if isinstance(value, bool) else np.int64)
        initializer = ir.Value(name=self._free("constant"), const_value=_tensor(array))
        self.graph.register_initializer(initializer)
        return initializer

    def _free(self, stem: str) -> str:
        taken = {value.name for node in self.graph for value in node.outputs} | set(self.graph.initializers)
        return next(name for i in range(len(taken) + 1) if (name := f"{OWN}{stem}_{i}") not in taken)


def _node(
    kind: str, inputs: Sequence[ir.Value], attributes: Mapping[str, Any], outputs: Sequence[Any], name: str | None = None
) -> ir.Node:
    import onnx_ir as ir

    values = [ir.Value(name=output) if isinstance(output, str) else output for output in outputs]
    return ir.node(kind, inputs, attributes, outputs=values, name=name or f"node_{values[0].name}")


def _tensor(array: np.ndarray) -> Any:
    import onnx_ir as ir

    return ir.Tensor(array)


def _inner(node: ir.Node) -> list[ir.Node]:
    """A node and those of its subgraphs."""
    import onnx_ir as ir

    found = [node]
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            found += attribute.as_graph().all_nodes()
        elif attribute.type == ir.AttributeType.GRAPHS:
            found += [inner for graph in attribute.as_graphs() for inner in graph.all_nodes()]
    return found


def _dependent(nodes: Iterable[ir.Node], values: Collection[ir.Value]) -> list[ir.Node]:
    """Those of topologically sorted nodes that depend on one of the values."""
    reached, found = set(values), []
    for node in nodes:
        if any(value in reached for inner in _inner(node) for value in inner.inputs):
            found.append(node)
            reached.update(node.outputs)
    return found


def _replace(nodes: Iterable[ir.Node], old: ir.Value, new: ir.Value) -> None:
    """Have nodes (and their subgraphs) read another value."""
    for node in nodes:
        for inner in _inner(node):
            for index, value in enumerate(inner.inputs):
                if value is old:
                    inner.replace_input_with(index, new)
