"""The metadata of a file: `metadata_props`, string to string."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from svdcompress.errors import ExportError

if TYPE_CHECKING:
    import onnx


def encode(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Values as strings: text as it is, everything else (and text that `decode` would take for something else) as JSON."""
    encoded = {}
    for key, value in metadata.items():
        try:
            text = value if isinstance(value, str) and decode(value) == value else json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ExportError(f"metadata: {key!r} is not JSON-able: {error}") from error
        encoded[str(key)] = text
    return encoded


def decode(text: str) -> Any:
    """The value of a string written by `encode`."""
    try:
        return json.loads(text)
    except ValueError:
        return text


PROMISES = ("coverage", "answer_above")
"""Names of the entries that hold promises made from validation data."""


def rounded(model: onnx.ModelProto, precision: str) -> None:
    """Record in a file's metadata that its numbers were rounded. What was measured with the float32 file does not hold for
    it: `metrics` is removed, and promises are marked as those of the float32 file."""
    kept = [(entry.key, entry.value) for entry in model.metadata_props if entry.key not in ("metrics", "precision")]
    del model.metadata_props[:]
    for key, text in [*kept, ("precision", precision)]:
        promise = decode(text) if key in PROMISES else None
        model.metadata_props.add(key=key, value=json.dumps({**promise, "of": "float32"}) if isinstance(promise, dict) else text)


def draws(model: onnx.ModelProto) -> bool:
    """Whether a file is a Monte-Carlo file, according to its metadata."""
    return any(entry.key == "kind" and decode(entry.value) == "monte_carlo" for entry in model.metadata_props)


def read_metadata(path: str | Path) -> dict[str, Any]:
    """The metadata of an ONNX file: what was passed to `export_onnx`, and "svdcompress_version", "torch_version", "kind"
    ("deterministic" or "monte_carlo").

    Raises ExportError if the file is missing or is not an ONNX file.
    """
    import onnx

    try:
        model = onnx.load(str(path), load_external_data=False)
    except FileNotFoundError as error:
        raise ExportError(f"{path}: no such file") from error
    except Exception as error:
        raise ExportError(f"{path}: not an ONNX file ({error})") from error
    if not model.ir_version:
        raise ExportError(f"{path}: not an ONNX file (it is empty)")
    return {entry.key: decode(entry.value) for entry in model.metadata_props}
