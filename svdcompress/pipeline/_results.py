"""The typed results of a run's stages, from which `report.json` is written."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from svdcompress.cost import Cost
from svdcompress.train import Reach

Figures = dict[str, float]
"""Numbers by name, such as the metrics of a model."""


@dataclass
class Side:
    """Results of the dense or the sparse model. validation, metrics: on the validation and the test data. bytes: size of its
    ONNX file."""

    validation: Figures | None = None
    metrics: Figures | None = None
    counts: Cost | None = None
    bytes: int | None = None
    bytes_compact: int | None = None
    latency_ms: Figures | None = None

    def to_dict(self) -> dict[str, Any]:
        """The entry of the report, without values that are not known."""
        found = {one.name: getattr(self, one.name) for one in fields(self)}
        counts = found.pop("counts")
        whole = {
            **{name: found.pop(name) for name in ("validation", "metrics")},
            **(counts.to_dict() if counts else {}),
            **found,
        }
        return {name: value for name, value in whole.items() if value is not None}


@dataclass
class RunResults:
    """One attribute for each key of the report that a stage fills in, in the report's order; None until then.

    seconds: of each stage, over all sittings. warnings, notes: lines for the user. failed: figures that could not be made,
    with the reasons. The others are the keys of `report.Results`.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    torch_threads: int | None = None
    reach: Reach | None = None
    search: dict[str, Any] | None = None
    log_alpha: dict[str, Any] | None = None
    threshold: float | dict[str, Any] | None = None
    threshold_curve: list[Figures] | None = None
    pruning: dict[str, Any] | None = None
    calibrate: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)
    promises: dict[str, dict[str, dict[str, Any]]] | None = None
    dense: Side = field(default_factory=Side)
    sparse: Side = field(default_factory=Side)
    changes: dict[str, Figures] | None = None
    recall: dict[str, dict[str, Any]] | None = None
    layers: list[dict[str, Any]] | None = None
    filters: dict[str, Any] | None = None
    parity: dict[str, float | None] | None = None
    int8: dict[str, Any] | None = None
    int4: dict[str, Any] | None = None
    bits: list[dict[str, Any]] | None = None
    float16: dict[str, Any] | None = None
    monte_carlo_file: dict[str, Any] | None = None
    uncertainty: dict[str, Figures] | None = None
    calibration: dict[str, dict[str, Any]] | None = None
    uncertainty_of: dict[str, Any] | None = None
    doubts: list[dict[str, Any]] | None = None
    compression: dict[str, Any] | None = None
    threads: int | None = None
    clock: str | None = None
    recover_lr: float | None = None
    warnings: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    verified: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """The keys of the report that are known so far. Lists and dicts are not copied."""
        found = {one.name: getattr(self, one.name) for one in fields(self)}
        for name in ("reach", "dense", "sparse"):
            found[name] = found[name].to_dict() if found[name] is not None else None
        empty = {name for name in ("notes", "failed") if not found[name]}
        return {name: value for name, value in found.items() if value is not None and name not in empty}
