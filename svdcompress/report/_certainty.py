"""The page's section on the model's calibration and on what is promised from validation data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from svdcompress.report import _html as html

WHO = {"mean": "mean (model.onnx)", "samples": "samples (model_mc.onnx)"}


def certainty(results: Mapping[str, Any], folder: Path | None) -> str:
    """Temperatures, the posterior, and coverage and answers as promised and as measured on the test data."""
    parts = [_fitted(results.get("calibrate") or {}), _posteriors(results.get("calibrate") or {})]
    promises = results.get("promises") or {}
    parts += [_coverage(promises.get("coverage") or {}), _answers(promises.get("answer_above") or {})]
    return "".join(part for part in parts if part)


def _fitted(found: Mapping[str, Any]) -> str:
    rows, noise = [], "tau" in (found.get("likelihood") or {})  # without the noise there is no NLL before
    for who, name in WHO.items():
        one = found.get(who)
        if not isinstance(one, Mapping):
            continue
        value = f"{one['value']:.4g}" if one.get("taken") else "unchanged"
        before = [] if noise else [html.right(f"{one['before']:.4f}")]
        rows.append([escape(name), html.right(value), *before, html.right(f"{one['after']:.4f}")])
    if not rows:
        return ""
    heads = [">noise precision"] if noise else [">temperature", ">validation NLL before"]
    notes = html.paragraph(" ".join(f"{note}." for note in found.get("notes") or ()))
    table = html.table(["", *heads, f">{'validation NLL' if noise else 'after'}, on held-out examples"], rows)
    return html.titled(f"Fitted on validation data; posterior: {escape(str(found.get('posterior', '')))}", table + notes)


def _posteriors(found: Mapping[str, Any]) -> str:
    tried = found.get("tried") or ()
    if len(tried) < 2:
        return ""
    body = [
        [escape(str(one["name"])), html.right("–" if one.get("nll") is None else f"{one['nll']:.4f}"), escape(str(one["note"]))]
        for one in tried
    ]
    return html.titled("Posteriors", html.table(["", ">held-out validation NLL", ""], body))


def _coverage(found: Mapping[str, Any]) -> str:
    rows = []
    for who, one in found.items():
        test = one.get("test") or {}
        size = test.get("size")
        rows.append(
            [
                escape(WHO.get(who, who)),
                html.right(_percent(one["coverage"])),
                html.right(_percent(test.get("coverage")) + _of_targets(test.get("each"))),
                html.right("–" if size is None else f"{size:.3g} {'classes' if one.get('kind') == 'sets' else 'deviations'}"),
                html.right(f"{one['examples']:,}"),
            ]
        )
    if not rows:
        return ""
    headings = ["", ">promised", ">on the test data", ">mean size", ">validation targets"]
    return html.titled("Prediction sets and intervals (split conformal)", html.table(headings, rows))


def _of_targets(each: Sequence[float] | None) -> str:
    """In parentheses, the lowest and the highest coverage of a single target; "" unless there are several."""
    return "" if not each else f" (targets {_percent(min(each))} to {_percent(max(each))})"


def _answers(found: Mapping[str, Any]) -> str:
    rows = []
    for who, one in found.items():
        test = one.get("test") or {}
        rows.append(
            [
                escape(WHO.get(who, who)),
                html.right(_percent(one["accuracy"])),
                html.right(f"{one['threshold']:.4g}"),
                html.right(_percent(one["answered"])),
                html.right(_percent(test.get("answered"))),
                html.right(_percent(test.get("accuracy"))),
            ]
        )
    if not rows:
        return ""
    headings = ["", ">accuracy wanted", ">minimum confidence", ">answered, validation", ">answered, test", ">right, test"]
    return html.titled("When to answer", html.table(headings, rows))


def _percent(share: Any) -> str:
    return "–" if share is None else f"{100 * share:.4g} %"
