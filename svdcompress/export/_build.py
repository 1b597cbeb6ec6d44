"""Small tools to build and rewire onnx_ir graphs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from svdcompress.export._trace import OWN

if TYPE_CHECKING:
    import onnx_ir as ir


class Builder:
    """Appends nodes to a graph, under new names.

    constants: the graph that holds the constants (None: the same). stem: part of the names, one for each builder of a model.
    """

    def __init__(self, graph: ir.Graph, constants: ir.Graph | None = None, stem: str = "") -> None:
        self.graph = graph
        self.constants = graph if constants is None else constants
        self._names = (f"{OWN}{stem}{i}" for i in count())

    def __call__(self, kind: str, *inputs: ir.Value | None, name: str | None = None, **attributes: Any) -> ir.Value:
        """Append a node; returns its output. name: the node's name, or its output's if it begins with OWN."""
        return self._add(kind, inputs, attributes, 1, name)[0]

    def many(
        self, kind: str, outputs: int, *inputs: ir.Value | None, name: str | None = None, **attributes: Any
    ) -> list[ir.Value]:
        """Append a node; returns its outputs."""
        return self._add(kind, inputs, attributes, outputs, name)

    def _add(
        self, kind: str, inputs: Sequence[ir.Value | None], attributes: dict[str, Any], outputs: int, name: str | None
    ) -> list[ir.Value]:
        import onnx_ir as ir

        own = name is not None and name.startswith(OWN)
        values = [ir.Value(name=name if own else next(self._names)) for _ in range(outputs)]
        label = "" if own or name is None else name  # a node's name takes some bytes in the file
        self.graph.append(ir.node(kind, inputs, attributes, outputs=values, name=label))
        return values

    def constant(self, value: Any, dtype: Any = np.int64) -> ir.Value:
        """A constant: bool for a bool, otherwise of the given type (int64 unless given)."""
        import onnx_ir as ir

        array = np.array(value, dtype=bool if isinstance(value, bool) else dtype)
        initializer = ir.Value(name=next(self._names), const_value=ir.Tensor(array))
        self.constants.register_initializer(initializer)
        return initializer

    def shape(self, *dims: ir.Value | int) -> ir.Value:
        """A shape made of scalar values and plain numbers."""
        vector = self.constant([-1])
        parts = [self.constant([dim]) if isinstance(dim, int) else self("Reshape", dim, vector) for dim in dims]
        return self("Concat", *parts, axis=0)


def inner_nodes(node: ir.Node) -> list[ir.Node]:
    """A node and all nodes of its subgraphs."""
    import onnx_ir as ir

    found = [node]
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            found += attribute.as_graph().all_nodes()
        elif attribute.type == ir.AttributeType.GRAPHS:
            found += [inner for graph in attribute.as_graphs() for inner in graph.all_nodes()]
    return found


def read_by(nodes: Iterable[ir.Node]) -> list[ir.Value]:
    """The values that nodes and their subgraphs read, each once."""
    return list(
        dict.fromkeys(value for node in nodes for inner in inner_nodes(node) for value in inner.inputs if value is not None)
    )


def dependent(nodes: Iterable[ir.Node], values: Collection[ir.Value], through_shapes: bool = True) -> list[ir.Node]:
    """The nodes, out of topologically sorted ones, that depend on one of the values.

    through_shapes: whether nodes count that depend on nothing but the shapes of values.
    """
    reached, found = set(values), []
    for node in nodes:
        if (through_shapes or node.op_type not in ("Shape", "Size")) and any(value in reached for value in read_by([node])):
            found.append(node)
            reached.update(node.outputs)
    return found


def replace(nodes: Iterable[ir.Node], old: ir.Value, new: ir.Value) -> None:
    """Make nodes (and their subgraphs) read another value."""
    for node in nodes:
        for inner in inner_nodes(node):
            for index, value in enumerate(inner.inputs):
                if value is old:
                    inner.replace_input_with(index, new)
