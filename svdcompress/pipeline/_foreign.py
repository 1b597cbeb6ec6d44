"""Whether a file of a finished run is still the one that the run wrote, asked before the file is used."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from svdcompress import report


def foreign(folder: Path, name: str, digests: Mapping[str, Mapping[str, Any]] | None, *, listed: bool = False) -> str:
    """What is wrong with a file that is not the run's; "" for the run's own, a missing one, or one that nothing is known of.

    digests: `files` of the run's report; None: version 0.1.0 stored none. listed: a file that the report does not list is
    wrong, too. Otherwise it passes, as it may well have been exported later.
    """
    if digests is None:
        return ""
    for part in (name, f"{name}.data"):  # the weights of a large ONNX file are in a second one
        known = {part: digests[part]} if part in digests else {}
        if any(there for _, there in report.altered(folder, known).values()):
            return f"{folder / part} is not the one that the run wrote (its SHA-256 differs from report.json)"
    if listed and name not in digests:
        return f"{folder / name} is not from this run (report.json does not list it)"
    return ""
