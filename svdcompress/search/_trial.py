"""A trial of the search: a model that was made, its costs, and how it compares with the budget."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

NOTHING = 1e9
"""The NLL of a trial with nothing left; a finite number, because JSON has no infinity."""


@dataclass(frozen=True)
class Trial:
    """One trial.

    number: counted from 1. pressure: the level of the path that it started from, with a fraction for the way to the next (-7:
    it started from the dense weights); beta: the weight of its KL. ratio: the size that was asked for, in powers of two below
    the dense model's (living weights or units may have been removed for it); natural: how many times smaller than the dense
    model it would have been without that. threshold: the one that its masks come from (None: each layer's own). costs: by
    measure. metrics: on validation data. error, drop, upper, met, estimate, at_most: as in `Verdict`. allowed: the drop that
    the budget allows (1e9 without one). seconds: how long it took. mixture: the choice among several ways to the size, as
    `record` gives it; None where there was nothing to choose. reconstruction: the `to_dict` of what `reconstruct` did before
    the pruning; None where it did nothing. continues: the number of the trial whose small model this one recovered further.
    recover_lr: the learning rate of a second attempt to recover, or a lower one if that was undone; None if the first was kept.
    """

    number: int
    pressure: float
    beta: float
    ratio: float
    natural: float
    threshold: float | None
    costs: dict[str, float]
    metrics: dict[str, float]
    error: float
    drop: float
    upper: float | None
    allowed: float
    met: bool
    seconds: float
    estimate: float | None = None
    at_most: float | None = None
    mixture: dict[str, Any] | None = None
    reconstruction: dict[str, Any] | None = None
    continues: int | None = None
    recover_lr: float | None = None

    @property
    def root(self) -> int:
        """The number of the trial that its posterior and masks come from."""
        return self.number if self.continues is None else self.continues

    @property
    def empty(self) -> bool:
        """Whether the model was left with one and the same answer to all inputs (then no model is kept of the trial), or with
        answers that are not finite."""
        return self.metrics.get("nll", 0.0) >= NOTHING

    @property
    def finite(self) -> bool:
        """Whether its error, NLL and drop are numbers, which JSON can hold."""
        known = (self.error, self.drop, self.metrics.get("nll", 0.0), self.drop if self.estimate is None else self.estimate)
        return all(map(math.isfinite, known))

    @property
    def lost(self) -> float:
        """The drop by which trials are compared: the NLL's estimate where there are too few examples to go by their errors.
        Infinite where nothing is left, because the numbers of such a trial are made up and a real model may lose more; and
        where it is not a number."""
        lost = self.drop if self.estimate is None else self.estimate
        return math.inf if self.empty or math.isnan(lost) else lost

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)

    @staticmethod
    def of(stored: Mapping[str, Any]) -> Trial:
        """A trial from the result of `to_dict`."""
        return Trial(**stored)
