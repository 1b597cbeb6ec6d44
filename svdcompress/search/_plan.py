"""Where on the path of rising pressure to try next: by bisection between what keeps the budget and what does not."""

from __future__ import annotations

import math
from collections.abc import Sequence

from svdcompress.search._trial import Trial

FAR = 4.0
"""From this many times what is allowed on, it goes down by two levels at once."""

LOWEST = -3.0
"""Four levels below the first, beta is a sixteenth of its own: hardly anything is asked to go."""

FINEST = 0.2
"""Pressures closer than this (a factor of 1.15 in beta, where a level doubles it) differ by less than two seeds do."""


def start_pressure(errors: Sequence[float], dense_error: float, allowed: float) -> float:
    """The level to begin with: the last one that, before any recovery, loses at most three times what is allowed.

    errors: validation error with masks held after each level of the path, in points. Recovery wins most of a loss back.

    >>> start_pressure([2.0, 2.4, 3.1, 9.0], dense_error=2.0, allowed=0.5)
    3.0
    """
    near = [level for level, error in enumerate(errors, 1) if error - dense_error <= 3 * allowed]
    return float(max(near, default=1))


def next_pressure(trials: Sequence[Trial], start: float, levels: int, lowest: float = LOWEST) -> float | None:
    """The pressure to try next, from those that kept the budget and those that did not; None where no more is to be learnt.

    start: the first to try. levels: the highest; lowest: the lowest.
    """
    if not trials:
        return min(max(start, lowest), float(levels))
    kept = [trial.pressure for trial in trials if trial.met]
    lost = [trial.pressure for trial in trials if not trial.met]
    low, high = max(kept, default=None), min(lost, default=None)
    if low is None:
        assert high is not None
        nearest = min(trials, key=lambda trial: trial.pressure)
        down = max(high - (2 if nearest.drop > FAR * max(nearest.allowed, 0.1) else 1), lowest)
        return down if high - down > FINEST else None
    lost_above = [pressure for pressure in lost if pressure > low]
    if not lost_above:
        up = min(low + 1, float(levels))
        return up if up - low > FINEST else None
    high = min(lost_above)
    return (low + high) / 2 if high - low > FINEST else None


def better_pressure(trials: Sequence[Trial], start: float, levels: int, lowest: float = LOWEST) -> float | None:
    """The pressure to try next for models of one size, to lose less; None where no more is to be learnt.

    The first is a level below the one that gives the size by itself (`start`): what is pressed less hard, and then cut to the
    size by rank, has mostly been better. From there it walks towards less error, a level at a time, then halves.
    """
    if not trials:
        return min(max(start - 1, lowest), float(levels))
    errors = {trial.pressure: trial.error for trial in trials}
    best = min(errors, key=lambda pressure: (errors[pressure], -pressure))
    step = 1.0
    while step > FINEST:
        for pressure in (best - step, best + step):
            at = min(max(pressure, lowest), float(levels))
            if all(abs(at - tried) > FINEST for tried in errors):
                return at
        step /= 2
    return None


def smallest(trials: Sequence[Trial], measure: str) -> Trial | None:
    """Of the trials within the budget the smallest one, and of equal ones the better; None where none is within it."""
    kept = [trial for trial in trials if trial.met]
    return min(kept, key=lambda one: (one.costs[measure], one.error, one.number), default=None)


def pressure_of_size(sizes: Sequence[float], target: float) -> float:
    """Where on the path a size comes by itself, between levels by the log of their sizes.

    >>> pressure_of_size([100.0, 50.0, 25.0], 50.0)
    2.0
    """
    if target >= sizes[0]:
        return 1.0
    for level in range(1, len(sizes)):
        above, below = sizes[level - 1], sizes[level]
        if below <= target:
            if below >= above:
                return float(level + 1)
            return level + math.log(above / target) / math.log(above / below)
    return float(len(sizes))
