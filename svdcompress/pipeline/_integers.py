"""A run's integer file: which layers the validation error allows in integers, and how it compares with the float file."""

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
from svdcompress.pipeline._allowed import Allowed, told
from svdcompress.pipeline._baked import Baked
from svdcompress.pipeline._onnx_model import OnnxModel, arrays_of, open_session
from svdcompress.pipeline._some import some
from svdcompress.sources import Data, Examples, example_inputs, fitting
from svdcompress.train import evaluate

CALIBRATION, BATCH = 320, 32
"""Training examples, from all over the data (files are often sorted by class), for the ranges of activations, and how many at
once."""


TOGETHER = 250
"""Examples in a pass of two files that are compared, or fewer if they are large."""


@dataclass
class Integers(Allowed):
    """Writes the integer form of `path`, a run's deterministic file."""

    compact: bool = True
    report: dict[str, Any] = field(default_factory=dict)

    def write(self, dst: Path) -> Exported:
        """Write the file, with as many layers in integers as the validation error allows, and what was done into `report`.

        Raises ExportError if no layer can be in integers.
        """
        with TemporaryDirectory(prefix="svdcompress") as folder:
            self._trial = Path(folder) / "trial.onnx"
            method, leave = self._choose()
        if len(leave) == len(self.form.layers):
            found = f"with all of its layers in integers the error is {self._whole:.4g}, and the limit is {self.limit:.4g}"
            raise ExportError(f"no layer can be stored as integers within the tolerance ({found})")
        file = self.form.write(dst, leave=leave, method=method, compact=self.compact)
        self.check_deviations(dst, "integers")
        self.report |= {
            "file": dst.name,
            "bytes": file.bytes,
            "layers": {name: "float32" if name in leave else "int8" for name in self.form.layers},
            "calibration": {"method": method, "examples": sum(len(next(iter(feed.values()))) for feed in self._feeds)},
            "validation": {"float": self.float_error, "int8": self.error(dst), "limit": self.limit},
        }
        return file

    @cached_property
    def form(self) -> Int8:
        """The quantizer of the file."""
        return Int8(self.path, self._feeds)

    @cached_property
    def _feeds(self) -> list[dict[str, np.ndarray]]:
        session = open_session(self.path)
        arrays = arrays_of(session, self.units.inputs(example_inputs(some(self.data.train, CALIBRATION), CALIBRATION)))
        count = len(next(iter(arrays.values())))
        return [{name: array[at : at + BATCH] for name, array in arrays.items()} for at in range(0, count, BATCH)]

    def _choose(self) -> tuple[str, list[str]]:
        """The calibration method, and layers that stay in floating point: the costliest first, until the error is allowed."""
        errors = {}
        for method in ("minmax", "percentile"):
            errors[method] = self._tried(method, ())
            if errors[method] <= self.limit:
                break
        method = min(errors, key=lambda name: errors[name])
        self._whole, leave = errors[method], []
        if self._whole <= self.limit:
            return method, leave
        layers = list(self.form.layers)
        alone = {name: self._tried(method, [other for other in layers if other != name], self.few, "nll") for name in layers}
        for name in sorted(layers, key=lambda name: -alone[name]):
            leave.append(name)
            if len(leave) == len(layers) or self._tried(method, leave) <= self.limit:
                break
        return method, leave

    def _tried(self, method: str, leave: Any, examples: Examples | None = None, figure: str | None = None) -> float:
        self.form.write(self._trial, leave=leave, method=method, compact=False)
        return self.error(self._trial, examples, figure)


def beside(path: Path, other: Path, data: Data, units: Baked) -> dict[str, Any]:
    """Compare a file with another one on the test data: its `metrics`, and `agreement`, the share of answers that both give
    (for regression `difference`: the RMSE between the two, relative to the standard deviation of the other's outputs)."""
    models = [OnnxModel(each, units) for each in (path, other)]
    found: dict[str, Any] = {"metrics": evaluate(models[0], data.test, **told(data))}
    likelihood = likelihood_for(data.task, data.dim)
    same, total, squares, outputs = 0, 0, 0.0, []
    for inputs, _ in data.test.batches(fitting(models[0], data.test, TOGETHER)):
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
    """A text on the batch sizes at which a file is not clearly (3%) faster than another; "" if it is at all of them."""
    ratios = {batch.removeprefix("batch_"): time / others[batch] for batch, time in times.items() if batch in others}
    parts = [f"at batch {batch} it takes {ratio:.2f} times as long" for batch, ratio in ratios.items() if ratio > 0.97]
    return " and ".join(parts)
