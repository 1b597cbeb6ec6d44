"""The section of what `svdc evaluate` found, if it has been run: from evaluation/evaluation.json in the run's folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from svdcompress.errors import shortened
from svdcompress.files import parse_json
from svdcompress.report._draw import Drawing, series

FILE = Path("evaluation") / "evaluation.json"
HEADINGS = {"error": "error %", "nll": "NLL", "brier": "Brier", "ece": "ECE", "rmse": "RMSE", "selective": "of the surest"}
LOWER = ("error", "nll", "brier", "ece", "rmse")
DRAWN = {"error": "error (%)", "rmse": "RMSE", "nll": "NLL", "ece": "ECE"}
DASHES = ("-", (0, (4, 2)), (0, (1, 1.5)))


def evaluation(results: Mapping[str, Any], folder: Path | None) -> str:
    """Who was compared, what the test data show, error against the share answered, and error under shift; "" without one."""
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
    figures = [_answered(contenders), _levels(shift) if shift else ""]
    parts.append('<div class="figures two">' + "".join(figures) + "</div>")
    return "".join(parts)


def _intro(found: Mapping[str, Any]) -> str:
    count = f"{found['inputs']:,} test inputs, " if found.get("inputs") else ""
    text = (
        f"svdc evaluate: {count}{found['samples']:,} samples. Green and red: better and worse than "
        f"{found['reference']} by a difference whose 95% interval ({found['replicates']:,} bootstraps of the inputs) leaves "
        "out 0; what has no colour may be chance."
    )
    notes = "".join(f'<p class="quiet">{escape(str(line))}</p>' for line in found.get("notes") or ())
    return f'<p class="quiet">{escape(text)}</p>{notes}'


def _table(contenders: Sequence[Mapping[str, Any]], reference: str) -> str:
    names = list(contenders[0]["metrics"])
    answered = [entry["loss"] for entry in (contenders[0].get("selective") or {}).get("answered", [])]
    heads = ["", *(HEADINGS.get(name, name) for name in names), *(f"answered at {100 * (1 - loss):g}%" for loss in answered)]
    cells = "".join(f'<th class="number">{escape(head)}</th>' for head in heads[1:])
    lines = [f"<tr><th></th>{cells}</tr>"]
    for row in contenders:
        cells = "".join(_cell(row, name, reference) for name in names)
        shares = (row.get("selective") or {}).get("answered", [])
        cells += "".join(f'<td class="number">{100 * float(entry["share"]):.1f}%</td>' for entry in shares)
        lines.append(f'<tr><td class="name">{escape(str(row["name"]))}</td>{cells}</tr>')
    return f'<div class="wide"><table>{"".join(lines)}</table></div>'


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
    """Error against the share of inputs answered: where a service sets its threshold."""
    curves = [(row["name"], row["selective"]) for row in contenders if row.get("selective")]
    if not curves:
        return ""
    percent = "error" in contenders[0]["metrics"]
    with Drawing(3.9, 3.6) as drawing:
        lowest = [100 * float(value) for _, curve in curves for value in curve["loss"] if value > 0]
        for k, (name, curve) in enumerate(curves):
            loss = [100 * float(value) if percent else float(value) ** 0.5 for value in curve["loss"]]
            share = [100 * float(part) for part in curve["share"]]
            drawing.ax.plot(share, loss, color=series(k), ls=DASHES[k // 6 % 3], label=str(name))
        if percent and lowest:
            drawing.ax.set_yscale("symlog", linthresh=max(min(lowest), 1e-3), linscale=0.3)
        drawing.ax.set(xlim=(0, 100), ylim=(0, None), xlabel="inputs answered, the surest first (%)")
        drawing.ax.set_ylabel("error of what is answered (%)" if percent else "RMSE of what is answered")
        drawing.ax.legend(loc="upper left", fontsize=7)
    caption = (
        "Left: only the surest inputs are answered, the others handed on. Choose the share by the error that you can bear."
    )
    return f"<figure><h3>Error by share answered</h3>{drawing.svg}<figcaption>{caption}</figcaption></figure>"


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
                axis.plot(range(len(mean)), mean, color=series(k), ls=DASHES[k // 6 % 3])
            axis.set_ylabel(DRAWN[measure])
        drawing.axes[-1].set_xlabel("level of corruption (0: as they are)")
    caption = f"Means over {escape(', '.join(kinds))}; {int(shift['inputs']):,} test inputs. Colours as on the left."
    return f"<figure><h3>Under shift</h3>{drawing.svg}<figcaption>{caption}</figcaption></figure>"
