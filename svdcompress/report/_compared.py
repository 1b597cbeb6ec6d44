"""A page that puts several runs side by side: error against size, a table of all measures, settings that differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import yaml

from svdcompress.report import _html as html
from svdcompress.report._draw import QUIET, Drawing, mark, series
from svdcompress.report._page import whole
from svdcompress.report._plots import CSS_DASHES
from svdcompress.report._rows import count, metric, milliseconds, size, times
from svdcompress.report._tradeoff import Point, of_a_run, run_point

RATIOS = {"nonzero": "non-zeros", "parameters": "parameters", "macs": "MACs", "bytes": "ONNX file"}


def compared(runs: Sequence[tuple[str, Mapping[str, Any]]], measure: str) -> str:
    """The page. runs: unique names, each with the content of the run's report.json. measure: the size on the x axis."""
    names = [name for name, _ in runs]
    sections = {
        "tradeoff": ("Error vs. size", _tradeoff(runs, measure)),
        "figures": ("Figures", _figures(runs)),
        "sizes": ("Sizes and latencies", _sizes(runs)),
        "settings": ("Settings that differ", _settings(runs)),
    }
    present = {anchor: found for anchor, found in sections.items() if found[1]}
    return whole(f"{len(names)} runs", html.paragraph(" · ".join(names)), present)


Found = tuple[int, str, Mapping[str, Any], tuple[Point, float]]


def _tradeoff(runs: Sequence[tuple[str, Mapping[str, Any]]], measure: str) -> str:
    """Test error, with the interval of its change, against size; a color for each run. Errors and RMSEs have a figure each."""
    points = [(k, name, results, run_point(results, measure)) for k, (name, results) in enumerate(runs)]
    kinds: dict[str, list[Found]] = {"error": [], "rmse": []}
    for k, name, results, pair in points:
        if pair is not None:
            kinds["rmse" if results.get("task") in ("regression", "gaussian") else "error"].append((k, name, results, pair))
    drawn = "".join(f'<div class="wide">{_drawn(found, kind, measure)}</div>' for kind, found in kinds.items() if found)
    return html.filtered([name for name, _ in runs], drawn, CSS_DASHES) if drawn else ""


def _drawn(found: Sequence[Found], kind: str, measure: str) -> str:
    """The figure of the runs of one kind: error or rmse."""
    unit = "test RMSE" if kind == "rmse" else "test error (%)"
    with Drawing(5.2, 3.0) as drawing:
        ax = drawing.ax
        for k, name, results, (point, dense) in found:
            span = (results.get("changes") or {}).get(kind) or {}
            low, high = span.get("low"), span.get("high")
            shape = "osD"[k // 6 % 3]
            if low is not None and high is not None:
                mark(ax.plot([point.ratio] * 2, [dense + low, dense + high], color=series(k), lw=1.2, alpha=0.6), k)
            mark(ax.plot(point.ratio, point.error, shape, color=series(k), ms=5), k)
            told = f"; change {low:+.3g} to {high:+.3g} (95%)" if low is not None and high is not None else ""
            text = f"{name}: {point.ratio:.3g}x {of_a_run(measure)}, {unit} {point.error:.4g}, dense {dense:.4g}{told}"
            drawing.points(ax, [(point.ratio, point.error)], [text], k)
        for dense in sorted({round(pair[1], 6) for *_, pair in found}):
            ax.axhline(dense, color=QUIET, lw=0.8, ls=(0, (4, 3)))
        ax.set_ylim(bottom=max(0.0, ax.get_ylim()[0]))
        ax.set(xlabel=f"times {of_a_run(measure)}", ylabel=unit)
    caption = (
        "Vertical lines: the 95% interval of each run's change, paired with its own dense model on the test data. Dashed: the "
        "dense models. Runs whose lines overlap may be equally good."
    )
    label = f"{unit} of each run against how many times {of_a_run(measure)}"
    return html.figure(drawing.svg, "", caption, label).replace("<figure>", '<figure class="one">', 1)


def _figures(runs: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Metrics on the test data, dense and sparse, with the interval of the change."""
    body = []
    for name, results in runs:
        sides = [((results.get(side) or {}).get("metrics") or {}) for side in ("dense", "sparse")]
        key = "error" if "error" in sides[1] else "rmse"
        cells = [html.right(metric(key, side.get(key))) for side in sides]
        cells.append(html.right(_change((results.get("changes") or {}).get(key), " points" if key == "error" else "")))
        cells += [html.right(metric("nll", side.get("nll"))) for side in sides]
        cells.append(html.right(_change((results.get("changes") or {}).get("nll"), "")))
        tested = (results.get("examples") or {}).get("test")
        body.append([html.name_cell(name), *cells, html.right(count(tested))])
    heads = [">dense", ">sparse", ">change (95%)", ">NLL, dense", ">NLL, sparse", ">change (95%)", ">test examples"]
    note = html.paragraph("Error in %, or RMSE, on each run's own test data. A change whose interval contains 0 may be chance.")
    return note + html.table(["run", *heads], body)


def _change(span: Mapping[str, Any] | None, unit: str) -> str:
    low, high = (span or {}).get("low"), (span or {}).get("high")
    return "–" if low is None or high is None else f"{low:+.3g} to {high:+.3g}{unit}"


def _sizes(runs: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Sizes and latencies of each sparse model, and in parentheses how many times smaller or faster than the dense one."""
    batches = list(dict.fromkeys(b for _, results in runs for b in ((results.get("sparse") or {}).get("latency_ms") or {})))
    body = []
    for name, results in runs:
        sparse, ratios = results.get("sparse") or {}, results.get("compression") or {}
        cells = []
        for key in RATIOS:
            shown = size(sparse.get(key)) if key == "bytes" else count(sparse.get(key))
            cells.append(html.right(_beside(shown, ratios.get(key))))
        latency = ratios.get("latency") or {}
        for batch in batches:
            value = (sparse.get("latency_ms") or {}).get(batch)
            cells.append(html.right(_beside(milliseconds(value), latency.get(batch))))
        body.append([html.name_cell(name), *cells])
    heads = [*RATIOS.values(), *(f"batch {batch.removeprefix('batch_')}" for batch in batches)]
    note = html.paragraph("In parentheses: how many times smaller or faster than the run's own dense model.")
    return note + html.table(["run", *(f">{head}" for head in heads)], body)


def _beside(shown: str, ratio: Any) -> str:
    return f"{shown} ({times(ratio)})" if html.is_number(ratio) else shown


def _settings(runs: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Fields of the recipes whose values are not the same in all runs."""
    recipes = [dict(_flat(_parsed(results.get("recipe")))) for _, results in runs]
    fields = list(dict.fromkeys(field for recipe in recipes for field in recipe))
    differ = [field for field in fields if len({recipe.get(field, "–") for recipe in recipes}) > 1]
    differ = [field for field in differ if field != "description"]
    if not differ:
        return ""
    body = [[html.name_cell(field), *(escape(recipe.get(field, "–")) for recipe in recipes)] for field in differ]
    return html.table(["field", *(name for name, _ in runs)], body)


def _parsed(text: Any) -> Any:
    try:
        return yaml.safe_load(str(text or "")) or {}
    except yaml.YAMLError:
        return {}


def _flat(value: Any, prefix: str = "") -> list[tuple[str, str]]:
    """A recipe's fields by their dotted names, values as text."""
    if not isinstance(value, Mapping):
        return [(prefix, str(value))]
    return [pair for key, part in value.items() for pair in _flat(part, f"{prefix}.{key}" if prefix else str(key))]
