"""The course of a search: which trial comes next, and which one is the best, as a function of the trials so far alone."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from svdcompress.search._plan import LOWEST, better_pressure, next_ratio, pressure_of_size, reached, smallest, start_ratio
from svdcompress.search._trial import Trial

FURTHER = 0.85
"""After the bisection, the next size to try is this fraction of the smallest one that kept the budget."""

SHIFT = 0.8
"""How much sparser a posterior becomes while it cools, in levels; assumed until a trial has measured it."""

CLOSE = 0.02
"""A size that exceeds the goal by no more than this fraction has reached it."""

BACK = 1.0
"""After a trial of which nothing is left, the next one starts at least this many levels lower: at half the beta."""

Ask = tuple[float, float]
"""A trial to make: its pressure, and its size in the measure of the search."""


@dataclass(frozen=True)
class Strategy:
    """What a search tries. `next` depends on the trials alone, so a resumed search continues with the same trial as one that
    was never stopped.

    measure: the key of `Trial.costs` to make small; dense: the dense model's value of it. goal: the size wanted, or None.
    budget: whether the error is bounded. trials: the most that may be made. ratios: how many times smaller than the dense
    model each level of the path is by itself, [] where there is no path; errors: each level's validation error, before any
    recovery. error: the dense model's; allowed: how much it may rise, in the same units. press: the highest pressure to begin
    with for a size; infinite where pressure alone should lead there. least: the smallest size to try. unpressed: the pressure
    to try first, where the path removes hardly any units; trials from the path follow, of the same size for a goal, of a
    smaller one for a budget.
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
        """The trial to make after these, or None where another would tell nothing new or the limit is reached.

        The whole search is replayed, with each trial as the answer to the request in its place.
        """
        seen: list[Trial] = []
        for ask in self._asks(seen):
            if len(seen) == len(trials):
                return ask
            seen.append(trials[len(seen)])
        return None

    def unbounded(self) -> Strategy:
        """The same strategy without a limit on the trials."""
        return replace(self, trials=sys.maxsize)

    def best(self, trials: Sequence[Trial]) -> Trial:
        """With a goal, the trial with the least error at that size (if none got there, the closest in size). Where that one
        breaks the budget, or without a goal: the smallest trial within the budget, or else the one that loses least. trials:
        at least one; those with nothing left are chosen only if there are no others."""
        trials = [trial for trial in trials if not trial.empty] or trials
        at_goal = self._at_goal(trials)
        if at_goal is not None and not self.budget:
            return at_goal
        kept = self._at_goal([trial for trial in trials if trial.met])
        if kept is not None:  # the smallest, if none is at the goal
            return kept
        return smallest(trials, self.measure) or min(trials, key=lambda one: (one.lost, one.number))

    def reached(self, trial: Trial) -> bool:
        """Whether a trial is as small as the goal asks."""
        return self.goal is not None and trial.costs[self.measure] <= self.goal * (1 + CLOSE)

    def _asks(self, seen: list[Trial]) -> Iterator[Ask]:
        """Requests for trials, one after another. seen: the trials made so far; the caller appends to it between requests."""
        if self.goal is not None:
            yield from self._for_size(seen, self.goal)
        best = self._at_goal(seen)
        if self.budget and (best is None or not best.met):
            yield from self._for_drop(seen)

    def _for_size(self, seen: list[Trial], target: float) -> Iterator[Ask]:
        """Requests for the wanted size, at the pressures that lose least."""
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
        """Requests that bisect the size between what keeps the budget and what does not, then for a smaller one."""
        start = start_ratio(self.ratios, self.errors, self.error, self.allowed)
        most = math.log2(self.dense / self.least) if self.least else math.inf
        while len(seen) < self.trials:
            ratio = next_ratio(reached(seen, self.dense, self.measure), start, most)
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
        """The trial with the least error among those that reached the goal; if none did, among the closest in size, which
        includes those that are larger by no more than `CLOSE`."""
        if self.goal is None or not trials:
            return None
        there = [trial for trial in trials if self.reached(trial)]
        if not there:
            size = min(trial.costs[self.measure] for trial in trials)
            there = [trial for trial in trials if trial.costs[self.measure] <= size * (1 + CLOSE)]
        return min(there, key=lambda one: (one.lost, one.metrics["nll"], one.number))

    def _on_path(self, ratio: float) -> float:
        """The pressure at which a model becomes this many times smaller by pressure alone."""
        return pressure_of_size([1 / each for each in self.ratios], 1 / ratio)

    def _first(self, seen: Sequence[Trial], size: float) -> float:
        """The first pressure to try for a size."""
        return self._pressure(seen, size) if self.unpressed is None else self.unpressed

    def _pressure(self, seen: Sequence[Trial], size: float) -> float:
        """The pressure that leads to a size by itself once the model has cooled, estimated from the trials so far. Where
        units are cut in steps (`press` is finite), it is estimated from the path alone, and is at most `press`. A trial of
        which nothing is left tells no size, only that its pressure was too much (unless there was none)."""
        real = [trial for trial in seen if not trial.empty] if math.isinf(self.press) else []
        shifts = [self._on_path(trial.natural) - trial.pressure for trial in real]
        shift = sum(shifts) / len(shifts) if shifts else SHIFT
        below = [trial.pressure - BACK for trial in seen if trial.empty and trial.pressure >= LOWEST]
        highest = min(float(len(self.ratios)), self.press, *below)
        return round(min(max(self._on_path(self.dense / size) - shift, LOWEST), highest), 3)
