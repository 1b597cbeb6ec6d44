"""The order of a search: which trial comes next, and which of them is the best, from the trials so far and nothing else."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from svdcompress.search._plan import LOWEST, better_pressure, next_ratio, pressure_of_size, smallest, start_ratio
from svdcompress.search._trial import Trial

FURTHER = 0.85
"""The next size to try at a pressure that kept the budget."""

SHIFT = 0.8
"""By so many levels a posterior becomes sparser while it cools, until a trial tells."""

CLOSE = 0.02
"""A size within so much of the goal has reached it."""

Ask = tuple[float, float]
"""A trial that is wanted: its pressure, and its size in the measure of the search."""


@dataclass(frozen=True)
class Strategy:
    """What a search asks for. `next` depends on the trials alone, so that a stopped search goes on with the trial that comes
    next in an undisturbed one.

    measure: of `Trial.costs`, what is made small; dense: how much of it the dense model has. goal: the size wanted, or None.
    budget: whether the error is bounded. trials: at most so many. ratios: how many times smaller than the dense model each
    level of the path is by itself, [] where there is no path; errors: its validation error, before any recovery. error: the
    dense model's; allowed: how much more may be lost, in the same units. press: at most so high is the first pressure for a
    size; infinite where pressure alone should lead there. least: nothing smaller is to be tried. unpressed: the pressure to
    try first, where the path removes hardly a unit; a goal is then tried from the path, too, and so is the smallest size
    within a budget.
    """

    measure: str
    dense: float
    goal: float | None
    budget: bool
    trials: int
    ratios: Sequence[float]
    errors: Sequence[float]
    error: float
    allowed: float
    press: float = math.inf
    least: float = 0.0
    unpressed: float | None = None

    def next(self, trials: Sequence[Trial]) -> Ask | None:
        """The trial to make after these, or None where no more is to be learnt or there are as many as may be.

        The whole search is gone through again, each trial taken as the answer to what was asked for in its place.
        """
        seen: list[Trial] = []
        for ask in self._asks(seen):
            if len(seen) == len(trials):
                return ask
            seen.append(trials[len(seen)])
        return None

    def unbounded(self) -> Strategy:
        """The same with as many trials as it takes."""
        return replace(self, trials=sys.maxsize)

    def best(self, trials: Sequence[Trial]) -> Trial:
        """With a goal the one of the least error at its size (of none, the closest in size). Where a budget forbids that, or
        without a goal: the smallest that keeps it, or else the one that loses least. trials: at least one; those of which
        nothing is left are taken last."""
        trials = [trial for trial in trials if not trial.empty] or trials
        at_goal = self._at_goal(trials)
        if at_goal is not None and not self.budget:
            return at_goal
        kept = self._at_goal([trial for trial in trials if trial.met])
        if kept is not None:  # of none at the goal, the smallest
            return kept
        return smallest(trials, self.measure) or min(trials, key=lambda one: (one.lost, one.number))

    def reached(self, trial: Trial) -> bool:
        """Whether a trial is as small as the goal asks."""
        return self.goal is not None and trial.costs[self.measure] <= self.goal * (1 + CLOSE)

    def _asks(self, seen: list[Trial]) -> Iterator[Ask]:
        """What is asked for, one trial after another. seen: the answers; it grows between two of them."""
        if self.goal is not None:
            yield from self._for_size(seen, self.goal)
        best = self._at_goal(seen)
        if self.budget and (best is None or not best.met):
            yield from self._for_drop(seen)

    def _for_size(self, seen: list[Trial], target: float) -> Iterator[Ask]:
        """Trials of the size wanted, at the pressures that lose least."""
        most = max(1, self.trials // 2) if self.budget else self.trials
        if self.unpressed is not None:
            yield self.unpressed, target
        while len(seen) < most and self.ratios:
            pressed = [trial for trial in seen if trial.pressure != self.unpressed]
            pressure = better_pressure(pressed, self._pressure(seen, target), len(self.ratios))
            if pressure is None:
                break
            yield round(pressure, 3), target

    def _for_drop(self, seen: list[Trial]) -> Iterator[Ask]:
        """Sizes between what keeps the budget and what does not; then the next smaller one, pressed otherwise."""
        start = start_ratio(self.ratios, self.errors, self.error, self.allowed)
        most = math.log2(self.dense / self.least) if self.least else math.inf
        while len(seen) < self.trials:
            ratio = next_ratio(seen, start, most)
            if ratio is None:
                break
            size = max(self.dense * 2.0 ** -round(ratio, 3), self.least)
            yield self._first(seen, size), size
        for step in (0.5, -0.5) if self.unpressed is None else (0.0,):
            best = smallest(seen, self.measure)
            if best is None or len(seen) >= self.trials or not self.ratios:
                break
            size = max(FURTHER * best.costs[self.measure], self.least)
            if size > (1 - CLOSE) * best.costs[self.measure]:
                break
            yield round(max(self._pressure(seen, size) + step, LOWEST), 3), size

    def _at_goal(self, trials: Sequence[Trial]) -> Trial | None:
        """Of the trials that got to the goal the one of the least error; of none, the closest in size, where those that are
        larger by no more than `CLOSE` are as close."""
        if self.goal is None or not trials:
            return None
        there = [trial for trial in trials if self.reached(trial)]
        if not there:
            size = min(trial.costs[self.measure] for trial in trials)
            there = [trial for trial in trials if trial.costs[self.measure] <= size * (1 + CLOSE)]
        return min(there, key=lambda one: (one.lost, one.metrics["nll"], one.number))

    def _on_path(self, ratio: float) -> float:
        """Where on the path a model is so many times smaller by itself."""
        return pressure_of_size([1 / each for each in self.ratios], 1 / ratio)

    def _first(self, seen: Sequence[Trial], size: float) -> float:
        """The pressure to try a size at first."""
        return self._pressure(seen, size) if self.unpressed is None else self.unpressed

    def _pressure(self, seen: Sequence[Trial], size: float) -> float:
        """The pressure of which a size comes by itself once it is cooled, as far as the trials so far tell; where units are cut
        in steps (`press` is finite), as far as the path tells, and no higher than `press`."""
        shifts = [self._on_path(trial.natural) - trial.pressure for trial in seen] if math.isinf(self.press) else []
        shift = sum(shifts) / len(shifts) if shifts else SHIFT
        highest = min(float(len(self.ratios)), self.press)
        return round(min(max(self._on_path(self.dense / size) - shift, LOWEST), highest), 3)
