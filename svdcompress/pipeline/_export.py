"""A run's deterministic ONNX file, and the metadata of its files: for the run itself and for exports after it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from svdcompress import cost
from svdcompress.export import Axes, Exported, export_onnx
from svdcompress.pipeline._baked import Baked
from svdcompress.pipeline._select import Select, faster

OF_FILES = ("bytes", "latency")
"""Ratios of one file that no file's metadata has: they would be those of `model.onnx`, whatever the file."""


def file_metadata(
    results: Mapping[str, Any], preprocessing: Mapping[str, Any], classes: list[str] | None, task: str, draws: bool = False
) -> dict[str, Any]:
    """Metadata of a run's ONNX files. results: the content of `report.json`, of which the figures of the models are used.

    draws: for the Monte-Carlo file, which gets no `metrics`: those are the mean's.
    """
    found: dict[str, Any] = {"preprocessing": dict(preprocessing), "classes": classes, "task": task}
    if "dense" in results and "sparse" in results:
        known = cost.compression(results["dense"], results["sparse"])
        known = {key: value for key, value in known.items() if key not in OF_FILES}
        found |= {"compression": _rounded(known)} | ({} if draws else {"metrics": _rounded(results["sparse"].get("metrics"))})
    return found


def _rounded(value: Any) -> Any:
    """Round numbers to four digits: metadata is for people to read, and `report.json` has all digits."""
    if isinstance(value, Mapping):
        return {key: _rounded(each) for key, each in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def export_model(
    model: nn.Module,
    path: Path,
    inputs: Any,
    feed: Callable[[Path], Callable[[int], Any]],
    *,
    opset: int,
    metadata: Mapping[str, Any],
    timed: bool = True,
    units: Baked | None = None,
    sets: Callable[[nn.Module], Any] | None = None,
    dynamic_axes: Axes | None = None,
) -> tuple[Exported, bool | None]:
    """Write a pruned model's deterministic file; returns it and, for a model that reads only a part of its inputs, whether the
    file selects these (None: the model reads all).

    feed: maps an ONNX file to a function that makes input batches of any size for it, as `cost.latencies` expects. timed: if
    inputs were removed, keep the faster of two forms, one that selects inputs and one that reads all with weights of 0;
    without it, the file selects. units: the preprocessing that the file does.
    sets: maps the model as the file holds it to a function that gives further outputs. dynamic_axes: open dimensions (see
    `export_onnx` for both).
    """
    units = units or Baked()
    further = None if sets is None else sets(units.model(model))
    more: dict[str, Any] = {"opset": opset, "further": further, "dynamic_axes": dynamic_axes}
    file = export_onnx(units.model(model), path, units.inputs(inputs), metadata=metadata, **more)
    if not isinstance(model, Select):
        return file, None
    if not timed:
        return file, True
    known = {**file.metadata, **metadata}

    def write(wide: nn.Module, place: Path) -> Exported:
        return export_onnx(units.model(wide), place, units.inputs(inputs), metadata=known, **more)

    return faster(model, inputs, file, feed(path), write)
