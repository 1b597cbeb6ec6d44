"""The compact form of an ONNX file: zeros are left out, and put back in place when the file is loaded."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from svdcompress.errors import ExportError, shortened
from svdcompress.export._export import Exported
from svdcompress.export._gaps import gaps
from svdcompress.export._tidy import tidy
from svdcompress.export._written import written

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto, TensorProto

OLDEST = 13
"""The first opset that has all operators of the compact form."""

FIELD = 6
"""Maximum number of bytes that protobuf puts before each node and initializer, in files below 2 GiB."""

TYPES = ("float16", "float32", "float64", "int8", "uint8", "int32", "int64", "bool")
"""Types of the tensors that can be made compact."""


def write_compact(src: str | Path, dst: str | Path) -> Exported:
    """Write a copy of an ONNX file without the zeros of its weights; `src` is not changed.

    Each initializer with enough zeros is replaced by its other numbers and the steps from each to the next, which a few
    nodes put back in place: Cast, CumSum, ScatterElements, Reshape. onnxruntime runs these once, when it loads the file:
    outputs and latency are those of `src`. A tensor that would not become smaller stays as it is; tensors whose numbers are
    in the same places (means and variances) share their steps. Any tool that folds constants, such as onnxslim, makes the
    file dense again: use it first. Values between the inputs and the outputs get short names.

    src: a file written by `export_onnx`, or any other of opset 13 or later; initializers of subgraphs stay as they are.

    Returns the file written; its `parity` is 0: what the nodes give is compared with each tensor of `src`, number by number
    (-0 comes back as 0). Raises ExportError for a file that cannot be read or is refused by onnx.checker, OutputError for a
    path that cannot be written.

    Example: `write_compact("model.onnx", "model_compact.onnx").bytes`
    """
    import onnx

    start, dst = time.perf_counter(), Path(dst)
    model = read(Path(src))
    tidy(model)
    wanted = compacted(model.graph)
    return written(model, dst, start, check=lambda file: _same(wanted, onnx.load(str(file)), file), parity=0.0)


def read(path: Path) -> ModelProto:
    """Load an ONNX file of opset OLDEST or later. Raises ExportError if it cannot be read or is of an earlier opset."""
    import onnx

    try:
        model = onnx.load(str(path))
    except FileNotFoundError as error:
        raise ExportError(f"{path}: no such file") from error
    except Exception as error:  # from protobuf, from onnx, or from the system
        raise ExportError(f"{path}: not an ONNX file ({shortened(str(error))})") from error
    versions = [entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")]
    if not versions or max(versions) < OLDEST:
        raise ExportError(
            f"{path}: a compact file needs opset {OLDEST} or later; export it again with --opset {OLDEST} or more"
        )
    return model


def array_of(tensor: TensorProto) -> np.ndarray:
    """An initializer's numbers. Raises ExportError if there are not as many as its shape says."""
    from onnx import numpy_helper

    try:
        return numpy_helper.to_array(tensor)
    except (ValueError, TypeError) as error:
        raise ExportError(f"the tensor {shortened(tensor.name, 60)!r} is damaged ({shortened(str(error))})") from error


@dataclass
class Part:
    """Nodes and initializers to add to a graph."""

    nodes: list[NodeProto] = field(default_factory=list)
    tensors: list[TensorProto] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """How many bytes they take in a file."""
        return sum(each.ByteSize() + FIELD for each in (*self.nodes, *self.tensors))

    def replace(self, graph: GraphProto, gone: Collection[str]) -> None:
        """Put the part before a graph's nodes, in place of the initializers named in `gone`."""
        for place in reversed([place for place, tensor in enumerate(graph.initializer) if tensor.name in gone]):
            del graph.initializer[place]
        graph.initializer.extend(self.tensors)
        for place, node in enumerate(self.nodes):
            graph.node.insert(place, node)


class Maker:
    """Adds nodes and initializers to parts, under short names that a graph does not have yet."""

    def __init__(self, graph: GraphProto) -> None:
        self._names = new_names(graph, "")

    def constant(self, part: Part, array: np.ndarray) -> str:
        """Add an initializer; returns its name."""
        from onnx import numpy_helper

        return self.take(part, numpy_helper.from_array(array))

    def take(self, part: Part, tensor: TensorProto) -> str:
        """Add a tensor as an initializer under a new name; returns the name."""
        tensor.name = next(self._names)
        part.tensors.append(tensor)
        return tensor.name

    def node(self, part: Part, kind: str, *inputs: str, output: str | None = None, **attributes: Any) -> str:
        """Add a node; returns the name of its output."""
        from onnx import helper

        part.nodes.append(helper.make_node(kind, inputs, [output or next(self._names)], **attributes))
        return part.nodes[-1].output[0]

    def filled(self, part: Part, shape: str, rest: np.ndarray, output: str | None = None) -> str:
        """Add a tensor filled with the number `rest` (1,), in the shape that a constant holds; returns its name."""
        from onnx import numpy_helper

        value = {} if rest.dtype == np.float32 and not rest[0] else {"value": numpy_helper.from_array(rest)}
        return self.node(part, "ConstantOfShape", shape, output=output, **value)


def compacted(graph: GraphProto) -> dict[str, np.ndarray]:
    """Make a graph compact, in place; returns the tensors that its nodes now make."""
    import onnx

    fixed = fixed_names(graph)
    arrays: dict[str, np.ndarray] = {}
    dense: dict[str, int] = {}
    for tensor in graph.initializer:
        if tensor.name in fixed or tensor.data_type == onnx.TensorProto.STRING:
            continue
        array = array_of(tensor)
        if array.dtype.name in TYPES and array.size > 1:
            arrays[tensor.name], dense[tensor.name] = array, tensor.ByteSize() + FIELD
    maker, added, gone = Maker(graph), Part(), set()
    for names in _alike(arrays):
        part, made = _scattered(maker, {name: arrays[name] for name in names}, dense)
        if made and part.bytes < sum(dense[name] for name in made):
            gone |= made
            added.nodes += part.nodes
            added.tensors += part.tensors
    added.replace(graph, gone)
    return {name: array for name, array in arrays.items() if name in gone}


def _rest(array: np.ndarray) -> np.ndarray:
    """The number to leave out, (1,): 0 for floats, else the most frequent one (as of the places in a Monte-Carlo file)."""
    if array.dtype.kind == "f":
        return np.zeros(1, array.dtype)
    values, counts = np.unique(array, return_counts=True)
    return values[[counts.argmax()]]


def places_of(array: np.ndarray) -> np.ndarray:
    """The places, in the flat tensor, of the numbers that are not left out."""
    return np.flatnonzero(array != _rest(array))


def _alike(arrays: dict[str, np.ndarray]) -> Iterator[list[str]]:
    """Groups of names of tensors that can share their steps; in each, the one with the most numbers comes first.

    A tensor joins a group of its shape if the first tensor there has numbers in all of its places, and if the zeros to be
    stored for the other places cost no more than steps of its own.
    """
    places = {name: places_of(array) for name, array in arrays.items()}
    groups: list[list[str]] = []
    for name in sorted(arrays, key=lambda name: -len(places[name])):
        array = arrays[name]
        for group in groups:
            first = group[0]
            more = len(places[first]) - len(places[name])
            near = more * array.itemsize <= len(places[name])
            if near and arrays[first].shape == array.shape and np.isin(places[name], places[first], assume_unique=True).all():
                group.append(name)
                break
        else:
            groups.append([name])
    order = {name: place for place, name in enumerate(arrays)}
    yield from sorted(groups, key=lambda group: min(order[name] for name in group))


def _scattered(maker: Maker, arrays: dict[str, np.ndarray], dense: dict[str, int]) -> tuple[Part, set[str]]:
    """The nodes that make tensors of one shape from their numbers, and the names of the tensors that get smaller by it."""
    first = next(iter(arrays.values()))
    common = Part()
    places = places_of(first)
    shape = maker.constant(common, np.array(first.shape, np.int64))
    if not len(places):
        for name, array in arrays.items():
            maker.filled(common, shape, _rest(array), name)
        return common, set(arrays)
    found = gaps(places, sum(array.itemsize for array in arrays.values()))
    index = _index(maker, common, found.steps)
    flat = shape if first.ndim == 1 else maker.constant(common, np.array([first.size], np.int64))
    filled: dict[tuple[np.dtype, bytes], str] = {}
    made = set()
    for name, array in arrays.items():
        part = Part()
        rest = _rest(array)
        if (key := (array.dtype, rest.tobytes())) not in filled:
            filled[key] = maker.filled(common, flat, rest)
        numbers = maker.constant(part, array.reshape(-1)[found.places])
        one = first.ndim == 1
        put = maker.node(part, "ScatterElements", filled[key], index, numbers, output=name if one else None)
        if not one:
            maker.node(part, "Reshape", put, shape, output=name)
        if part.bytes < dense[name]:
            made.add(name)
            common.nodes += part.nodes
            common.tensors += part.tensors
    return common, made


def scattered(maker: Maker, part: Part, array: np.ndarray, numbers: Callable[[np.ndarray], str], number_bytes: float) -> str:
    """Add nodes that put a tensor's non-zero numbers in their places; returns the name of the result, of the tensor's shape.

    numbers: adds what makes the given numbers (count,) in float32, and returns its name. number_bytes: bytes for each.
    """
    found = gaps(places_of(array), number_bytes)
    index = _index(maker, part, found.steps)
    flat = maker.constant(part, np.array([array.size], np.int64))
    zeros = maker.filled(part, flat, np.zeros(1, np.float32))
    put = maker.node(part, "ScatterElements", zeros, index, numbers(array.reshape(-1)[found.places]))
    return maker.node(part, "Reshape", put, maker.constant(part, np.array(array.shape, np.int64)))


def _index(maker: Maker, part: Part, steps: np.ndarray) -> str:
    """Add nodes that turn steps into places; returns the name of the result."""
    wide = maker.node(part, "Cast", maker.constant(part, steps), to=_INT64)
    return maker.node(part, "CumSum", wide, maker.constant(part, np.array(0, np.int64)))


_INT64 = 7  # onnx.TensorProto.INT64; onnx is imported when a file is written


def fixed_names(graph: GraphProto) -> set[str]:
    """Names of the values that a caller may pass or ask for: initializers of these names stay as they are."""
    return {value.name for value in (*graph.input, *graph.output)}


def new_names(graph: GraphProto, stem: str) -> Iterator[str]:
    """Short names that a graph does not have yet."""
    taken = set(_names(graph))
    return (name for name in (f"_{stem}{number}" for number in count()) if name not in taken)


def _names(graph: GraphProto) -> Iterator[str]:
    """All names of values in a graph and its subgraphs."""
    yield from (value.name for value in (*graph.input, *graph.output, *graph.initializer, *graph.value_info))
    for node in graph.node:
        yield from (*node.input, *node.output)
        for attribute in node.attribute:
            for inner in (*attribute.graphs, *([attribute.g] if attribute.HasField("g") else [])):
                yield from _names(inner)


def _same(wanted: dict[str, np.ndarray], model: ModelProto, file: Path) -> None:
    """Raises ExportError unless the nodes of a file make exactly the wanted tensors."""
    from onnx import helper

    if not wanted:
        return
    nodes = [node for node in model.graph.node if not node.domain]
    made: set[str] = {tensor.name for tensor in model.graph.initializer}
    needed: list[Any] = []
    for node in nodes:
        if all(name in made for name in node.input) and set(node.output) - made and node.op_type in _OPERATORS:
            needed.append(node)
            made.update(node.output)
    names = {name for node in needed for name in node.input}
    kinds = {name: helper.np_dtype_to_tensor_dtype(array.dtype) for name, array in wanted.items()}
    outputs = [helper.make_tensor_value_info(name, kinds[name], array.shape) for name, array in wanted.items()]
    constants = [tensor for tensor in model.graph.initializer if tensor.name in names]
    alone = helper.make_model(helper.make_graph(needed, "weights", [], outputs, constants), opset_imports=model.opset_import)
    alone.ir_version = model.ir_version
    for name, found in zip(wanted, _run(alone, file), strict=True):
        array = wanted[name]
        if found.dtype != array.dtype or not np.array_equal(found, array, equal_nan=array.dtype.kind == "f"):
            raise ExportError(f"{file.name}: the tensor {name!r} differs from the original; please report it")


_OPERATORS = ("Cast", "CumSum", "ConstantOfShape", "ScatterElements", "Reshape")


def _run(model: ModelProto, file: Path) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return session.run(None, {})
    except Exception as error:  # onnxruntime's own exceptions have no common base
        raise ExportError(f"{file.name}: onnxruntime cannot compute its tensors: {shortened(str(error))}") from error
