"""The sections of the page: HTML from results; "" where there is nothing to show."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from svdcompress.report import _plots
from svdcompress.report._rows import chance, count, duration, rounding, rows, times
from svdcompress.report._small import small_files

SINGLE_HISTOGRAMS = 9
"""Up to so many layers have a histogram each; more of them share one map."""


def subtitle(results: Mapping[str, Any]) -> str:
    """Under the title: when, where, how long; what the recipe says of itself; warnings."""
    created = str(results.get("created") or "").replace("T", " ")[:16]
    parts = [part for part in (created, str(results.get("device") or "")) if part]
    if results.get("seed") is not None:
        parts.append(f"seed {results['seed']}")
    if results.get("seconds"):
        parts.append(duration(sum(results["seconds"].values())))
    warnings = "".join(f'<p class="warning">{escape(str(text))}</p>' for text in results.get("warnings") or ())
    notes = "".join(f'<p class="quiet">{escape(str(text))}</p>' for text in results.get("notes") or ())
    described = _tag("p", escape(str(results["description"]))) if results.get("description") else ""
    return f'<p class="quiet">{escape(" · ".join(parts))}</p>{described}{warnings}{notes}'


def summary(results: Mapping[str, Any], folder: Path | None) -> str:
    """Tiles with the main ratios, then the table."""
    lines = rows(results)
    if not lines:
        return ""
    tiles = "".join(f'<div class="tile"><b>{escape(value)}</b>{escape(label)}</div>' for value, label in _tiles(results))
    body = []
    for row in lines:
        kind = {True: "good", False: "poor", None: ""}[row.better]
        body.append([row.label, _right(row.dense), _right(f"<b>{row.sparse}</b>"), _tag("td", escape(row.change), kind)])
    table = _table(["", ">dense", ">sparse", "change"], body, "narrow")
    small = "".join(map(_paragraph, small_files(results)))
    return f'<div class="tiles">{tiles}</div>{table}{_paragraph(chance(results))}{small}'


def _tiles(results: Mapping[str, Any]) -> list[tuple[str, str]]:
    ratios = results.get("compression") or {}
    tiles = []
    for key, label in (("nonzero", "fewer non-zeros"), ("bytes", "smaller ONNX file"), ("macs", "fewer MACs")):
        if ratios.get(key):
            tiles.append((times(ratios[key]), label))
    latency = ratios.get("latency")
    for batch, ratio in latency.items() if isinstance(latency, Mapping) else ():
        tiles.append((times(ratio), f"the speed at batch {batch.removeprefix('batch_')}"))
    return tiles


def pictures(results: Mapping[str, Any], folder: Path | None) -> str:
    """Pictures that the run's own stages drew, read from its folder."""
    shown = []
    for picture in results.get("pictures") or ():
        path = None if folder is None else folder / picture["file"]
        if path is None or not os.path.isfile(path):
            continue
        kind = "svg+xml" if path.suffix == ".svg" else path.suffix.lstrip(".").replace("jpg", "jpeg")
        source = f"data:image/{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"
        title = escape(str(picture.get("title", path.stem)))
        shown.append(_figure(f'<img src="{source}" alt="{title}">', title, escape(str(picture.get("caption") or ""))))
    return _figures(shown, "drawn")


def uncertainty(results: Mapping[str, Any], folder: Path | None) -> str:
    """One row for each model or method, one column for each figure that any of them has."""
    table = _numbers(results.get("uncertainty"))
    return _paragraph(str((results.get("uncertainty_of") or {}).get("text") or "")) + table if table else ""


def figures(results: Mapping[str, Any], folder: Path | None) -> str:
    """An experiment's own tables, under their keys."""
    if not results.get("experiment"):
        return ""
    found = {key: _numbers(value) for key, value in results.items() if key not in ("uncertainty", "latency")}
    shown = [_titled(escape(_words(key)), table) for key, table in found.items() if table]
    sparsity = results.get("sparsity") or {}
    note = f"The sparse model keeps {sparsity['kept']:,} of {sparsity['weights']:,} weights." if sparsity.get("weights") else ""
    return _paragraph(note) + "".join(shown)


def _numbers(rows_: Any) -> str:
    """A table of rows of figures, {row: {figure: number}}; "" for anything else. What is no number is left out."""
    if not isinstance(rows_, Mapping):
        return ""
    table = {name: row for name, row in rows_.items() if isinstance(row, Mapping)}
    columns = list(dict.fromkeys(key for row in table.values() for key, value in row.items() if _is_number(value)))
    if not columns:
        return ""
    body = [[_name(name), *(_right(_figure_text(key, row.get(key))) for key in columns)] for name, row in table.items()]
    return _table(["", *(f">{_words(key)}" for key in columns)], body)


def calibration(results: Mapping[str, Any], folder: Path | None) -> str:
    """The reliability diagram."""
    models = {name: bins for name, bins in (results.get("calibration") or {}).items() if isinstance(bins, Mapping)}
    models = {name: bins for name, bins in models.items() if bins.get("confidence")}
    if not models:
        return ""
    caption = (
        "Accuracy against confidence on the test set, in bins; pale dots are bins of fewer than ten examples. "
        "Below the dashed line a model is overconfident."
    )
    return _figures([_figure(_plots.reliability(models), "", caption)], "two")


def layers(results: Mapping[str, Any], folder: Path | None) -> str:
    """Shapes, sparsity and units left, one row for each layer."""
    entries = results.get("layers") or ()
    if not entries:
        return ""
    body = []
    for entry in entries:
        sparsity = entry.get("sparsity")
        body.append(
            [
                _name(entry["name"]),
                _right("–" if sparsity is None else f"{100 * sparsity:.1f} %{_bar(sparsity)}"),
                _right(_units(entry)),
                _right(_shape(entry.get("shape_before"))),
                _right(_shape(entry.get("shape_after"))),
            ]
        )
    return _table(["layer", ">sparsity", ">units left", ">shape", ">pruned to"], body)


def _units(entry: Mapping[str, Any]) -> str:
    """Units that are left: those of the pruned shape, or else those with a weight left."""
    before, after = entry.get("outputs_before"), entry.get("outputs")
    shapes = entry.get("shape_before"), entry.get("shape_after")
    if shapes[0] and shapes[1] and before in (None, shapes[0][0]):
        before, after = shapes[0][0], shapes[1][0]
    if not before or after is None:
        return "–"
    return f"{after:,} of {before:,}{_bar(after / before, 'units')}"


def pruning(results: Mapping[str, Any], folder: Path | None) -> str:
    """Groups of units that were removed or kept, with the reason."""
    report = results.get("pruning") or {}
    groups = report.get("groups") or ()
    if not groups:
        return ""
    facts = []
    if report.get("max_error") is not None:
        facts.append(f"Largest difference between masked and pruned model: {report['max_error']:.1e}.")
    kept_inputs = report.get("inputs_kept")
    if kept_inputs is not None:
        fact = f"The pruned model reads {len(kept_inputs):,} of the inputs"
        if report.get("inputs_gathered") is False:
            fact += "; its ONNX file reads all of them, with zero weights, because that measured faster than selecting"
        facts.append(f"{fact}.")
    rounded = rounding(results)
    facts += [rounded] if rounded else []
    facts += [f"{str(note)[:1].upper()}{str(note)[1:]}." for note in report.get("notes") or ()]
    body = [
        [
            _name(group["name"]),
            _right(count(_length(group.get("removed")))),
            _right(count(_length(group.get("kept")))),
            *([_right(count(_length(group.get("kept_unrounded"))))] if rounded else []),
            escape(str(group.get("reason") or "")),
        ]
        for group in groups
    ]
    heads = ["units of", ">removed", ">kept", *([">kept without rounding"] if rounded else []), "why units stay"]
    table = _table(heads, body)
    if len(body) > 12:
        table = f"<details><summary>{len(body)} groups</summary>{table}</details>"
    return _paragraph(" ".join(facts)) + table


def curves(results: Mapping[str, Any], folder: Path | None) -> str:
    """Training curves by epoch, a colour for each stage."""
    history = results.get("history") or ()
    if not history:
        return ""
    shown = []
    for name, label in _plots.CURVES.items():
        svg = _plots.training_curve(history, name)
        if svg is not None:
            shown.append(_figure(svg, label))
    stages = enumerate(_plots.stages(history))
    items = "".join(f'<li><i style="background:var(--c{k % 6 + 1})"></i>{escape(stage)}</li>' for k, stage in stages)
    return f'<ul class="legend">{items}</ul>{_figures(shown)}'


def relevance(results: Mapping[str, Any], folder: Path | None) -> str:
    """Log alpha by layer with the threshold, and what other thresholds would have given."""
    histograms, threshold = results.get("log_alpha") or {}, results.get("threshold")
    threshold = threshold if _is_number(threshold) else None
    shown = []
    note = ""
    if histograms:
        note = (
            "Log alpha is the log of a weight's noise over its signal. Right of the threshold (vertical line) the data doesn't "
            "support the weight, and it is dropped."
        )
        if len(histograms) <= SINGLE_HISTOGRAMS:
            shown = [_figure(_plots.log_alpha(h, threshold), escape(name)) for name, h in histograms.items()]
    single = ""
    if len(histograms) > SINGLE_HISTOGRAMS:
        single = f'<div class="wide"><div class="one">{_figure(_plots.log_alpha_map(histograms, threshold), "")}</div></div>'
    curve = _plots.threshold_curve(results.get("threshold_curve") or (), threshold)
    if curve is not None:
        shown.append(_figure(curve, "Other thresholds", "On validation data."))
    return _paragraph(note) + single + _figures(shown) if histograms or shown else ""


def filters(results: Mapping[str, Any], folder: Path | None) -> str:
    """First-layer filters before and after, where they are pictures."""
    shown = []
    for name, pair in (results.get("filters") or {}).items():
        svg = _plots.filters(pair["before"], pair["after"])
        if svg is not None:
            shown.append(
                _figure(
                    svg,
                    escape(name),
                    "Red is above 0, blue below, white 0; same scale for both. The largest filters after pruning.",
                )
            )
    return _figures(shown, "two")


def latency(results: Mapping[str, Any], folder: Path | None) -> str:
    """Bars of the two files."""
    dense = (results.get("dense") or {}).get("latency_ms") or {}
    sparse = (results.get("sparse") or {}).get("latency_ms") or {}
    if not set(dense) & set(sparse):
        return ""
    threads = results.get("threads")
    caption = "Medians in onnxruntime on the CPU" + (f", {threads} thread{'s' * (threads != 1)}" if threads else "") + "."
    return _figures([_figure(_plots.latency_bars(dense, sparse), "", caption)], "two")


def run(results: Mapping[str, Any], folder: Path | None) -> str:
    """Time by stage, parity of the exported files, versions."""
    blocks = []
    if results.get("seconds"):
        body = [[escape(_words(stage)), _right(duration(value))] for stage, value in results["seconds"].items()]
        blocks.append(_titled("Time", _table(["stage", ">time"], body)))
    if results.get("parity"):
        body = [[escape(name), _right("–" if v is None else f"{v:.1e}")] for name, v in results["parity"].items()]
        blocks.append(_titled("Largest difference from PyTorch", _table(["file", ">difference"], body)))
    if results.get("versions"):
        body = [[escape(name), _right(escape(str(value)))] for name, value in results["versions"].items()]
        blocks.append(_titled("Versions", _table(["package", ">version"], body)))
    return _figures(blocks)


def recipe(results: Mapping[str, Any], folder: Path | None) -> str:
    """The resolved recipe, folded."""
    text = results.get("recipe")
    if not text:
        return ""
    return f"<details><summary>every setting of this run</summary><pre>{escape(str(text))}</pre></details>"


# Pieces of HTML


def _tag(name: str, content: str, kind: str = "") -> str:
    return f'<{name} class="{kind}">{content}</{name}>' if kind else f"<{name}>{content}</{name}>"


def _name(name: Any) -> str:
    """A cell with a dotted name, which may break after its dots."""
    return _tag("td", escape(str(name)).replace(".", ".<wbr>"), "name")


def _right(content: str) -> str:
    return _tag("td", content, "number")


def _table(headings: Iterable[str], body: Iterable[Sequence[str]], kind: str = "") -> str:
    """A table; headings that begin with ">" stand right. Cells that are not tags become cells."""
    head = "".join(_tag("th", escape(h.removeprefix(">")), "number" if h.startswith(">") else "") for h in headings)
    lines = ("".join(cell if cell.startswith("<td") else _tag("td", cell) for cell in row) for row in body)
    return f'<div class="wide {kind}"><table><tr>{head}</tr>{"".join(f"<tr>{line}</tr>" for line in lines)}</table></div>'


def _figure(svg: str, title: str, caption: str = "") -> str:
    return f"<figure>{_tag('h3', title) if title else ''}{svg}{_tag('figcaption', caption) if caption else ''}</figure>"


def _figures(shown: Sequence[str], kind: str = "") -> str:
    return f'<div class="figures {kind}">{"".join(shown)}</div>' if shown else ""


def _titled(title: str, content: str) -> str:
    return f"<div><h3>{title}</h3>{content}</div>"


def _paragraph(text: str) -> str:
    return _tag("p", escape(text), "quiet") if text else ""


def _bar(share: float, kind: str = "") -> str:
    return f'<span class="bar {kind}"><i style="width:{100 * min(max(share, 0), 1):.1f}%"></i></span>'


def _shape(shape: Sequence[int] | None) -> str:
    return "–" if not shape else " × ".join(f"{n:,}" for n in shape)


def _length(value: Any) -> float | None:
    return len(value) if isinstance(value, list) else value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _figure_text(key: str, value: Any) -> str:
    if not _is_number(value):
        return "–"
    if isinstance(value, int):
        return f"{value:,}"
    if 1e-12 < abs(value) < 1e-4:
        return f"{value:.1e}"
    return f"{value:,.{2 if key == 'error' or abs(value) >= 100 else 4}f}"


def _words(name: str) -> str:
    """A key as a heading: `mutual_information` -> mutual information; short names such as nll are abbreviations."""
    if name in ("nll", "ece", "rmse", "mae", "mi"):
        return name.upper()
    return {"brier": "Brier", "error": "error %"}.get(name, name.replace("_", " "))
