"""The sections of the page: HTML from results; "" where there is nothing to show."""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from svdcompress.report import _html as html
from svdcompress.report import _plots
from svdcompress.report._rows import count, duration, rounding

SINGLE_HISTOGRAMS = 9
"""Up to this many layers have a histogram each; more of them share one map."""


def subtitle(results: Mapping[str, Any]) -> str:
    """Below the title: date, device, seed and duration; the recipe's description; warnings and notes."""
    created = str(results.get("created") or "").replace("T", " ")[:16]
    parts = [part for part in (created, str(results.get("device") or "")) if part]
    if results.get("seed") is not None:
        parts.append(f"seed {results['seed']}")
    if results.get("seconds"):
        parts.append(duration(sum(results["seconds"].values())))
    warnings = "".join(f'<p class="warning">{escape(str(text))}</p>' for text in results.get("warnings") or ())
    notes = "".join(f'<p class="quiet">{escape(str(text))}</p>' for text in results.get("notes") or ())
    described = html.tag("p", escape(str(results["description"]))) if results.get("description") else ""
    return f'<p class="quiet">{escape(" · ".join(parts))}</p>{described}{warnings}{notes}'


def pictures(results: Mapping[str, Any], folder: Path | None) -> str:
    """Pictures that the run's own stages plotted, read from its folder."""
    shown = []
    for picture in results.get("pictures") or ():
        source, dark = _source(folder, picture["file"]), _source(folder, picture.get("dark"))
        if not source:
            continue
        title = escape(str(picture.get("title", Path(picture["file"]).stem)))
        image = f'<img src="{source}" alt="{title}">'
        if dark:
            image = f'<picture><source srcset="{dark}" media="(prefers-color-scheme: dark)">{image}</picture>'
        shown.append(html.figure(image, title, escape(str(picture.get("caption") or ""))))
    return html.figures(shown, "drawn")


def _source(folder: Path | None, name: str | None) -> str:
    """A picture of the folder as a data URL; "" if it is missing."""
    path = None if folder is None or name is None else folder / name
    if path is None or not os.path.isfile(path):
        return ""
    kind = "svg+xml" if path.suffix == ".svg" else path.suffix.lstrip(".").replace("jpg", "jpeg")
    return f"data:image/{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"


def uncertainty(results: Mapping[str, Any], folder: Path | None) -> str:
    """One row for each model or method, one column for each figure that any of them has."""
    table = _numbers(results.get("uncertainty"), {"coverage": "coverage of the central 95%"})
    return html.paragraph(str((results.get("uncertainty_of") or {}).get("text") or "")) + table if table else ""


def figures(results: Mapping[str, Any], folder: Path | None) -> str:
    """An experiment's own tables, under their keys."""
    if not results.get("experiment"):
        return ""
    found = {key: _numbers(value) for key, value in results.items() if key not in ("uncertainty", "latency")}
    shown = [html.titled(escape(html.words(key)), table) for key, table in found.items() if table]
    sparsity = results.get("sparsity") or {}
    note = f"The sparse model keeps {sparsity['kept']:,} of {sparsity['weights']:,} weights." if sparsity.get("weights") else ""
    return html.paragraph(note) + "".join(shown)


def _numbers(rows_: Any, names: Mapping[str, str] | None = None) -> str:
    """A table of rows of figures, {row: {figure: number}}; "" for anything else. Columns without numbers are left out. names:
    of figures whose key does not say enough."""
    if not isinstance(rows_, Mapping):
        return ""
    table = {name: row for name, row in rows_.items() if isinstance(row, Mapping)}
    columns = list(dict.fromkeys(key for row in table.values() for key, value in row.items() if html.is_number(value)))
    if not columns:
        return ""
    body = [
        [html.name_cell(name), *(html.right(html.number(key, row.get(key))) for key in columns)] for name, row in table.items()
    ]
    return html.table(["", *(f">{(names or {}).get(key) or html.words(key)}" for key in columns)], body)


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
    label = "Reliability diagram: accuracy against confidence of " + ", ".join(models)
    drawing = html.figures([html.figure(_plots.reliability(models), "", caption, label)], "two")
    names = [f"{name} (ECE {one['ece']:.4f})" if html.is_number(one.get("ece")) else name for name, one in models.items()]
    return html.filtered(names, drawing, _plots.CSS_DASHES)


def layers(results: Mapping[str, Any], folder: Path | None) -> str:
    """Shapes, sparsity, units left and costs, one row for each layer."""
    entries = results.get("layers") or ()
    if not entries:
        return ""
    types, costs = (any(entry.get(key) is not None for entry in entries) for key in ("type", "parameters"))
    body = []
    for entry in entries:
        sparsity = entry.get("sparsity")
        body.append(
            [
                html.name_cell(entry["name"]),
                *([escape(str(entry.get("type") or "–"))] if types else []),
                html.right("–" if sparsity is None else f"{100 * sparsity:.1f} %{html.bar(sparsity)}"),
                html.right(_units(entry)),
                html.right(html.shape(entry.get("shape_before"))),
                html.right(html.shape(entry.get("shape_after"))),
                *([html.right(_from_to(entry, key)) for key in ("parameters", "macs")] if costs else []),
            ]
        )
    heads = ["layer", *(["type"] if types else []), ">sparsity", ">units left", ">shape", ">pruned to"]
    return html.table([*heads, *([">parameters", ">MACs"] if costs else [])], body)


def _from_to(entry: Mapping[str, Any], key: str) -> str:
    """A count before and after."""
    before, after = entry.get(f"{key}_before"), entry.get(key)
    return "–" if before is None or after is None else f"{count(before)} → {count(after)}"


def _units(entry: Mapping[str, Any]) -> str:
    """Units that are left: those of the pruned shape, or else those with a weight left."""
    before, after = entry.get("outputs_before"), entry.get("outputs")
    shapes = entry.get("shape_before"), entry.get("shape_after")
    if shapes[0] and shapes[1] and before in (None, shapes[0][0]):
        before, after = shapes[0][0], shapes[1][0]
    if not before or after is None:
        return "–"
    return f"{after:,} of {before:,}{html.bar(after / before, 'units')}"


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
        if dropped := report.get("columns_dropped"):
            fact += f", and nothing of the column{'s' * (len(dropped) > 1)} {', '.join(map(str, dropped))}"
        if report.get("inputs_gathered") is False:
            fact += "; its ONNX file reads all of them, with zero weights, because that measured faster than selecting"
        facts.append(f"{fact}.")
    rounded = rounding(results)
    facts += [rounded] if rounded else []
    facts += [f"{str(note)[:1].upper()}{str(note)[1:]}." for note in report.get("notes") or ()]
    body = [
        [
            html.name_cell(group["name"]),
            html.right(count(html.length(group.get("removed")))),
            html.right(count(html.length(group.get("kept")))),
            *([html.right(count(html.length(group.get("kept_unrounded"))))] if rounded else []),
            escape(str(group.get("reason") or "")),
        ]
        for group in groups
    ]
    heads = ["units of", ">removed", ">kept", *([">kept without rounding"] if rounded else []), "why units stay"]
    table = html.table(heads, body)
    if len(body) > 12:
        table = f"<details><summary>{len(body)} groups</summary>{table}</details>"
    return html.paragraph(" ".join(facts)) + table


def curves(results: Mapping[str, Any], folder: Path | None) -> str:
    """Training curves by epoch, a colour for each stage."""
    history = results.get("history") or ()
    if not history:
        return ""
    shown = []
    examples = (results.get("examples") or {}).get("validation")
    for name, label in _plots.CURVES.items():
        svg = _plots.training_curve(history, name, examples)
        if svg is not None:
            shown.append(
                html.figure(svg, label, _by_chance(history, examples) if name == "val_error" else "", f"{label} by epoch")
            )
    return html.filtered(_plots.stages(history), html.figures(shown))


def _by_chance(history: Sequence[Mapping[str, Any]], examples: int | None) -> str:
    """How far errors on the validation data may differ by chance."""
    errors = [entry["val_error"] for entry in history if entry.get("val_error") is not None]
    if not errors or not examples:
        return ""
    either = _plots.chance_error(errors[-1], examples) / 2
    return f"Counted on {examples:,} examples: {either:.2g} points either way may be chance."


def relevance(results: Mapping[str, Any], folder: Path | None) -> str:
    """Log alpha by layer with the threshold, and what other thresholds would have given."""
    histograms, threshold = results.get("log_alpha") or {}, results.get("threshold")
    threshold = threshold if html.is_number(threshold) else None
    shown = []
    note = ""
    if histograms:
        note = f"Log alpha is the log of a weight's noise over its signal. {_what_went(results)}"
        if len(histograms) <= SINGLE_HISTOGRAMS:
            shown = [
                html.figure(_plots.log_alpha(h, threshold), escape(name), "", f"Histogram of log alpha in {name}")
                for name, h in histograms.items()
            ]
    single = ""
    if len(histograms) > SINGLE_HISTOGRAMS:
        single = f'<div class="wide"><div class="one">{_map(histograms, threshold)}</div></div>'
    points = results.get("threshold_curve") or ()
    curve = _plots.threshold_curve(points, threshold, (results.get("examples") or {}).get("validation"))
    if curve is not None:
        what = "error or RMSE, NLL and non-zeros against the threshold on log alpha"
        caption = "On validation data; non-zeros with the masks alone, before pruning."
        shown.append(html.figure(curve, "Other thresholds", caption, f"Other thresholds: {what}"))
    return html.paragraph(note) + single + html.figures(shown) if histograms or shown else ""


def _what_went(results: Mapping[str, Any]) -> str:
    """What the threshold decided: a search for anything but non-zeros removes whole units, by their rank."""
    unsupported = "Right of the threshold (vertical line) the data doesn't support the weight"
    if ((results.get("search") or {}).get("objective") or "nonzero") == "nonzero":
        return f"{unsupported}, and it is dropped."
    return (
        f"{unsupported}. This search removed whole units by their rank, until the model was small enough; no "
        "single weight of the units that stay was dropped."
    )


def _map(histograms: Mapping[str, Any], threshold: float | None) -> str:
    return html.figure(_plots.log_alpha_map(histograms, threshold), "", "", "Histograms of log alpha, a row for each layer")


def filters(results: Mapping[str, Any], folder: Path | None) -> str:
    """First-layer filters before and after, where they are pictures."""
    shown = []
    for name, pair in (results.get("filters") or {}).items():
        svg = _plots.filters(pair["before"], pair["after"])
        if svg is not None:
            shown.append(
                html.figure(
                    svg,
                    escape(name),
                    "Red is above 0, blue below, white 0; same scale for both. The largest filters after pruning.",
                    f"Weights of the first layer, {name}, before and after pruning",
                )
            )
    return html.figures(shown, "two")


def latency(results: Mapping[str, Any], folder: Path | None) -> str:
    """Latency of the two files as bars."""
    dense = (results.get("dense") or {}).get("latency_ms") or {}
    sparse = (results.get("sparse") or {}).get("latency_ms") or {}
    if not set(dense) & set(sparse):
        return ""
    threads, clock = results.get("threads"), results.get("clock")
    caption = f"Medians{f' of {clock}' if clock else ''} in onnxruntime on the CPU"
    caption += f", {threads} thread{'s' * (threads != 1)}." if threads else "."
    label = "Latency of the dense and the sparse file by batch size"
    return html.figures([html.figure(_plots.latency_bars(dense, sparse), "", caption, label)], "two")


def run(results: Mapping[str, Any], folder: Path | None) -> str:
    """Time by stage, parity of the exported files, versions."""
    blocks = []
    if results.get("seconds"):
        body = [[escape(html.words(stage)), html.right(duration(value))] for stage, value in results["seconds"].items()]
        blocks.append(html.titled("Time", html.table(["stage", ">time"], body)))
    if results.get("parity"):
        body = [[escape(name), html.right("–" if v is None else f"{v:.1e}")] for name, v in results["parity"].items()]
        blocks.append(html.titled("Largest difference from PyTorch", html.table(["file", ">difference"], body)))
    if results.get("versions"):
        body = [[escape(name), html.right(escape(str(value)))] for name, value in results["versions"].items()]
        blocks.append(html.titled("Versions", html.table(["package", ">version"], body)))
    return html.figures(blocks)


def recipe(results: Mapping[str, Any], folder: Path | None) -> str:
    """The resolved recipe, collapsed."""
    text = results.get("recipe")
    if not text:
        return ""
    return f"<details><summary>every setting of this run</summary><pre>{escape(str(text))}</pre></details>"
