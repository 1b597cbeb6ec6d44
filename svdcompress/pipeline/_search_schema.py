"""What `state/search/trials.json` holds; checked once, when a search is resumed, before anything is trained."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from svdcompress.report import MeasuredWith, Mixture
from svdcompress.search import NOTHING

Number = float | None
"""A number that may be unknown, or not finite, for which JSON has nothing but null."""

Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=0, lt=2**53)]
Numbered = Annotated[int, Field(ge=1, lt=2**31)]


class _Part(BaseModel):
    """Values must have exactly these types, and numbers must be finite; other keys are allowed."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class Figures(_Part):
    """`metrics` of a trial; r2 may be null."""

    __pydantic_extra__: dict[str, Number]

    nll: float


class Reconstructed(_Part):
    """`reconstruction` of a trial."""

    layers: Count
    before: Number
    after: Number
    left: dict[str, str]


class Tried(_Part):
    """A trial: the fields of `search.Trial`; those with a default are missing in states of earlier versions."""

    model_config = ConfigDict(extra="forbid")

    number: Numbered
    pressure: float
    beta: NotNegative
    ratio: float
    natural: Positive
    threshold: Number
    costs: dict[str, NotNegative]
    metrics: Figures
    error: NotNegative
    drop: float
    upper: Number
    allowed: float
    met: bool
    seconds: NotNegative
    estimate: Number = None
    at_most: Number = None
    mixture: Mixture | None = None
    reconstruction: Reconstructed | None = None
    continues: Numbered | None = None
    recover_lr: Positive | None = None


class Epoch(_Part):
    """A row of a trial's history."""

    __pydantic_extra__: dict[str, Number]

    stage: str
    epoch: Count


class Group(_Part):
    """One of `groups` of what pruning did."""

    name: str
    removed: Count
    kept: Count
    reason: str
    layers: list[str] = []
    units: Count = 0
    unit_parameters: Count = 0
    unit_macs: Count = 0
    kept_unrounded: Count = 0


class Shape(_Part):
    """One of `layers` of what pruning did."""

    name: str
    shape_before: list[Count]
    shape_after: list[Count]
    sparsity: float = 0.0


class Pruned(_Part):
    """What pruning did for a trial: the fields of `prune.PruneReport`."""

    groups: list[Group]
    layers: list[Shape]
    inputs_kept: list[Count] | None
    inputs_dim: Count | None
    max_error: Number
    seconds: NotNegative
    parameters_before: Count
    parameters_after: Count
    round_to: Count = 1
    parameters_unrounded: Count | None = None
    notes: list[str] = []
    surgery: dict[str, Any] = {}
    outputs_kept: dict[str, list[Count]] = {}


class DenseCosts(_Part):
    """`dense`."""

    costs: dict[str, Positive]
    measured: MeasuredWith


class Stored(_Part):
    """All of the file. What has a default is missing in states of earlier versions."""

    trials: list[Tried]
    epochs: dict[str, list[Epoch]]
    pruning: dict[str, Pruned]
    said: dict[str, list[str]] = {}
    seconds: NotNegative
    dense: DenseCosts | None = None
    least: NotNegative | None = None
    doubted: list[str] = []

    def contradiction(self, measure: str | None) -> str | None:
        """What in the file does not fit together; None if all of it does. measure: that of the search (None: not known, and
        neither is what a trial needs besides its own fields)."""
        numbers = [str(number) for number in range(1, len(self.trials) + 1)]
        for place, trial in enumerate(self.trials):
            at, again = f"trials.{place}", trial.continues
            if trial.number != place + 1:
                return f"{at}.number: it should be {place + 1} (got {trial.number})"
            if again is not None and (again > place or self.trials[again - 1].continues is not None):
                return f"{at}.continues: it should be an earlier trial that continues none (got {again})"
            if measure is None:
                continue
            if not trial.costs.get(measure):
                return f"{at}.costs.{measure}: it should be a number above 0 (got {trial.costs.get(measure)})"
            if trial.metrics.nll < NOTHING and str(trial.number) not in self.pruning:
                return f"pruning: it should have trial {trial.number} (got {', '.join(self.pruning) or 'none'})"
            if str(trial.number) not in self.epochs:
                return f"epochs: it should have trial {trial.number} (got {', '.join(self.epochs) or 'none'})"
        for name in ("epochs", "pruning"):
            if more := [number for number in getattr(self, name) if number not in numbers]:
                return f"{name}.{more[0]}: there is no such trial (there are {len(numbers)})"
        return None
