"""What a file in fewer bits may cost: the allowed validation error, and how to measure that of a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from svdcompress.errors import ExportError
from svdcompress.likelihoods import likelihood_for
from svdcompress.pipeline._baked import Baked
from svdcompress.pipeline._onnx_model import OnnxModel
from svdcompress.pipeline._some import some
from svdcompress.recipe import Recipe
from svdcompress.search import Budget
from svdcompress.sources import Data, Examples, fitting
from svdcompress.train import evaluate

TOLERANCE = 0.1
"""Points of validation error (regression: percent of the RMSE) that fewer bits may cost if the recipe has no budget."""

NATS = 0.1
"""What fewer bits may add to the NLL of a model that gives deviations: about that of deviations 40% too large, or a quarter too
small."""

RANKED = 500
"""Validation examples for ranking the layers by what each of them costs if it alone has fewer bits."""


@dataclass
class Allowed:
    """The budget for a smaller form of `path`, a run's deterministic file.

    max_drop, max_error: the search's budget, relative to the dense model, whose validation error is `dense` (None: not known,
    and only max_error applies). If neither applies, the limit is TOLERANCE above the error of the float file.
    """

    path: Path
    data: Data
    units: Baked
    max_drop: float | None = None
    max_error: float | None = None
    dense: float | None = None

    @cached_property
    def float_error(self) -> float:
        """The float file's validation error."""
        return self.error(self.path)

    @cached_property
    def limit(self) -> float:
        """The allowed validation error, never below the float file's. Without a budget, one answer may always be lost: a
        smaller drop cannot be measured."""
        likelihood = likelihood_for(self.data.task, self.data.dim)
        shares = likelihood.probabilities
        asked = Budget(self.max_drop, self.max_error)
        if asked.given and self.dense is not None:
            drop = asked.allowed(self.dense, shares)
            return max(self.dense + drop if shares else self.dense * (1 + drop / 100), self.float_error)
        if self.max_error is not None:
            return max(self.max_error, self.float_error)
        if not shares:
            return self.float_error * (1 + TOLERANCE / 100)
        size = fitting(None, self.data.validation, 1000)
        answers = sum(int(likelihood.counts(targets).sum()) for _, targets in self.data.validation.batches(size))
        return self.float_error + max(TOLERANCE, 100 / answers)

    @cached_property
    def few(self) -> Examples:
        """The validation examples on which layers are ranked."""
        return some(self.data.validation, RANKED)

    def check_deviations(self, path: Path, what: str) -> None:
        """Remove a file and raise ExportError if its deviations, of which the error says nothing, are far from those of the
        float file."""
        if self.data.task != "gaussian":
            return
        nll, before = (self.error(each, None, "nll") for each in (path, self.path))
        if not nll <= before + NATS:
            path.unlink()
            raise ExportError(f"with {what} the NLL on validation data is {nll:.4g} ({before:.4g} without): deviations are off")

    def error(self, path: Path, examples: Examples | None = None, figure: str | None = None) -> float:
        """A file's validation error (or RMSE), or the metric that `figure` names."""
        found = evaluate(OnnxModel(path, self.units), examples or self.data.validation, **told(self.data))
        return found[figure] if figure else found.get("error", found.get("rmse", float("nan")))


def budget(recipe: Recipe, before: Mapping[str, Any] | None) -> dict[str, Any]:
    """The fields of `Allowed` that a run's recipe gives. before: the dense model's metrics on the validation data, if known."""
    known = before or {}
    asked = {name: getattr(recipe.search, name) for name in ("max_drop", "max_error")}
    return {**asked, "dense": known.get("error", known.get("rmse"))}


def told(data: Data) -> dict[str, Any]:
    """The arguments of `evaluate` that describe a run's data."""
    return {"task": data.task, "scale": data.target_scale, "dim": data.dim}
