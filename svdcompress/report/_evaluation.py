"""The section on the results of `svdc evaluate`, if it has been run: from evaluation/evaluation.json in the run's folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from matplotlib.ticker import FuncFormatter

from svdcompress.errors import shortened
from svdcompress.files import parse_json
from svdcompress.report import _html as html
from svdcompress.report import _plots
from svdcompress.report._draw import QUIET, Drawing, mark, series, short, steady

FILE = Path("evaluation") / "evaluation.json"
HEADINGS = {
    "error": "error %",
    "nll": "NLL",
    "brier": "Brier",
    "ece": "ECE",
    "rmse": "RMSE",
    "r2": "R2",
    "selective": "of the surest",
}
LOWER = ("error", "nll", "brier", "ece", "rmse")
DRAWN = {"error": "error (%)", "rmse": "RMSE", "nll": "NLL", "ece": "ECE"}
SCORES = {
    "softmax": "1 - confidence",
    "entropy": "predictive entropy",
    "mutual_information": "mutual information",
    "energy": "energy",
    "variance": "variance",
}


def evaluation(results: Mapping[str, Any], folder: Path | None) -> str:
    """Contenders, their figures on the test data, error by share answered, figures under shift; "" without an evaluation."""
    path = None if folder is None else folder / FILE
    if path is None or not path.is_file():
        return ""
    try:
        return _shown(parse_json(path.read_bytes()))
    except (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError, ArithmeticError) as error:
        reason = shortened(f"{type(error).__name__}: {error}")
        return f'<p class="warning">{escape(str(FILE))} cannot be shown: {escape(reason)}. Run svdc evaluate again.</p>'


def _shown(found: Mapping[str, Any]) -> str:
    contenders = found["contenders"]
    shift = found.get("shift")
    parts = [_intro(found), _table(contenders, found["reference"]), _abouts(contenders)]
    figures = [_answered(contenders), _levels(shift) if shift else "", _reliability(contenders), _elsewhere(contenders)]
    names = [str(row["name"]) for row in contenders]
    parts.append(html.filtered(names, html.figures([one for one in figures if one], "two"), _plots.CSS_DASHES))
    return "".join(parts)


def _intro(found: Mapping[str, Any]) -> str:
    count = f"{found['inputs']:,} test inputs, " if found.get("inputs") else ""
    text = (
        f"svdc evaluate: {count}{found['samples']:,} samples. Green and red: better and worse than "
        f"{found['reference']} by a difference whose 95% interval ({found['replicates']:,} bootstraps of the inputs) "
        "excludes 0; differences without color may be chance."
    )
    notes = "".join(f'<p class="quiet">{escape(str(line))}</p>' for line in found.get("notes") or ())
    return f'<p class="quiet">{escape(text)}</p>{notes}'


def _table(contenders: Sequence[Mapping[str, Any]], reference: str) -> str:
    names = list(contenders[0]["metrics"])
    answered = [entry["loss"] for entry in (contenders[0].get("selective") or {}).get("answered", [])]
    heads = [*(HEADINGS.get(name, name) for name in names), *(f"answered at {100 * (1 - loss):g}%" for loss in answered)]
    titles = "".join(f'<th scope="col" class="number">{escape(head)}</th>' for head in heads)
    lines = []
    for row in contenders:
        cells = "".join(_cell(row, name, reference) for name in names)
        shares = (row.get("selective") or {}).get("answered", [])
        cells += "".join(f'<td class="number">{100 * float(entry["share"]):.1f}%</td>' for entry in shares)
        lines.append(f'<tr><td class="name">{escape(str(row["name"]))}</td>{cells}</tr>')
    table = f"<table><thead><tr><td></td>{titles}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    return html.scrolled(table, f"methods by {', '.join(heads)}")


def _cell(row: Mapping[str, Any], name: str, reference: str) -> str:
    value = row["metrics"].get(name)
    if value is None:
        return '<td class="number">–</td>'
    kind, title = "", ""
    difference = (row.get("difference") or {}).get(name)
    if difference and row["name"] != reference:
        low, high = float(difference["low"]), float(difference["high"])
        title = f' title="{float(difference["value"]):+.4g}, 95% interval {low:+.3g} to {high:+.3g}"'
        if name in LOWER:
            kind = " good" if high < 0 else " poor" if low > 0 else ""
    return f'<td class="number{kind}"{title}>{float(value):.4g}</td>'


def _abouts(contenders: Sequence[Mapping[str, Any]]) -> str:
    lines = [f"{row['name']}: {row['about']}." for row in contenders if row.get("about")]
    return "".join(f'<p class="quiet">{escape(line)}</p>' for line in lines)


def _answered(contenders: Sequence[Mapping[str, Any]]) -> str:
    """Error against the share of inputs answered, by which a service can choose its threshold."""
    curves = [(k, row["name"], row["selective"]) for k, row in enumerate(contenders) if row.get("selective")]
    if not curves:
        return ""
    percent = "error" in contenders[0]["metrics"]
    with Drawing(3.9, 3.6) as drawing:
        lowest = [100 * float(value) for *_, curve in curves for value in curve["loss"] if value > 0]
        for k, name, curve in curves:
            loss = [100 * float(value) if percent else float(value) ** 0.5 for value in curve["loss"]]
            share = [100 * float(part) for part in curve["share"]]
            mark(drawing.ax.plot(share, loss, color=series(k), ls=_plots.DASHES[k // 6 % 3]), k)
            unit = "% error" if percent else "RMSE"
            texts = [f"{name}: {a:.3g}% answered, {b:.3g} {unit}" for a, b in zip(share, loss, strict=True)]
            drawing.points(drawing.ax, zip(share, loss, strict=True), texts, k)
        if percent and lowest:
            drawing.ax.set_yscale("symlog", linthresh=max(min(lowest), 1e-3), linscale=0.3)
            drawing.ax.yaxis.set_major_formatter(FuncFormatter(short))
        drawing.ax.set(xlim=(0, 100), ylim=(0, None), xlabel="inputs answered, the surest first (%)")
        drawing.ax.set_ylabel("error of answered inputs (%)" if percent else "RMSE of answered inputs")
    caption = (
        "Further left, only the inputs that the model is surest of are answered, and the others are handed on. Choose the "
        "share by the error that you can accept."
    )
    return html.figure(drawing.svg, "Error by share answered", caption, "Error of answered inputs against the share answered")


def _levels(shift: Mapping[str, Any]) -> str:
    """Figures by level of corruption, averaged over the kinds."""
    kinds = list(shift["curves"])
    names = list(shift["curves"][kinds[0]])
    measures = [key for key in DRAWN if key in shift["curves"][kinds[0]][names[0]][0]]
    with Drawing(3.9, 0.6 + 1.2 * len(measures), rows=len(measures), sharex=True) as drawing:
        for axis, measure in zip(drawing.axes, measures, strict=True):
            for k, name in enumerate(names):
                every = [[float(point[measure]) for point in shift["curves"][kind][name]] for kind in kinds]
                mean = [sum(values) / len(values) for values in zip(*every, strict=True)]
                mark(axis.plot(range(len(mean)), mean, color=series(k), ls=_plots.DASHES[k // 6 % 3]), k)
                texts = [f"{name}, level {level}: {DRAWN[measure]} {value:.4g}" for level, value in enumerate(mean)]
                drawing.points(axis, enumerate(mean), texts, k)
            low, high = axis.get_ylim()
            steady(axis, 0.05 * max(abs(low), abs(high)))
            axis.set_ylabel(DRAWN[measure])
        drawing.axes[-1].set_xlabel("level of corruption (0: unchanged)")
    caption = f"Means over {escape(', '.join(kinds))}; {int(shift['inputs']):,} test inputs."
    return html.figure(
        drawing.svg, "Under shift", caption, f"{', '.join(DRAWN[key] for key in measures)} by level of corruption"
    )


def _reliability(contenders: Sequence[Mapping[str, Any]]) -> str:
    """Accuracy by confidence of each contender."""
    shown = {
        str(row["name"]): {**row["reliability"], "ece": row["metrics"].get("ece")}
        for row in contenders
        if row.get("reliability")
    }
    if len(shown) != len(contenders):  # colors go by position
        return ""
    label = "Reliability diagram of all methods"
    return html.figure(_plots.reliability(shown), "Reliability", "Below the dashed line a method is overconfident.", label)


def _elsewhere(contenders: Sequence[Mapping[str, Any]]) -> str:
    """How well each contender's scores separate the test inputs from others; the best are on the right."""
    rows = [(k, str(row["name"]), row["ood"]) for k, row in enumerate(contenders) if row.get("ood")]
    sets = list(dict.fromkeys(name for *_, ood in rows for name in ood))
    if not sets:
        return ""
    scores = list(dict.fromkeys(score for *_, ood in rows for found in ood.values() for score in found))
    with Drawing(3.9, 0.6 + 0.26 * len(sets) * len(scores)) as drawing:
        ax, lines = drawing.ax, [(name, score) for name in sets for score in scores]
        for k, who, ood in rows:
            at = [(float(ood[s][score]), y) for y, (s, score) in enumerate(lines) if s in ood and score in ood[s]]
            if not at:
                continue
            mark(ax.plot(*zip(*at, strict=True), "o", color=series(k), ms=4, alpha=0.85), k)
            texts = [f"{who}: {SCORES.get(lines[y][1], lines[y][1])}, {lines[y][0]}: AUROC {x:.3f}" for x, y in at]
            drawing.points(ax, at, texts, k)
        ax.axvline(0.5, color=QUIET, lw=0.8, ls=(0, (4, 3)))
        ax.set_yticks(range(len(lines)), [f"{s}: {SCORES.get(score, score)}" for s, score in lines], fontsize=7)
        ax.invert_yaxis()
        ax.set_xlim(min(0.45, ax.get_xlim()[0]), 1.02)
        ax.set_xlabel("AUROC (0.5: no better than chance)")
    caption = "How well a score tells the test inputs from each kind of other inputs."
    return html.figure(drawing.svg, "Inputs from elsewhere", caption, "AUROC of each score for each kind of other inputs")
