"""A trial of the search: a model that was made, what it costs and how it stands against the budget."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

NOTHING = 1e9
"""The NLL of a trial of which nothing was left, a number as JSON has no infinity."""


@dataclass(frozen=True)
class Trial:
    """number: from 1 on. pressure: the level of the path that it left from, with a fraction on the way to the next (-7: it left
    from the dense weights); beta: its weight of the KL. ratio: the size that was asked for, in powers of two below the dense
    model's (of what is alive some may have gone for it); natural: how many times smaller it would have been by itself.
    threshold: that its masks come from (None: each layer's own). costs: by measure. metrics: on validation data. error,
    drop, upper, met: as of `Verdict`; allowed: the drop that the budget has room for (1e9 without one). seconds: what it
    took. estimate, at_most: as of `Verdict`. mixture: what was chosen of several ways to the size, as of `record`; None
    where there was nothing to choose. reconstruction: what `reconstruct` did before the pruning, as of its `to_dict`; None
    where it did nothing. continues: the number of the trial whose small model only recovered on in this one.
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

    @property
    def root(self) -> int:
        """The number of the trial that has its posterior and its masks."""
        return self.number if self.continues is None else self.continues

    @property
    def empty(self) -> bool:
        """Whether nothing but one answer to all inputs was left: there is no model of it."""
        return self.metrics.get("nll", 0.0) >= NOTHING

    @property
    def lost(self) -> float:
        """The drop that trials are compared by: by the NLL where the examples are too few for errors to tell. Infinite where
        nothing is left: its own numbers are made up, and a real model may lose more."""
        if self.empty:
            return math.inf
        return self.drop if self.estimate is None else self.estimate

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)

    @staticmethod
    def of(stored: Mapping[str, Any]) -> Trial:
        """From what `to_dict` gave."""
        return Trial(**stored)
