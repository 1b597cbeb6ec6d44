"""Weights stored as float16; the graph still computes in float32."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from svdcompress.export._compact import array_of, compacted, fixed_names, new_names, read
from svdcompress.export._export import Exported
from svdcompress.export._metadata import rounded
from svdcompress.export._tidy import tidy
from svdcompress.export._written import written

if TYPE_CHECKING:
    from onnx import GraphProto

SMALLEST = 64
"""Fewest numbers in a tensor for which saving two bytes each outweighs the nodes that widen them again."""

LARGEST = 2.0**15
"""Maximum to which a tensor's largest number is scaled: float16 ends at 65,504."""


def write_half(
    src: str | Path, dst: str | Path, *, compact: bool = True, check: Callable[[Path], Any] = lambda file: None
) -> Exported:
    """Write an ONNX file with its float32 weights stored as float16, each tensor times a power of two; `src` is not changed.

    A Cast, and a Mul where the scale is not 1, widen them when the file is loaded: it computes in float32 throughout
    (onnxruntime has hardly any float16 kernel for the CPU, and would cast back and forth around each node). A number keeps
    11 bits: it is off by at most 1/2048 of itself, or by 2**-40 of the tensor's largest number.

    src: a file written by `export_onnx`; for a Monte-Carlo file, both means and variances are stored as float16. compact:
    leave out zeros, too (`write_compact`). check: called with the file before it appears under `dst`; its exceptions are
    passed on. Returns the file, with `parity` None.

    Raises ExportError for a file that cannot be read, OutputError for a path that cannot be written.

    Example: `write_half("model_mc.onnx", "small_mc.onnx").bytes`
    """
    start, dst = time.perf_counter(), Path(dst)
    model = read(Path(src))
    if compact:
        tidy(model)
    halve(model.graph)
    if compact:
        compacted(model.graph)
    if all(entry.key != "precision" for entry in model.metadata_props):
        rounded(model, "float16")
    return written(model, dst, start, check=check)


def as_half(array: np.ndarray) -> tuple[np.ndarray, float]:
    """A float32 tensor as float16, and the power of two to multiply it by.

    Numbers at the end of float32's range, such as the finfo.min of a mask, may round to something beyond it: see `bearable`.
    """
    largest = float(np.abs(array).max(initial=0.0))
    if not np.isfinite(largest) or largest == 0:
        return array.astype(np.float16), 1.0
    power = 2.0 ** float(np.floor(np.log2(LARGEST / largest)))
    if 2.0**-10 <= largest <= LARGEST and (np.abs(array[array != 0]) >= 2.0**-14).all():
        power = 1.0  # all of them are normal float16 numbers without scaling
    power = float(np.clip(power, 2.0**-100, 2.0**100))
    with np.errstate(over="ignore"):
        return (array.astype(np.float64) * power).astype(np.float16), 1 / power


def bearable(array: np.ndarray, half: np.ndarray, scale: float) -> bool:
    """Whether a finite tensor is still finite once it is widened again, in float32, as a runtime does it."""
    if not np.isfinite(array).all():
        return True
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(half.astype(np.float32) * np.float32(scale)).all())


def halve(graph: GraphProto) -> None:
    """Store a graph's float32 initializers of SMALLEST numbers or more as float16, in place, except those that float16 times
    a power of two cannot hold (see `bearable`)."""
    import onnx
    from onnx import helper, numpy_helper

    fixed, names, nodes = fixed_names(graph), new_names(graph, "h"), []
    for tensor in graph.initializer:
        if tensor.data_type != onnx.TensorProto.FLOAT or tensor.name in fixed:
            continue
        array = array_of(tensor)
        if array.size < SMALLEST or not np.isfinite(array).all():
            continue
        half, scale = as_half(array)
        if not bearable(array, half, scale):
            continue  # minus infinity instead of a mask's finfo.min would turn a row of them into NaN: it stays in float32
        name, stored = tensor.name, next(names)
        if scale == 1:
            nodes.append(helper.make_node("Cast", [stored], [name], to=onnx.TensorProto.FLOAT))
        else:
            wide, factor = next(names), next(names)
            nodes.append(helper.make_node("Cast", [stored], [wide], to=onnx.TensorProto.FLOAT))
            nodes.append(helper.make_node("Mul", [wide, factor], [name]))
            graph.initializer.append(numpy_helper.from_array(np.array(scale, np.float32), factor))
        tensor.CopyFrom(numpy_helper.from_array(half, stored))
    for place, node in enumerate(nodes):
        graph.node.insert(place, node)
