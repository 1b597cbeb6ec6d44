"""Weights stored in four or eight bits; the graph still computes in float32."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from svdcompress.errors import ExportError, UsageError, shortened
from svdcompress.export._compact import Maker, Part, array_of, compacted, fixed_names, places_of, read, scattered
from svdcompress.export._export import Exported
from svdcompress.export._half import halve
from svdcompress.export._metadata import draws, rounded
from svdcompress.export._rounding import codes, flipped, of_weight, second_dimension, steps
from svdcompress.export._tidy import tidy
from svdcompress.export._written import written

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, TensorProto

FEW_BITS_OPSET, IR = 21, 10
"""The first opset and IR version with 4-bit integers."""

SMALLEST = 64
"""Numbers in a weight below which it stays as it is: the nodes that widen it again would take more bytes than it saves."""

FORMS = (4, 8)
"""The possible bits of a weight."""


def write_few_bits(
    src: str | Path,
    dst: str | Path,
    bits: int | Mapping[str, int] = 4,
    *,
    importance: Mapping[str, np.ndarray] | None = None,
    compact: bool = True,
) -> Exported:
    """Write an ONNX file with its weights as integers of 4 or 8 bits and a step size per channel; `src` is not changed.

    A Cast and a Mul turn them into float32 when the file is loaded: outputs differ by the rounding, latency does not. All
    other tensors of 64 numbers or more (biases, step sizes) are stored as float16, as `write_half` does. The file is of
    opset 21, which onnxruntime 1.20 and later load.

    src: a deterministic file written by `export_onnx`. bits: for all weights (of two dimensions or more), or for each by its
    name; weights that are not named are stored as float16. importance: see `pack`. compact: leave out zeros, too
    (`write_compact`). Returns the file, with `parity` None.

    Raises UsageError for a Monte-Carlo file, whose variances such steps would distort, for other bits, and for unknown
    names; ExportError for a file that cannot be read or converted to opset 21, OutputError for a path that cannot be
    written.

    Example: `write_few_bits("model.onnx", "model_int4.onnx").bytes`
    """
    start, dst = time.perf_counter(), Path(dst)
    asked = list(bits.values()) if isinstance(bits, Mapping) else [bits]
    if wrong := [each for each in asked if not isinstance(each, int) or each not in FORMS]:
        raise UsageError(f"bits: {wrong[0]!r} is not one of {', '.join(map(str, FORMS))}")
    model = _at_opset(read(Path(src)), Path(src))
    names = {tensor.name for tensor in model.graph.initializer}
    if isinstance(bits, Mapping) and (unknown := [name for name in bits if name not in names]):
        raise UsageError(f"bits: {Path(src).name} has no weight {unknown[0]!r}; it has {', '.join(weights_of(src))}")
    if draws(model):
        raise UsageError(
            f"{Path(src).name}: a Monte-Carlo file must stay in floating point: quantization steps distort its variances"
        )
    if compact:
        tidy(model)
    used = _round(model.graph, bits, importance or {}, compact)
    halve(model.graph)
    if compact:
        compacted(model.graph)
    rounded(model, f"int{min(used)}" if used else "float16")
    return written(model, dst, start)


def weights_of(path: str | Path) -> list[str]:
    """Names of the weights in a file that `write_few_bits` turns into integers, in the file's order."""
    graph = read(Path(path)).graph
    fixed = fixed_names(graph)
    return [tensor.name for tensor in graph.initializer if _taken(tensor, fixed) is not None]


def weight_shapes(path: str | Path) -> dict[str, tuple[int, ...]]:
    """The shapes of all tensors of a file, by name."""
    import onnx

    graph = onnx.load(str(path), load_external_data=False).graph
    return {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}


def _taken(tensor: TensorProto, fixed: set[str]) -> np.ndarray | None:
    """The numbers of a weight to be rounded; None for other tensors."""
    import onnx

    if tensor.data_type != onnx.TensorProto.FLOAT or len(tensor.dims) < 2 or tensor.name in fixed:
        return None
    array = array_of(tensor)
    return array if array.size >= SMALLEST and np.isfinite(array).all() else None


def _round(graph: GraphProto, bits: int | Mapping[str, int], importance: Mapping[str, np.ndarray], compact: bool) -> set[int]:
    """Round the weights of a graph, in place; returns the numbers of bits that were used."""
    fixed, maker = fixed_names(graph), Maker(graph)
    second, turned = second_dimension(graph), flipped(graph)
    added, gone, used = Part(), set(), set[int]()
    for tensor in graph.initializer:
        array, count = _taken(tensor, fixed), bits if isinstance(bits, int) else bits.get(tensor.name)
        if array is None or count is None:
            continue
        axis = int(tensor.name in second)
        step = steps(array, count, axis, of_weight(importance, tensor.name, array, tensor.name in turned)).astype(np.float32)
        whole = codes(array, step, count)
        with np.errstate(over="ignore"):
            if not np.isfinite(whole.astype(np.float32) * step).all():
                continue  # a mask of finfo.min, which rounding takes beyond float32's range
        forms = [_dense(maker, whole, step, count, tensor.name)]
        if compact and len(places_of(whole)):
            forms.append(_sparse(maker, whole, step, count, tensor.name))
        part = min(forms, key=lambda form: form.bytes)
        gone.add(tensor.name)
        used.add(count)
        added.nodes += part.nodes
        added.tensors += part.tensors
    added.replace(graph, gone)
    return used


def _dense(maker: Maker, whole: np.ndarray, step: np.ndarray, bits: int, name: str) -> Part:
    part = Part()
    wide = maker.node(part, "Cast", _stored(maker, part, whole, bits), to=_FLOAT)
    maker.node(part, "Mul", wide, maker.constant(part, step), output=name)
    return part


def _sparse(maker: Maker, whole: np.ndarray, step: np.ndarray, bits: int, name: str) -> Part:
    part = Part()
    put = scattered(
        maker,
        part,
        whole.astype(np.float32),
        lambda numbers: maker.node(part, "Cast", _stored(maker, part, numbers, bits), to=_FLOAT),
        bits / 8,
    )
    maker.node(part, "Mul", put, maker.constant(part, step), output=name)
    return part


_FLOAT = 1  # onnx.TensorProto.FLOAT; onnx is imported when a file is written


def _stored(maker: Maker, part: Part, whole: np.ndarray, bits: int) -> str:
    """Add whole numbers as an initializer of `bits` bits each; returns its name."""
    from onnx import TensorProto, helper

    if bits == 8:
        return maker.constant(part, whole.astype(np.int8))
    low = np.append(whole.reshape(-1).astype(np.int8), np.zeros(whole.size % 2, np.int8)) & 15
    data = (low[::2] | (low[1::2] << 4)).astype(np.uint8).tobytes()  # two in a byte, the first in its lower half
    return maker.take(part, helper.make_tensor("", TensorProto.INT4, whole.shape, data, raw=True))


def _at_opset(model: ModelProto, src: Path) -> ModelProto:
    """The model, converted to FEW_BITS_OPSET if its opset is lower. Raises ExportError if it cannot be converted."""
    from onnx import version_converter

    if model.functions or model.graph.sparse_initializer:
        raise ExportError(f"{src.name}: has local functions or sparse initializers, which cannot be kept here")
    model.ir_version = max(model.ir_version, IR)
    if max(entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")) >= FEW_BITS_OPSET:
        return model
    try:
        found = version_converter.convert_version(model, FEW_BITS_OPSET)
    except Exception as error:  # one of onnx's C++ exceptions
        raise ExportError(
            f"{src.name}: cannot be converted to opset {FEW_BITS_OPSET} ({shortened(str(error))}); export it with --opset "
            f"{FEW_BITS_OPSET}"
        ) from error
    del found.graph.value_info[:]
    found.ir_version = max(found.ir_version, IR)
    return found
