"""The rows of dense vs. sparse, formatted once for the terminal and the page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_METRICS = {"error": "Error", "rmse": "RMSE", "r2": "R2", "mae": "MAE", "nll": "NLL", "brier": "Brier score", "ece": "ECE"}
_SIZES = {
    "parameters": ("Parameters", "fewer"),
    "nonzero": ("Non-zeros", "fewer"),
    "weights_nonzero": ("Non-zero weights", "fewer"),
    "bytes": ("ONNX file", "smaller"),
    "macs": ("MACs", "fewer"),
}


@dataclass(frozen=True)
class Row:
    """One line of the table: label, dense and sparse as text, the change, and whether it is for the better (None: neither, or
    it may be chance)."""

    label: str
    dense: str
    sparse: str
    change: str
    better: bool | None


def rows(results: Mapping[str, Any]) -> list[Row]:
    """Dense vs. sparse: metrics, sizes, latency; only what at least one of the two has."""
    dense, sparse = results.get("dense") or {}, results.get("sparse") or {}
    return [
        *_metric_rows(dense, sparse, results.get("changes") or {}),
        *_size_rows(dense, sparse),
        *_latency_rows(dense, sparse),
    ]


def rounding(results: Mapping[str, Any]) -> str:
    """One sentence on the effect of rounding the numbers of channels; "" if they were not to be rounded."""
    report = results.get("pruning") or {}
    groups = [group for group in report.get("groups") or () if group.get("kept_unrounded") is not None]
    if (report.get("round_to") or 1) <= 1 or not groups:
        return ""
    compared = report.get("rounding") or {}
    if report.get("rounded") is False and compared:
        forms = [f"{compared[form]['kept']:,} channels, {compared[form]['parameters']:,} parameters" for form in _FORMS]
        text = f"Channels at multiples of {report['round_to']} measured no faster"
        return f"{text}: without rounding {forms[1]}; with it {forms[0]}."
    kept, needed = (sum(group[key] for group in groups) for key in ("kept", "kept_unrounded"))
    text = f"Channels are kept at multiples of {report['round_to']}: {kept:,} stay ({needed:,} without rounding)"
    after, unrounded = report.get("parameters_after"), report.get("parameters_unrounded")
    if after is not None and unrounded is not None:
        text += f"; {after:,} parameters ({unrounded:,} without rounding)"
    return f"{text}; this measured faster." if report.get("rounded") and compared else f"{text}."


_FORMS = ("rounded", "unrounded")


def chance(results: Mapping[str, Any]) -> str:
    """A note on the intervals in the rows, and on NLLs that are not comparable; "" if there are no intervals."""
    count = (results.get("examples") or {}).get("test")
    data = f"the {count:,} test examples" if count else "the test data"
    text = f"In parentheses: the 95% interval of the change, from {data} alone; changes without color may be chance."
    return f"{text}{_tempered(results)}" if results.get("changes") else ""


def temperature_of(results: Mapping[str, Any], who: str) -> float | None:
    """The temperature of the sparse model's `mean` or `samples`, if it has one; the dense model's figures have none."""
    found = results.get("calibrate") or {}
    own = found.get(who) or {}
    return own["value"] if own.get("taken") and "temperature" in (found.get("likelihood") or {}) else None


def _tempered(results: Mapping[str, Any]) -> str:
    """A sentence if the sparse model's NLL has a temperature that the dense model's lacks, else ""."""
    value = temperature_of(results, "mean")
    if "nll" not in results["changes"] or value is None:
        return ""
    return (
        f" The sparse model's NLL uses its temperature ({value:.3g}, from validation data), the dense model's "
        "uses none; svdc evaluate compares both with a temperature."
    )


def _metric_rows(dense: Mapping[str, Any], sparse: Mapping[str, Any], changes: Mapping[str, Any]) -> list[Row]:
    before, after = dense.get("metrics") or {}, sparse.get("metrics") or {}
    known = [name for name in _METRICS if name in before or name in after]
    found = []
    for name in known:
        a, b = before.get(name), after.get(name)
        if a is None and b is None:
            continue
        change, better = "", None
        if a is not None and b is not None:
            form, unit = ("+.2f", " points") if name == "error" else ("+.4f", "")
            change = f"{b - a:{form}}{unit}"
            span = changes.get(name) or {}
            low, high = span.get("low"), span.get("high")
            if low is not None and high is not None:
                change += f" ({low:{form}} to {high:{form}})"
                better = None if low <= 0 <= high else b < a
        found.append(Row(_METRICS[name], metric(name, a), metric(name, b), change, better))
    return found


def _size_rows(dense: Mapping[str, Any], sparse: Mapping[str, Any]) -> list[Row]:
    found = []
    for name, (label, word) in _SIZES.items():
        a, b = dense.get(name), sparse.get(name)
        if a is None and b is None:
            continue
        text = size if name == "bytes" else count
        found.append(Row(label, text(a), text(b), *_ratio(a, b, word)))
    return found


def _latency_rows(dense: Mapping[str, Any], sparse: Mapping[str, Any]) -> list[Row]:
    before, after = dense.get("latency_ms") or {}, sparse.get("latency_ms") or {}
    found = []
    for name in dict.fromkeys([*before, *after]):
        a, b = before.get(name), after.get(name)
        label = f"Latency, batch {name.removeprefix('batch_')}"
        found.append(Row(label, milliseconds(a), milliseconds(b), *_ratio(a, b, "faster", same=0.03)))
    return found


def _ratio(dense: float | None, sparse: float | None, word: str, same: float = 0.005) -> tuple[str, bool | None]:
    """The change in words, and whether it is for the better. same: ratios this close to 1 count as no change (for latencies,
    as much as one measurement differs from another)."""
    if dense is None or sparse is None or sparse <= 0 or dense <= 0:
        return "", None
    ratio = dense / sparse
    if abs(ratio - 1) < same:
        return "the same", None
    return " ".join(worded(ratio, word)), ratio > 1


def worded(ratio: float, word: str) -> tuple[str, str]:
    """A ratio as text, and the word for it: 8.4x fewer, or for 0.5, 2.0x more."""
    if ratio >= 1:
        return times(ratio), word
    return times(1 / ratio), dict(fewer="more", smaller="larger", faster="slower")[word]


def times(ratio: float) -> str:
    """A ratio as text: 84x, 8.4x, 1.08x."""
    return f"{ratio:,.0f}x" if ratio >= 99.5 else f"{ratio:.1f}x" if ratio >= 1.95 else f"{ratio:.2f}x"


def metric(name: str, value: float | None) -> str:
    """A metric as text; `error` is in percent."""
    return "–" if value is None else f"{value:.2f} %" if name == "error" else f"{value:.4f}"


def count(value: float | None) -> str:
    """A number of things: exact below ten million, else with three digits and a unit."""
    if value is None:
        return "–"
    if value < 1e7:
        return f"{value:,.0f}"
    unit, name = (1e9, "G") if value >= 1e9 else (1e6, "M")
    return f"{value / unit:.3g} {name}"


def size(value: float | None) -> str:
    """Bytes in decimal units."""
    if value is None:
        return "–"
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= unit:
            return f"{value / unit:.1f} {name}"
    return f"{value:.0f} B"


def milliseconds(value: float | None) -> str:
    """A time in milliseconds to three digits."""
    return "–" if value is None else f"{value:.3f} ms" if value < 1 else f"{value:.2f} ms" if value < 10 else f"{value:.0f} ms"


def duration(seconds: float) -> str:
    """A time in seconds as text: 0.4 s, 12 s, 3 min 20 s, 2 h 5 min."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
