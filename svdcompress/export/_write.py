"""Writing a file whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from svdcompress.errors import ExportError, OutputError
from svdcompress.files import TEMPORARY

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir

SINGLE_FILE_LIMIT = 2**31 - 2**24
"""Maximum bytes of weights in a single file: protobuf ends at 2 GiB, and the graph needs some of that."""


def write(model: ir.Model | onnx.ModelProto, path: Path, verify: Callable[[Path], Any]) -> int:
    """Write the model to `path` once it has passed onnx.checker and `verify`; returns the bytes on disk.

    Weights of more than SINGLE_FILE_LIMIT go to `<name>.data` next to the file. Until all checks have passed, everything is
    in a temporary folder next to `path`, which is removed in any case: on failure what was there before is untouched. Raises
    OutputError if the file cannot be written.
    """
    if os.path.isdir(path):
        raise OutputError(f"{path}: is a folder; give the name of a file")
    if not os.path.isdir(path.parent):
        raise OutputError(f"{path}: the folder {path.parent} does not exist")
    try:
        folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=TEMPORARY, dir=path.parent))
        try:
            files = _save(model, folder / path.name)
            _check(files[-1])
            verify(files[-1])
            size = sum(file.stat().st_size for file in files)
            for file in files:
                os.replace(file, path.parent / file.name)
            return size
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error.strerror or error}") from error


def _save(model: ir.Model | onnx.ModelProto, path: Path) -> list[Path]:
    """The files written, the model itself last."""
    import onnx
    import onnx_ir as ir

    if isinstance(model, onnx.ModelProto):
        return _save_proto(model, path)

    weights = sum(value.const_value.nbytes for value in model.graph.initializers.values() if value.const_value is not None)
    if weights <= SINGLE_FILE_LIMIT:
        ir.save(model, path)
        return [path]
    data = path.with_name(path.name + ".data")
    ir.save(model, path, external_data=data.name, size_threshold_bytes=1024)
    return [data, path]


def _save_proto(model: onnx.ModelProto, path: Path) -> list[Path]:
    import onnx

    weights = sum(tensor.ByteSize() for tensor in model.graph.initializer)
    if weights <= SINGLE_FILE_LIMIT:
        onnx.save_model(model, str(path))
        return [path]
    data = path.with_name(path.name + ".data")
    onnx.save_model(model, str(path), save_as_external_data=True, location=data.name, size_threshold=1024)
    return [data, path]


def _check(path: Path) -> None:
    import onnx

    try:
        onnx.checker.check_model(str(path), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise ExportError(f"{path.name}: onnx.checker refuses the graph: {error}") from error
    except UnicodeDecodeError as error:  # a name in a damaged file, which the checker's message would have repeated
        raise ExportError(f"{path.name}: onnx.checker refuses the graph, which has a name that is not valid text") from error
