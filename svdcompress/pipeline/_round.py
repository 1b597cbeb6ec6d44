"""Rounding of channel counts to multiples, kept only if it measures faster."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn

from svdcompress import cost
from svdcompress.errors import ExportError
from svdcompress.export import export_onnx
from svdcompress.pipeline._select import whole

Feed = Callable[[Path], Callable[[int], Any]]
"""Maps an ONNX file to a function that makes input batches of any size for it, as `cost.latencies` expects."""


def rounded(
    make: Callable[[int], nn.Module], round_to: int, inputs: Any, feed: Feed | None, opset: int
) -> tuple[nn.Module, dict[str, Any]]:
    """A pruned model, with channel counts rounded to multiples or not, and the report of `prune` as a dict, with

    - `rounded`: whether the counts are multiples of `round_to`; absent if that is 1;
    - `rounding`: what was compared (absent if nothing was): the remaining channels (`kept`), `parameters`, and the
      `latency_ms` of the ONNX file in each form, {"rounded": ..., "unrounded": ...}.

    The rounded form has more channels, so it is used only if its file is faster, over batches of 1 and 128 together. Both are
    timed before recovery, which does not change shapes.

    make: returns the pruned model for a value of `round_to`. inputs: example inputs. feed: None to skip measuring and round
    as asked.
    """
    model: Any = make(round_to)
    report = model.pruning.to_dict()
    if round_to == 1:
        return model, report
    if feed is None or report["parameters_unrounded"] == report["parameters_after"]:
        return model, {**report, "rounded": True}
    other: Any = make(1)
    reports = {"rounded": report, "unrounded": other.pruning.to_dict()}
    try:
        times = _times({"rounded": model, "unrounded": other}, reports, inputs, feed, opset)
    except ExportError as error:
        note = f"rounded without measuring, as it could not be exported ({error})"
        return model, {**report, "rounded": True, "notes": [*report["notes"], note]}
    compared = {
        form: {
            "kept": sum(group["kept"] for group in known["groups"]),
            "parameters": known["parameters_after"],
            "latency_ms": times[form],
        }
        for form, known in reports.items()
    }
    pays = cost.quicker(times["rounded"], times["unrounded"])
    chosen = reports["rounded" if pays else "unrounded"]
    found = {**chosen, "round_to": round_to, "rounded": pays, "rounding": compared}
    return (model if pays else other), found


def _times(
    models: dict[str, nn.Module], reports: dict[str, dict[str, Any]], inputs: Any, feed: Feed, opset: int
) -> dict[str, dict[str, float]]:
    with TemporaryDirectory() as folder:
        files = {name: Path(folder) / f"{name}.onnx" for name in models}
        for name, model in models.items():
            export_onnx(whole(model, reports[name]).eval(), files[name], inputs, opset=opset)
        return cost.latencies(files, feed(files["rounded"]))
