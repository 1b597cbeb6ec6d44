"""A run's integer file: which layers can be integers, by validation error, and what it is beside the float file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from svdcompress.batch import call, main_output
from svdcompress.errors import ExportError
from svdcompress.export import Exported, Int8
from svdcompress.likelihoods import likelihood_for
from svdcompress.pipeline._baked import Baked
from svdcompress.pipeline._onnx_model import OnnxModel, arrays_of, open_session
from svdcompress.pipeline._some import some
from svdcompress.sources import Data, Examples, example_inputs
from svdcompress.train import evaluate

TOLERANCE = 0.1
"""Points of validation error (regression: per cent of the RMSE) that integers may cost where the recipe has no
search.max_drop."""

CALIBRATION, BATCH = 320, 32
"""Training examples that ranges of activations are taken from, from all over (files are often sorted by class), and how many
at once."""

RANKED = 500
"""Validation examples that say which layer costs the most, as the only one in integers."""


@dataclass
class Integers:
    """Makes the integer form of `path`, a run's deterministic file.

    max_drop: the search's budget in points below the dense model, whose validation error is `dense`; None: TOLERANCE below the
    float file.
    """

    path: Path
    data: Data
    units: Baked
    max_drop: float | None = None
    dense: float | None = None
    compact: bool = True
    report: dict[str, Any] = field(default_factory=dict)

    def write(self, dst: Path) -> Exported:
        """The file, whose layers are integers as far as the validation error allows; `report` then says what was done.

        Raises ExportError where no layer can be.
        """
        with TemporaryDirectory(prefix="svdcompress") as folder:
            self._trial = Path(folder) / "trial.onnx"
            method, leave = self._choose()
        if len(leave) == len(self.form.layers):
            found = f"with all of its layers the error is {self._whole:.4g}, allowed are {self.limit:.4g}"
            raise ExportError(f"no layer can be in integers within the tolerance ({found})")
        file = self.form.write(dst, leave=leave, method=method, compact=self.compact)
        self.report |= {
            "file": dst.name,
            "bytes": file.bytes,
            "layers": {name: "float32" if name in leave else "int8" for name in self.form.layers},
            "calibration": {"method": method, "examples": sum(len(next(iter(feed.values()))) for feed in self._feeds)},
            "validation": {"float": self.float_error, "int8": self._error(dst), "limit": self.limit},
        }
        return file

    @cached_property
    def form(self) -> Int8:
        """What quantises."""
        return Int8(self.path, self._feeds)

    @cached_property
    def _feeds(self) -> list[dict[str, np.ndarray]]:
        session = open_session(self.path)
        arrays = arrays_of(session, self.units.inputs(example_inputs(some(self.data.train, CALIBRATION), CALIBRATION)))
        count = len(next(iter(arrays.values())))
        return [{name: array[at : at + BATCH] for name, array in arrays.items()} for at in range(0, count, BATCH)]

    @cached_property
    def float_error(self) -> float:
        """The float file's validation error."""
        return self._error(self.path)

    @cached_property
    def limit(self) -> float:
        """The validation error that is allowed; a drop of less than one answer is nothing that could be seen."""
        shares = likelihood_for(self.data.task, self.data.dim).probabilities
        if self.max_drop is not None and self.dense is not None:
            most = self.dense + self.max_drop if shares else self.dense * (1 + self.max_drop / 100)
            return max(most, self.float_error)
        if not shares:
            return self.float_error * (1 + TOLERANCE / 100)
        return self.float_error + max(TOLERANCE, 100 / len(self.data.validation))

    def _choose(self) -> tuple[str, list[str]]:
        """The calibrator, and the layers that stay in floating point: the costliest first, until the error is allowed."""
        errors = {}
        for method in ("minmax", "percentile"):
            errors[method] = self._tried(method, ())
            if errors[method] <= self.limit:
                break
        method = min(errors, key=lambda name: errors[name])
        self._whole, leave = errors[method], []
        if self._whole <= self.limit:
            return method, leave
        few = self.data.validation.subset(torch.arange(min(RANKED, len(self.data.validation))))
        layers = list(self.form.layers)
        alone = {name: self._tried(method, [other for other in layers if other != name], few, "nll") for name in layers}
        for name in sorted(layers, key=lambda name: -alone[name]):
            leave.append(name)
            if len(leave) == len(layers) or self._tried(method, leave) <= self.limit:
                break
        return method, leave

    def _tried(self, method: str, leave: Any, examples: Examples | None = None, figure: str | None = None) -> float:
        self.form.write(self._trial, leave=leave, method=method, compact=False)
        return self._error(self._trial, examples, figure)

    def _error(self, path: Path, examples: Examples | None = None, figure: str | None = None) -> float:
        found = evaluate(OnnxModel(path, self.units), examples or self.data.validation, **_what(self.data))
        return found[figure] if figure else found.get("error", found.get("rmse", float("nan")))


def _what(data: Data) -> dict[str, Any]:
    return {"task": data.task, "scale": data.target_scale, "dim": data.dim}


def beside(path: Path, other: Path, data: Data, units: Baked) -> dict[str, Any]:
    """Figures of a file on the test data: `metrics`, and `agreement`, the share of answers that another file gives too (of
    regressions `difference`: the RMSE between the two over the spread of the other's outputs)."""
    models = [OnnxModel(each, units) for each in (path, other)]
    found: dict[str, Any] = {"metrics": evaluate(models[0], data.test, **_what(data))}
    likelihood = likelihood_for(data.task, data.dim)
    same, total, squares, outputs = 0, 0, 0.0, []
    for inputs, _ in data.test.batches(250):
        ours, theirs = (main_output(call(model, inputs)) for model in models)
        if likelihood.probabilities:
            answers = [_answers(output, data.dim if likelihood.classes else None) for output in (ours, theirs)]
            same, total = same + int((answers[0] == answers[1]).sum()), total + answers[0].numel()
        else:
            squares, total = squares + float(((ours - theirs) ** 2).sum()), total + ours.numel()
            outputs.append(theirs.flatten())
    if likelihood.probabilities:
        return {**found, "agreement": same / max(total, 1)}
    spread = float(torch.cat(outputs).std()) or 1.0
    return {**found, "difference": (squares / max(total, 1)) ** 0.5 / spread}


def _answers(output: Tensor, dim: int | None) -> Tensor:
    return output > 0 if dim is None else output.argmax(dim)


def slower(times: Mapping[str, float], others: Mapping[str, float]) -> str:
    """Where a file is not faster than another, in words; "" where it is at all batch sizes."""
    ratios = {batch.removeprefix("batch_"): time / others[batch] for batch, time in times.items() if batch in others}
    parts = [f"at batch {batch} it takes {ratio:.2f} times as long" for batch, ratio in ratios.items() if ratio > 0.97]
    return " and ".join(parts)
