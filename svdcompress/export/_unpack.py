"""Reading archives: sizes are checked before anything of that size is made."""

from __future__ import annotations

import io
import lzma
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from svdcompress.errors import CheckpointError, shortened
from svdcompress.export._export import Exported
from svdcompress.export._pack import FORMAT, MORE, TYPES, Entry, dense, zstandard
from svdcompress.export._written import written
from svdcompress.files import parse_json

if TYPE_CHECKING:
    from onnx import ModelProto, TensorProto

XZ, ZSTD = b"\xfd7zXZ\x00", b"\x28\xb5\x2f\xfd"

STREAMS = ("graph", "numbers", "scales", "steps")

HEADER = 2**24
"""Maximum size of the header, in bytes."""

MEMORY = 2**28
"""Maximum memory for a decoder itself, in bytes."""


def unpack(src: str | Path, dst: str | Path, most: int = 2**31) -> Exported:
    """Write the ONNX file that an archive holds, dense; it has to pass onnx.checker and to load in onnxruntime.

    most: limit on its size, in bytes. The sizes that the archive states are checked before anything of that size is made,
    and no more is decoded than they say; an archive names no files, and only `dst` is written.

    Raises CheckpointError for a file that is not an archive, is damaged, or would exceed `most`; OutputError for a path that
    cannot be written.

    Example: `unpack("model.svdc", "model.onnx").bytes`
    """
    start, dst = time.perf_counter(), Path(dst)
    model = _Archive(Path(src), most).model()
    return written(model, dst, start)


class _Archive:
    """Reads an archive piece by piece. most: see `unpack`."""

    def __init__(self, path: Path, most: int) -> None:
        self.path, self.most = path, most

    def model(self) -> ModelProto:
        """The ONNX file."""
        try:
            with self.path.open("rb") as file:
                streams, entries, deflated = self._read(self._decoder(file))
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be read ({error.strerror or error})") from error
        except (lzma.LZMAError, EOFError) as error:
            self._refuse(f"damaged or truncated ({error})")
        except Exception as error:
            if type(error).__name__ == "ZstdError":
                self._refuse(f"damaged ({shortened(str(error))})")
            raise
        return self._filled(streams, entries, deflated)

    def _refuse(self, reason: str) -> NoReturn:
        raise CheckpointError(f"{self.path}: {reason}; write it again with: svdc pack")

    def _decoder(self, file: Any) -> Any:
        """A stream of the decoded bytes, read as needed."""
        magic = file.read(6)
        file.seek(0)
        if magic == XZ:
            return io.BufferedReader(_Xz(file))
        if magic[:4] == ZSTD:
            return zstandard().ZstdDecompressor(max_window_size=MEMORY).stream_reader(file)
        self._refuse("not an svdc archive")

    def _read(self, stream: Any) -> tuple[dict[str, bytes], list[Entry], bool]:
        """The four streams, of the sizes stated in the header, the weights' entries, and whether the steps are deflated."""
        count = int.from_bytes(self._exactly(stream, 8), "little")
        if not 2 <= count <= HEADER:
            self._refuse("not an svdc archive")
        try:
            header = parse_json(self._exactly(stream, count))
            metadata = header.pop("__metadata__")
            if int(metadata["format"]) > FORMAT:
                self._refuse(f"format {int(metadata['format'])}, of a newer svdcompress: update svdcompress")
            sizes = {name: (header[name]["data_offsets"][0], header[name]["data_offsets"][1]) for name in STREAMS}
            whole = all(header[name]["dtype"] == "U8" for name in STREAMS) and set(header) == set(STREAMS)
            whole = whole and all(type(place) is int for pair in sizes.values() for place in pair)
            deflated = metadata.get("deflated", "")
            if deflated not in ("", "steps"):
                raise ValueError(f"deflated: {deflated!r}")
            weights = parse_json(metadata["weights"])
            entries = [Entry(str(n), str(form), int(places), int(axis)) for n, form, places, axis in weights]
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            self._refuse(f"its header is damaged ({shortened(str(error))})")
        end = 0
        for begin, stop in sorted(sizes.values()) if whole else ():
            whole = whole and begin == end <= stop
            end = stop
        if not whole:
            self._refuse("its header is damaged")
        if end > self.most:
            self._refuse(f"it would expand to {end:,} bytes; at most {self.most:,} are allowed (--most)")
        found = {name: b"" for name in STREAMS}
        for name in sorted(sizes, key=lambda name: sizes[name]):
            found[name] = self._exactly(stream, sizes[name][1] - sizes[name][0])
        if stream.read(1):
            self._refuse("damaged: it is longer than its header says")
        return found, entries, bool(deflated)

    def _exactly(self, stream: Any, count: int) -> bytes:
        parts = []
        while count:
            part = stream.read(min(count, 2**20))
            if not part:
                self._refuse("truncated")
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def _filled(self, streams: dict[str, bytes], entries: list[Entry], deflated: bool) -> ModelProto:
        """The graph with its weights."""
        import onnx

        try:
            model = onnx.load_model_from_string(streams["graph"])
        except Exception as error:  # one of protobuf's
            raise CheckpointError(f"{self.path}: its graph is damaged") from error
        tensors = {tensor.name: tensor for tensor in model.graph.initializer}
        if any(tensor.external_data or tensor.data_location for tensor in _all_tensors(model)):
            self._refuse("its graph refers to external files of weights, which an archive never does")
        total = 0
        for entry in entries:
            tensor = tensors.get(entry.name)
            if tensor is None or entry.form not in TYPES or tensor.data_type != 1 or entry.places < 0:
                self._refuse(f"its weight {shortened(entry.name, 60)!r} is damaged")
            size = 1
            for dim in tensor.dims:
                size *= dim
            if entry.places > size or any(dim < 1 for dim in tensor.dims) or entry.axis >= len(tensor.dims):
                self._refuse(f"its weight {shortened(entry.name, 60)!r} is damaged")
            total += 4 * size
        if total > self.most:
            self._refuse(f"its weights would expand to {total:,} bytes; at most {self.most:,} are allowed (--most)")
        if len({entry.name for entry in entries}) < len(entries):
            self._refuse("it contains a weight twice")
        if deflated:
            streams["steps"] = self._inflated(streams["steps"], total // 2)
        work = _Filler({name: np.frombuffer(data, np.uint8) for name, data in streams.items()})
        try:
            for entry in entries:
                work.fill(tensors[entry.name], entry)
            if not work.done:
                raise ValueError("numbers are left over")
        except (ValueError, IndexError) as error:
            self._refuse(f"its weights are damaged ({error})")
        return model

    def _inflated(self, data: bytes, most: int) -> bytes:
        """The steps, inflated: for each number a byte, and one for each 255 zeros. Refuses more than `most` bytes."""
        decoder = zlib.decompressobj(-15)
        try:
            found = decoder.decompress(data, most + 1)
        except zlib.error as error:
            self._refuse(f"its steps are damaged ({error})")
        if len(found) > most or not decoder.eof or decoder.unused_data:
            self._refuse("its steps are damaged")
        return found


def _all_tensors(model: ModelProto) -> list[TensorProto]:
    parts: list[Any] = [model.graph, *model.functions]
    found: list[TensorProto] = []
    while parts:
        part = parts.pop()
        found += getattr(part, "initializer", [])
        sparse = [*getattr(part, "sparse_initializer", [])]
        for node in part.node:
            for attribute in node.attribute:
                found += [attribute.t, *attribute.tensors]
                sparse += [attribute.sparse_tensor, *attribute.sparse_tensors]
                parts += [attribute.g, *attribute.graphs] if attribute.HasField("g") else [*attribute.graphs]
        found += [tensor for each in sparse for tensor in (each.values, each.indices)]
    return found


class _Filler:
    """Fills tensors with the numbers of the streams, one after the other."""

    def __init__(self, streams: dict[str, np.ndarray]) -> None:
        self.streams = streams
        self.at = {name: 0 for name in streams}
        self.ends = np.flatnonzero(streams["steps"] != MORE)
        self.seen = 0

    def fill(self, tensor: TensorProto, entry: Entry) -> None:
        """Fill a tensor. Raises ValueError if the streams do not have what it needs."""
        shape = tuple(tensor.dims)
        size, kind = int(np.prod(shape)), np.dtype(TYPES[entry.form])
        values = np.zeros(size, kind)
        if entry.places:
            places = self._places(entry.places)
            if places[-1] >= size or (np.diff(places) < 1).any():
                raise ValueError("a place is outside its weight")
            planes = self._take("numbers", entry.places * kind.itemsize).reshape(kind.itemsize, entry.places)
            values[places] = np.ascontiguousarray(planes.T).view(kind).reshape(-1)
        scales = 0 if entry.form == "raw" else 1 if entry.axis < 0 else shape[entry.axis]
        halves = self._take("scales", 2 * scales).reshape(2, scales).astype(np.uint32)
        scale = ((halves[0] << 24) | (halves[1] << 16)).astype("<u4").view("<f4")
        tensor.raw_data = dense(values.reshape(shape), entry.form, scale, entry.axis).astype("<f4").tobytes()

    def _places(self, count: int) -> np.ndarray:
        ends = self.ends[self.seen : self.seen + count]
        if len(ends) < count:
            raise ValueError("steps are missing")
        begin, stop = self.at["steps"], int(ends[-1]) + 1
        self.seen, self.at["steps"] = self.seen + count, stop
        return np.cumsum(self.streams["steps"][begin:stop], dtype=np.int64)[ends - begin]

    def _take(self, name: str, count: int) -> np.ndarray:
        begin = self.at[name]
        part = self.streams[name][begin : begin + count]
        if len(part) < count:
            raise ValueError(f"{name} are missing")
        self.at[name] = begin + count
        return part.copy()

    @property
    def done(self) -> bool:
        """Whether everything was used."""
        return all(self.at[name] == len(self.streams[name]) for name in ("steps", "numbers", "scales"))


class _Xz(io.RawIOBase):
    """An xz stream, decoded as it is read, with bounded memory."""

    def __init__(self, file: Any) -> None:
        self.file, self.decoder = file, lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=MEMORY)

    def readable(self) -> bool:
        """Always true."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer with decoded bytes; returns how many."""
        while not self.decoder.eof:
            more = self.file.read(2**16) if self.decoder.needs_input else b""
            if self.decoder.needs_input and not more:
                raise EOFError("the end is missing")
            part = self.decoder.decompress(more, len(buffer))
            if part:
                buffer[: len(part)] = part
                return len(part)
        return 0
