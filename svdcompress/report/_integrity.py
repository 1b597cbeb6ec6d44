"""Whether a folder's files are those that its report was written with: their SHA-256, and the layout's version."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

from svdcompress.errors import OutputError, shortened
from svdcompress.files import is_temporary

FORMAT = 1
"""The layout of `report.json` that is written, and the newest that is read. Files of version 0.1.0 name none."""

OWN = ("report.json", "report.html")
"""The report itself: it cannot hold its own digest, and the page is drawn anew whenever somebody asks."""

STATE = "state"
"""What goes when the run ends."""

CHUNK = 2**20


def stamped(results: Mapping[str, Any], folder: str | Path) -> dict[str, Any]:
    """Results with `format`, and `files`: size and SHA-256 of each file of the folder, the report's own apart."""
    return {"format": FORMAT, **results, "files": _digests(Path(folder))}


def altered(folder: str | Path, files: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[Any, Any]]:
    """Files that are not as `files` of a report has them: {name: (what it says, what is there)}; {} if all are.

    What is there is a digest like the other one, or None for a file that is missing or cannot be read.
    """
    found = {}
    for name, stored in files.items():
        there = digest(Path(folder) / name)
        if there is None or any(there[key] != stored[key] for key in there):
            found[name] = (dict(stored), there)
    return found


def check_format(results: Any, path: Path) -> None:
    """Raises OutputError for a report of a later layout than this version knows."""
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
