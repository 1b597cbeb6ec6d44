"""A small archive of an ONNX file, for sending: entropy-coded, with weights as exact as requested.

The archive is an xz stream (or a zstandard one) of a safetensors file with four tensors of bytes: `graph`, the ONNX file
without the data of its weights; `steps`, from each non-zero number to the next, deflated if that is shorter; `numbers`;
`scales`. Its metadata say how many of each belong to which weight. No part of it names a file, and no part of it is code.
"""

from __future__ import annotations

import importlib
import json
import lzma
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from svdcompress.errors import DependencyError, UsageError
from svdcompress.export._compact import array_of, fixed_names, read
from svdcompress.export._half import as_half
from svdcompress.export._metadata import draws, rounded
from svdcompress.export._rounding import codes, flipped, of_weight, second_dimension, steps
from svdcompress.export._tidy import tidy
from svdcompress.files import write_atomically

if TYPE_CHECKING:
    from onnx import ModelProto

PRECISIONS = {"float32": 32, "float16": 16, "int8": 8, "int4": 4}
"""Bits of a weight for each precision."""

CODECS = ("xz", "zstd")

FORMAT = 2
"""The layout of an archive: in 1 the steps are stored as they are, in 2 they may be deflated."""

LEAST_OF_DRAWS = 8
"""Fewest bits for the weights of a Monte-Carlo file: coarser steps distort its variances, and so its mutual information."""

SMALLEST = 8
"""Numbers in a tensor below which it stays in the graph as it is."""


@dataclass(frozen=True)
class Packed:
    """An archive that `pack` wrote.

    bytes: size of the archive; before: of the ONNX file. precision: as requested; largest: the largest difference of a
    weight, relative to the largest weight in its tensor. missing: names in `bits` that are not in the file.
    """

    path: Path
    bytes: int
    before: int
    precision: str
    largest: float
    seconds: float
    missing: tuple[str, ...] = ()


class Entry(NamedTuple):
    """One weight. form: one of TYPES; places: how many numbers are stored; axis: of the scales, -1 for one scale."""

    name: str
    form: str
    places: int
    axis: int


def pack(
    src: str | Path,
    dst: str | Path,
    precision: str = "float32",
    *,
    bits: Mapping[str, int] | None = None,
    importance: Mapping[str, np.ndarray] | None = None,
    codec: str = "xz",
) -> Packed:
    """Write the archive of a deterministic or Monte-Carlo ONNX file; `src` is not changed.

    precision: "float32" (exact), "float16", "int8" or "int4": weights of two dimensions or more as integers with a scale for
    each channel, others as float16; a tensor that this would make infinite, such as a mask of finfo.min, stays exact.
    bits: for single weights by name (2 to 16), instead of those of `precision`. importance: how much an error in each number
    counts if there are few bits, by the weight's name and in the shape of its layer's weight (see `importance`).
    codec: "xz", in Python's standard library, or "zstd", which needs the package zstandard.

    Raises UsageError for unknown options, for bits out of range, and for fewer than 8 bits in a Monte-Carlo file;
    DependencyError without zstandard, ExportError for a file that cannot be read, OutputError for a path that cannot be
    written.

    Example: `pack("model.onnx", "model.svdc", "int8").bytes`
    """
    start, src, dst = time.perf_counter(), Path(src), Path(dst)
    if precision not in PRECISIONS:
        raise UsageError(f"precision: {precision!r} is unknown; one of {', '.join(PRECISIONS)}")
    for name, count in (bits or {}).items():
        if not isinstance(count, int) or not 2 <= count <= 16:
            raise UsageError(f"bits: {count!r} for {name!r} is not a whole number from 2 to 16")
    model = read(src)
    if (precision == "int4" or any(count < LEAST_OF_DRAWS for count in (bits or {}).values())) and draws(model):
        raise UsageError(
            f"{src.name}: a Monte-Carlo file needs {LEAST_OF_DRAWS} bits or more: coarser steps distort its variances; use "
            "precision int8 or float16"
        )
    there = {tensor.name for tensor in model.graph.initializer}
    before = len(model.SerializeToString())
    tidy(model)
    used = [count for name, count in (bits or {}).items() if name in there]
    fewest = min([PRECISIONS[precision], *used])
    if fewest < PRECISIONS["float32"]:
        rounded(model, f"int{fewest}" if used else precision)
    streams, entries, largest = _streams(model, precision, bits or {}, importance or {})
    from safetensors.numpy import save

    weights = json.dumps(entries, separators=(",", ":"))
    forms = [({"format": "1", "weights": weights}, streams)]
    if len(jumps := _huffman(streams["steps"])) < len(streams["steps"]):  # xz's own coder is slow to adapt to them
        forms.append(({"format": str(FORMAT), "deflated": "steps", "weights": weights}, {**streams, "steps": jumps}))
    data = min(
        (
            _encoded(save({name: np.frombuffer(part, np.uint8) for name, part in each.items()}, metadata), codec)
            for metadata, each in forms
        ),
        key=len,
    )
    write_atomically(dst, lambda path: path.write_bytes(data))
    missing = tuple(name for name in bits or {} if name not in there)
    return Packed(dst, len(data), before, precision, largest, time.perf_counter() - start, missing)


def _streams(
    model: ModelProto, precision: str, bits: Mapping[str, int], importance: Mapping[str, np.ndarray]
) -> tuple[dict[str, bytes], list[Entry], float]:
    """Move the weights out of a model, in place: (streams, entries, largest relative difference of a weight)."""
    import onnx

    fixed, entries, worst = fixed_names(model.graph), [], 0.0
    second, turned = second_dimension(model.graph), flipped(model.graph)
    jumps, numbers, scales = bytearray(), bytearray(), bytearray()
    for tensor in model.graph.initializer:
        if tensor.data_type != onnx.TensorProto.FLOAT or tensor.name in fixed:
            continue
        array = array_of(tensor)
        count = bits.get(tensor.name, PRECISIONS[precision])
        if array.size < SMALLEST or not np.isfinite(array).all():
            continue
        counts = of_weight(importance, tensor.name, array, tensor.name in turned)
        form, values, scale, axis = _values(array, count, int(tensor.name in second), counts)
        back = dense(values, form, scale, axis)
        if not np.isfinite(back).all():  # a mask of finfo.min: minus infinity would turn a row of it into NaN
            form, values, scale, axis = _values(array, PRECISIONS["float32"], 0, None)
            back = array
        places = np.flatnonzero(values)
        jumps += _jumps(places)
        kept = values.reshape(-1)[places]
        numbers += _planes(kept.view(np.uint8).reshape(len(kept), kept.itemsize))
        scales += _planes(scale.view("<u4").astype(">u4").view(np.uint8).reshape(-1, 4)[:, :2])
        entries.append(Entry(tensor.name, form, len(places), axis))
        peak = float(np.abs(array).max(initial=0.0)) or 1.0
        worst = max(worst, float(np.abs(back - array).max()) / peak)
        for field in ("raw_data", "float_data"):
            tensor.ClearField(field)
    streams = {"graph": model.SerializeToString(), "steps": bytes(jumps), "numbers": bytes(numbers), "scales": bytes(scales)}
    return streams, entries, worst


def _planes(numbers: np.ndarray) -> bytes:
    """Bytes (count, size), regrouped by their place within a number, which a codec compresses better."""
    return np.ascontiguousarray(numbers.T).tobytes()


def _values(array: np.ndarray, bits: int, axis: int, importance: np.ndarray | None) -> tuple[str, np.ndarray, np.ndarray, int]:
    """A tensor's form, its numbers in its shape, the scales, and their axis. axis: of the output channels."""
    one = np.ones(0, np.float32)
    if bits >= 32:
        return "raw", array, one, -1
    if bits == 16 or array.ndim < 2:
        half, factor = as_half(array)
        return "float16", half, np.array([factor], np.float32), -1
    if not 2 <= bits <= 16:
        raise UsageError(f"bits: {bits} is not in 2 to 16")
    scale = _upwards(steps(array, bits, axis, importance))
    kind = "int8" if bits <= 8 else "int16"
    return kind, codes(array, scale, bits).astype(kind), scale.reshape(-1), axis


def _upwards(scale: np.ndarray) -> np.ndarray:
    """Round up to float32 of 8 significant bits (two bytes): no number of the tensor is then beyond the last step."""
    found = scale.astype("<f4").view("<u4")
    return ((found + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)).view("<f4")


def dense(values: np.ndarray, form: str, scale: np.ndarray, axis: int) -> np.ndarray:
    """The float32 tensor that was packed."""
    if form == "raw":
        return values
    shape = [1] * values.ndim
    if axis >= 0:
        shape[axis] = -1
    with np.errstate(over="ignore"):
        return (values.astype(np.float64) * scale.reshape(shape)).astype(np.float32)


TYPES: dict[str, Any] = {"raw": np.float32, "float16": np.float16, "int8": np.int8, "int16": np.int16}

MORE = 255
"""A byte of `steps` that stands for no number of its own: the step goes on in the next byte."""


def _jumps(places: np.ndarray) -> bytes:
    """The steps from each place to the next as bytes: as many MOREs as needed, then the rest."""
    jumps = np.diff(places, prepend=0)
    more = jumps // MORE
    ends = np.cumsum(more + 1) - 1
    found = np.full(int(ends[-1]) + 1 if len(ends) else 0, MORE, np.uint8)
    found[ends] = jumps % MORE
    return found.tobytes()


def _huffman(data: bytes) -> bytes:
    """Bytes in a Huffman code (RFC 1951, without matches)."""
    coder = zlib.compressobj(9, zlib.DEFLATED, -15, 9, zlib.Z_HUFFMAN_ONLY)
    return coder.compress(data) + coder.flush()


def _encoded(data: bytes, codec: str) -> bytes:
    if codec == "zstd":
        return zstandard().ZstdCompressor(level=22).compress(data)
    if codec != "xz":
        raise UsageError(f"codec: {codec!r} is unknown; one of {', '.join(CODECS)}")
    found = []
    for context in (0, 1, 3):  # bits of the byte before as context: they help in text, hardly in weights
        chain = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": context, "lp": 0, "pb": 0}]
        chain[0]["dict_size"] = max(4096, min(1 << 26, len(data)))
        found.append(lzma.compress(data, lzma.FORMAT_XZ, lzma.CHECK_CRC32, filters=chain))
    return min(found, key=len)


def zstandard() -> Any:
    """The optional package zstandard. Raises DependencyError if it is missing."""
    try:
        return importlib.import_module("zstandard")
    except ImportError as error:
        raise DependencyError("zstandard is needed for this archive: pip install 'svdcompress[pack]'") from error
