"""The page's section on calibration of the model and on what its validation data promise."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from svdcompress.report._sections import _paragraph, _right, _table, _titled

WHO = {"mean": "mean (model.onnx)", "samples": "samples (model_mc.onnx)"}


def certainty(results: Mapping[str, Any], folder: Path | None) -> str:
    """Temperatures, the posterior, coverage and answers: wanted and, on the test data, measured."""
    parts = [_fitted(results.get("calibrate") or {}), _posteriors(results.get("calibrate") or {})]
    promises = results.get("promises") or {}
    parts += [_coverage(promises.get("coverage") or {}), _answers(promises.get("answer_above") or {})]
    return "".join(part for part in parts if part)


def _fitted(found: Mapping[str, Any]) -> str:
    rows = []
    for who, name in WHO.items():
        one = found.get(who)
        if not isinstance(one, Mapping):
            continue
        value = f"{one['value']:.4g}" if one.get("taken") else "unchanged"
        rows.append([escape(name), _right(value), _right(f"{one['before']:.4f}"), _right(f"{one['after']:.4f}")])
    if not rows:
        return ""
    what = "noise precision" if "tau" in (found.get("likelihood") or {}) else "temperature"
    notes = _paragraph(" ".join(f"{note}." for note in found.get("notes") or ()))
    table = _table(["", f">{what}", ">validation NLL before", ">after, on held-out examples"], rows)
    return _titled(f"Fitted on validation data; posterior: {escape(str(found.get('posterior', '')))}", table + notes)


def _posteriors(found: Mapping[str, Any]) -> str:
    tried = found.get("tried") or ()
    if len(tried) < 2:
        return ""
    body = [
        [escape(str(one["name"])), _right("–" if one.get("nll") is None else f"{one['nll']:.4f}"), escape(str(one["note"]))]
        for one in tried
    ]
    return _titled("Posteriors", _table(["", ">held-out validation NLL", ""], body))


def _coverage(found: Mapping[str, Any]) -> str:
    rows = []
    for who, one in found.items():
        test = one.get("test") or {}
        size = test.get("size")
        rows.append(
            [
                escape(WHO.get(who, who)),
                _right(_percent(one["coverage"])),
                _right(_percent(test.get("coverage"))),
                _right("–" if size is None else f"{size:.3g} {'classes' if one.get('kind') == 'sets' else 'deviations'}"),
                _right(f"{one['examples']:,}"),
            ]
        )
    if not rows:
        return ""
    headings = ["", ">promised", ">on the test data", ">mean size", ">validation targets"]
    return _titled("Prediction sets and intervals (split conformal)", _table(headings, rows))


def _answers(found: Mapping[str, Any]) -> str:
    rows = []
    for who, one in found.items():
        test = one.get("test") or {}
        rows.append(
            [
                escape(WHO.get(who, who)),
                _right(_percent(one["accuracy"])),
                _right(f"{one['threshold']:.4g}"),
                _right(_percent(one["answered"])),
                _right(_percent(test.get("answered"))),
                _right(_percent(test.get("accuracy"))),
            ]
        )
    if not rows:
        return ""
    headings = ["", ">accuracy wanted", ">minimum confidence", ">answered, validation", ">answered, test", ">right, test"]
    return _titled("When to answer", _table(headings, rows))


def _percent(share: Any) -> str:
    return "–" if share is None else f"{100 * share:.4g} %"
