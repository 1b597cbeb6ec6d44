"""Parts of benchmarks/results/reliability.md, each between its own marks, so that a command rewrites only its part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
PAGE = RESULTS / "reliability.md"


def put(name: str, lines: list[str], page: Path = PAGE) -> None:
    """Replace the lines between `<!-- name -->` and `<!-- /name -->`; a part that does not exist yet is appended.

    The part "summary" is rebuilt from what all tools have stored in the page's folder.
    """
    _put(name, lines, page)
    _put("summary", summary(page.parent), page)


def _put(name: str, lines: list[str], page: Path) -> None:
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    old = page.read_text(encoding="utf-8") if page.is_file() else "# Reliability\n"
    head, found, rest = old.partition(begin)
    tail = rest.partition(end)[2] if found else "\n"
    gap = "" if found else "\n"
    page.write_text(gap.join([head, "\n".join([begin, *lines, end])]) + tail, encoding="utf-8")


def summary(folder: Path) -> list[str]:
    """One row for each family: cases tried, clearly refused, right, faults, and the command."""
    rows = []
    files = _stored(folder / "reliability_fuzz.json", {}).values()
    if files:
        counts = [sum(entry[name] for entry in files) for name in ("tried", "refused", "right")]
        faults = sum(len(entry["faults"]) for entry in files)
        rows.append(_row("damaged and hostile files", *counts, faults, "make fuzz"))
    runs = _stored(folder / "reliability_kill.json", {}).get("records", [])
    if runs:
        faults = sum(bool(run["fault"]) for run in runs)
        rows.append(_row("killed runs", len(runs), 0, len(runs) - faults, faults, "make test-kill"))
    places = _stored(folder / "reliability_places.json", [])
    if places:
        faults = sum(bool(place["fault"]) for place in places)
        refused = sum(place["said"].startswith("OutputError") for place in places)
        rows.append(_row("places that fail a run", len(places), refused, len(places) - faults, faults, "make test-kill"))
    return [
        "| family | tried | refused clearly | right | faults | command |",
        "|---|---|---|---|---|---|",
        *rows,
        "",
        "Right: a right result, for killed runs and failing places that of the undisturbed run in the end.",
    ]


def _row(name: str, tried: int, refused: int, right: int, faults: int, command: str) -> str:
    return f"| {name} | {tried:,} | {refused:,} | {right:,} | {faults:,} | `{command}` |"


def _stored(file: Path, otherwise: Any) -> Any:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else otherwise
