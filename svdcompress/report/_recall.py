"""The page's section on classes that the small model finds much less often than the dense one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from svdcompress.report import _html as html

SHOWN = 10
"""The most classes shown."""

NOTE = (
    "The share of the test examples of a class that each model finds (recall). These classes lost at least a third of what the "
    "dense model finds, and more than chance explains."
)


def recall(results: Mapping[str, Any], folder: Path | None) -> str:
    """The classes, or yes-or-no questions, that lost most; "" if none lost."""
    lost = {name: one for name, one in (results.get("recall") or {}).items() if one.get("lost")}
    if not lost:
        return ""
    first = sorted(lost, key=lambda name: lost[name]["sparse"] / (lost[name]["dense"] or 1))[:SHOWN]
    body = [
        [
            html.name_cell(name),
            html.right(f"{lost[name]['examples']:,}"),
            *(html.right(f"{100 * lost[name][side]:.1f} %") for side in ("dense", "sparse")),
        ]
        for name in first
    ]
    more = len(lost) - len(first)
    rest = f" {more:,} more such classes are in report.json (recall)." if more else ""
    table = html.table(["class", ">examples", ">dense", ">sparse"], body, "narrow")
    return html.paragraph(NOTE + rest) + table
