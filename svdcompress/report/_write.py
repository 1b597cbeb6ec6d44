"""Writes a run's results to its folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from svdcompress.report._files import plain, write_json, write_text


def write(out_dir: str | Path, results: Mapping[str, Any]) -> tuple[Path, Path]:
    """Write `report.json` and `report.html` into an existing folder; returns their paths. Raises OutputError.

    Warns of sections of the page that cannot be drawn (`SectionWarning`); the others are there.
    """
    folder = Path(out_dir)
    json_path = write_json(folder / "report.json", results)
    return json_path, write_text(folder / "report.html", render(results, folder))


def render_comparison(runs: Sequence[tuple[str, Mapping[str, Any]]], measure: str = "nonzero") -> str:
    """Several runs on one self-contained HTML page.

    runs: name and results of each run. measure: the size in the drawing, as for `svdc compare --measure`.
    """
    from svdcompress.report._compared import compared

    return compared([(name, plain(results)) for name, results in runs], measure)


def render(results: Mapping[str, Any], folder: str | Path | None = None) -> str:
    """The report as one self-contained HTML page; pictures that `results` names are read from `folder`.

    Warns as `write` does.
    """
    from svdcompress.report._page import page  # matplotlib only when something is drawn

    return page(plain(results), None if folder is None else Path(folder))
