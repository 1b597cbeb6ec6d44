"""What to try next: which size, by bisection between what keeps the budget and what does not, and at which pressure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from svdcompress.search._trial import Trial

FAR = 4.0
"""From this many times what is allowed on, it goes back by two steps at once."""

FINEST = 0.2
"""Sizes closer than this (a factor of 1.15) differ by less than two seeds do, and so do pressures."""

LOWEST = -3.0
"""The lowest pressure: four levels below the first, beta is a sixteenth of its own."""

LEAST, MOST = 0.1, 14.0
"""Sizes that are looked at, in powers of two below the dense model's."""


def start_ratio(ratios: Sequence[float], errors: Sequence[float], dense_error: float, allowed: float) -> float:
    """The size to begin with, in powers of two: that of the last level which loses, before any recovery, at most three times
    what is allowed. Recovery wins most of a loss back.

    ratios: how many times smaller than the dense model each level of the path is; errors: its validation error, frozen masks.

    >>> start_ratio([2.0, 4.0, 8.0, 16.0], [2.0, 2.4, 3.1, 9.0], dense_error=2.0, allowed=0.5)
    3.0
    """
    near = [ratio for ratio, error in zip(ratios, errors, strict=True) if error - dense_error <= 3 * allowed]
    return min(max(math.log2(max(near[-1], 1.0)) if near else 1.0, LEAST), MOST)


def next_ratio(trials: Sequence[Trial], start: float, most: float = MOST) -> float | None:
    """The size to try next, in powers of two below the dense model's, from the trials that kept the budget and those that did
    not; None where no more is to be learnt. start: the first to try; most: the last that can be had.
    """
    most = max(min(most, MOST), LEAST)
    if not trials:
        return min(max(start, LEAST), most)
    kept = [trial.ratio for trial in trials if trial.met]
    lost = [trial.ratio for trial in trials if not trial.met]
    low = max(kept, default=None)
    if low is None:
        high = min(lost)
        nearest = min(trials, key=lambda trial: trial.ratio)
        down = max(high - (2 if nearest.lost > FAR * max(nearest.allowed, 0.1) else 1), LEAST)
        return down if high - down > FINEST / 2 else None
    above = [ratio for ratio in lost if ratio > low]
    if not above:
        return min(low + 1, most) if most - low > FINEST else None
    high = min(above)
    return (low + high) / 2 if high - low > FINEST else None


def better_pressure(trials: Sequence[Trial], start: float, levels: int, lowest: float = LOWEST) -> float | None:
    """The pressure to try next for models of one size, to lose less; None where no more is to be learnt.

    The first is the one that gives the size by itself (`start`), which trials tell better and better. From there it walks
    towards less error, by half a level, then by a quarter.
    """
    if all(abs(start - trial.pressure) > FINEST for trial in trials):
        return start
    errors = {trial.pressure: trial.error if trial.estimate is None else trial.estimate for trial in trials}
    errors |= {trial.pressure: math.inf for trial in trials if trial.empty}
    best = min(errors, key=lambda pressure: (errors[pressure], -pressure))
    step = 0.5
    while step > FINEST:
        for pressure in (best - step, best + step):
            at = min(max(pressure, lowest), float(levels))
            if all(abs(at - tried) > FINEST for tried in errors):
                return at
        step /= 2
    return None


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


def smallest(trials: Sequence[Trial], measure: str) -> Trial | None:
    """Of the trials within the budget the smallest one, and of equal ones the better; None where none is within it."""
    kept = [trial for trial in trials if trial.met]
    return min(kept, key=lambda one: (one.costs[measure], one.lost, one.number), default=None)
