"""Checks that a folder's files are those that its report was written with, by their SHA-256, and the layout's version."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

from svdcompress.errors import OutputError, shortened
from svdcompress.files import is_temporary

FORMAT = 1
"""The version of `report.json`'s layout that is written, and the newest that can be read. Files of version 0.1.0 have none."""

OWN = ("report.json", "report.html")
"""The report's own files: report.json cannot hold its own digest, and the page may be rendered again at any time."""

STATE = "state"
"""The folder that is deleted when the run ends."""

CHUNK = 2**20


def stamped(results: Mapping[str, Any], folder: str | Path) -> dict[str, Any]:
    """Results with `format`, and `files`: size and SHA-256 of each file in the folder except the report's own."""
    return {"format": FORMAT, **results, "files": _digests(Path(folder))}


def altered(folder: str | Path, files: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[Any, Any]]:
    """Files that differ from the digests in a report's `files`: {name: (stored digest, actual digest)}; {} if none does.

    The actual digest is None for a file that is missing or cannot be read.
    """
    found = {}
    for name, stored in files.items():
        there = digest(Path(folder) / name)
        if there is None or any(there[key] != stored[key] for key in there):
            found[name] = (dict(stored), there)
    return found


def check_format(results: Any, path: Path) -> None:
    """Raises OutputError for a report with a newer layout than this version knows."""
    number = results.get("format") if isinstance(results, dict) else None
    if isinstance(number, int) and number > FORMAT:
        raise OutputError(
            f"{path}: format {shortened(str(number), 40)}, written by a newer svdcompress; this version reads up to {FORMAT}: "
            "update svdcompress"
        )


def _digests(folder: Path) -> dict[str, dict[str, Any]]:
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if name.parts[0] not in (STATE, *OWN) and not any(is_temporary(Path(part)) for part in name.parts):
            made = digest(path)
            if made is not None:
                found[PurePath(name).as_posix()] = made
    return found


def digest(path: Path) -> dict[str, Any] | None:
    """A file's size and SHA-256; None if it is missing or cannot be read."""
    if not os.path.isfile(path):
        return None
    total, size = hashlib.sha256(), 0
    try:
        with path.open("rb") as file:
            while block := file.read(CHUNK):
                total.update(block)
                size += len(block)
    except OSError:
        return None
    return {"sha256": total.hexdigest(), "bytes": size}
