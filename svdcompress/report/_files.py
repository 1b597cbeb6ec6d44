"""Results as plain JSON values, and files that are written completely or not at all."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from svdcompress.errors import OutputError, explained, shortened
from svdcompress.files import parse_json, write_text
from svdcompress.report._integrity import check_format
from svdcompress.report._schema import Results


def plain(value: Any) -> Any:
    """A value in JSON's own types: tensors and arrays as lists, dataclasses as dicts, numbers that are not finite as None."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    tolist = getattr(value, "tolist", None)  # torch tensors, numpy arrays and scalars
    return str(value) if tolist is None else plain(tolist())


def write_json(path: str | Path, value: Any) -> Path:
    """Write a value as JSON (see `plain`), in one step. Raises OutputError."""
    return write_text(path, json.dumps(plain(value), indent=1, allow_nan=False) + "\n")


def load(folder: str | Path) -> dict[str, Any]:
    """The results of a finished run from its folder's `report.json`. Raises OutputError if there is none to read."""
    path = Path(folder) / "report.json"
    try:
        results = parse_json(path.read_bytes())
        check_format(results, path)
        Results.model_validate(results)
    except FileNotFoundError:
        raise OutputError(f"{path}: no such file; {folder} holds no finished run") from None
    except ValidationError as error:
        raise OutputError(f"{path}: not a report written by svdc: {explained(error)}") from None
    except (OSError, ValueError) as error:
        raise OutputError(f"{path}: not readable as a report ({shortened(str(error))})") from error
    return results
