"""The page's first section: tiles with the main figures, then dense vs. sparse."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from svdcompress.report import _html as html
from svdcompress.report._rows import chance, rows, temperature_of, times, worded
from svdcompress.report._small import small_files


def summary(results: Mapping[str, Any], folder: Path | None) -> str:
    """Tiles with the main ratios, then the table."""
    lines = rows(results)
    if not lines:
        return ""
    tiles = "".join(
        f'<div class="tile"><b>{escape(value)}</b>{escape(label)}{_small(more)}</div>' for value, label, more in _tiles(results)
    )
    body = []
    for row in lines:
        kind = {True: "good", False: "poor", None: ""}[row.better]
        body.append(
            [row.label, html.right(row.dense), html.right(f"<b>{row.sparse}</b>"), html.tag("td", escape(row.change), kind)]
        )
    table = html.table(["", ">dense", ">sparse", "change"], body, "narrow")
    small = "".join(map(html.paragraph, small_files(results)))
    notes = html.paragraph(chance(results)) + html.paragraph(two_counts(results))
    return f'<div class="tiles">{tiles}</div>{table}{notes}{small}'


def _small(text: str) -> str:
    return f"<small>{escape(text)}</small>" if text else ""


def _tiles(results: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """For each tile the value, what it is, and in small print what to compare it with."""
    ratios = results.get("compression") or {}
    tiles = _quality_tiles(results)
    for key, word, what in (("nonzero", "fewer", "non-zeros"), ("bytes", "smaller", "ONNX file"), ("macs", "fewer", "MACs")):
        if ratio := ratios.get(key):
            value, word = worded(ratio, word)
            tiles.append((value, f"{word} {what}", ""))
    latency = ratios.get("latency")
    for batch, ratio in latency.items() if isinstance(latency, Mapping) else ():
        tiles.append((times(ratio), f"the speed at batch {batch.removeprefix('batch_')}", ""))
    return tiles


def _quality_tiles(results: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """The sparse model's error (or RMSE) with the interval of its change, and the calibration error of its samples."""
    tiles = []
    change = next((row for row in rows(results) if row.label in ("Error", "RMSE")), None)
    if change is not None and change.sparse != "–":
        tiles.append((change.sparse, change.label.lower() if change.label == "Error" else change.label, change.change))
    figures = {name: row.get("ece") for name, row in (results.get("uncertainty") or {}).items() if isinstance(row, Mapping)}
    name = next((name for name in figures if name.startswith("sparse") and "samples" in name), None)
    value = figures.get(name or "")
    if html.is_number(value):
        dense = figures.get("dense")
        without = "" if temperature_of(results, "samples") is None else ", without a temperature"
        beside = f"dense{without}: {dense:.4f}" if html.is_number(dense) else ""
        tiles.append((f"{value:.4f}", f"ECE ({str(name).removeprefix('sparse, ')})", beside))
    return tiles


def two_counts(results: Mapping[str, Any]) -> str:
    """A sentence on why the masked model has more non-zeros than the pruned one; "" if it has not."""
    after, limit = (results.get("sparse") or {}).get("nonzero"), results.get("threshold")
    points = results.get("threshold_curve") or ()
    before = next((p.get("nonzero") for p in points if html.is_number(limit) and p.get("threshold") == limit), None)
    if after is None or before is None or before <= after:
        return ""
    return (
        f"Two counts of non-zeros: {before:,.0f} with the masks alone (the curve of other thresholds) and {after:,} after "
        "pruning (the table). The difference is the biases and weights of the units that were removed."
    )
