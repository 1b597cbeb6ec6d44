"""Making a graph smaller without changing what it computes: short inner names, and no attributes with their default."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onnx import AttributeProto, ModelProto, NodeProto


def tidy(model: ModelProto) -> None:
    """Make a model's graph smaller, in place.

    Inputs, outputs and initializers keep their names, nodes lose theirs, and values in between get numbers. A graph with
    subgraphs (a Loop's body) keeps all names, as the subgraphs may refer to them. Attributes that equal their operator's
    default are removed.
    """
    graph = model.graph
    opsets = {entry.domain if entry.domain != "ai.onnx" else "": entry.version for entry in model.opset_import}
    for value in (*graph.input, *graph.output):
        del value.metadata_props[:]
    for node in graph.node:
        node.ClearField("doc_string")
        _without_defaults(node, opsets.get(node.domain, 0))
    if any(attribute.HasField("g") or attribute.graphs for node in graph.node for attribute in node.attribute):
        return
    del graph.value_info[:]
    kept = {value.name for value in (*graph.input, *graph.output, *graph.initializer)}
    names = _numbers(kept)
    short: dict[str, str] = {}
    for node in graph.node:
        node.ClearField("name")
        for values in (node.input, node.output):
            for place, name in enumerate(values):
                if name and name not in kept:
                    if name not in short:
                        short[name] = next(names)
                    values[place] = short[name]


def _numbers(taken: set[str]) -> Iterator[str]:
    return (name for name in map(str, count()) if name not in taken)


def _without_defaults(node: NodeProto, opset: int) -> None:
    from onnx import defs

    try:
        known = defs.get_schema(node.op_type, opset, node.domain).attributes
    except Exception:  # one of onnx's C++ exceptions: an operator that it does not know
        return
    kept = [attribute for attribute in node.attribute if not _is_default(attribute, known)]
    if len(kept) < len(node.attribute):
        copies = [attribute.SerializeToString() for attribute in kept]
        del node.attribute[:]
        for data in copies:
            node.attribute.add().ParseFromString(data)


def _is_default(attribute: AttributeProto, known: object) -> bool:
    found = known.get(attribute.name)  # type: ignore[attr-defined]
    if found is None or not found.default_value.type or attribute.ref_attr_name:
        return False
    default = found.default_value
    if attribute.type != default.type or attribute.type not in _PLAIN:
        return False
    return getattr(attribute, _PLAIN[attribute.type]) == getattr(default, _PLAIN[attribute.type])


_PLAIN = {1: "f", 2: "i", 3: "s"}  # onnx.AttributeProto.FLOAT, INT, STRING
