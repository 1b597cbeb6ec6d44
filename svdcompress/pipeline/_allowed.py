"""What a file in fewer bits may cost: the validation error that is allowed, and that of a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from svdcompress.likelihoods import likelihood_for
from svdcompress.pipeline._baked import Baked
from svdcompress.pipeline._onnx_model import OnnxModel
from svdcompress.pipeline._some import some
from svdcompress.recipe import Recipe
from svdcompress.search import Budget
from svdcompress.sources import Data, Examples
from svdcompress.train import evaluate

TOLERANCE = 0.1
"""Points of validation error (regression: per cent of the RMSE) that fewer bits may cost where the recipe has no
budget."""

RANKED = 500
"""Validation examples that say which layer costs the most, as the only one in fewer bits."""


@dataclass
class Allowed:
    """The budget of a form of `path`, a run's deterministic file.

    max_drop, max_error: the search's budget, below the dense model, whose validation error is `dense` (None: not known, and
    max_error alone can be kept); both None: TOLERANCE below the float file.
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
        """The validation error that is allowed; a drop of less than one answer is nothing that could be seen."""
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
        answers = sum(int(likelihood.counts(targets).sum()) for _, targets in self.data.validation.batches(1000))
        return self.float_error + max(TOLERANCE, 100 / answers)

    @cached_property
    def few(self) -> Examples:
        """Validation examples to rank layers by."""
        return some(self.data.validation, RANKED)

    def error(self, path: Path, examples: Examples | None = None, figure: str | None = None) -> float:
        """A file's validation error (RMSE, or the figure named)."""
        found = evaluate(OnnxModel(path, self.units), examples or self.data.validation, **told(self.data))
        return found[figure] if figure else found.get("error", found.get("rmse", float("nan")))


def budget(recipe: Recipe, before: Mapping[str, Any] | None) -> dict[str, Any]:
    """The fields of `Allowed` that a run's recipe gives. before: the dense model's metrics on the validation data, if known."""
    known = before or {}
    asked = {name: getattr(recipe.search, name) for name in ("max_drop", "max_error")}
    return {**asked, "dense": known.get("error", known.get("rmse"))}


def told(data: Data) -> dict[str, Any]:
    """What `evaluate` is told of a run's data."""
    return {"task": data.task, "scale": data.target_scale, "dim": data.dim}
