"""What to try next: the size, by bisection between sizes that keep the budget and sizes that don't, and the pressure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from svdcompress.search._trial import Trial

FAR = 4.0
"""While no trial keeps the budget, the next size is two powers of two larger instead of one if even the largest model so far
loses more than this many times what is allowed."""

FINEST = 0.2
"""Two sizes closer than this (a factor of 1.15) differ by less than two seeds do; the same holds for pressures."""

LOWEST = -3.0
"""The lowest pressure: four levels below the first, where beta is a sixteenth of the first level's."""

LEAST, MOST = 0.1, 14.0
"""The range of sizes that are tried, in powers of two below the dense model's."""


def start_ratio(ratios: Sequence[float], errors: Sequence[float], dense_error: float, allowed: float) -> float:
    """The size to begin with, in powers of two: that of the last level that loses at most three times what is allowed, before
    any recovery. Recovery wins back most of a loss.

    ratios: how many times smaller than the dense model each level of the path is; errors: its validation error with frozen
    masks.

    >>> start_ratio([2.0, 4.0, 8.0, 16.0], [2.0, 2.4, 3.1, 9.0], dense_error=2.0, allowed=0.5)
    3.0
    """
    near = [ratio for ratio, error in zip(ratios, errors, strict=True) if error - dense_error <= 3 * allowed]
    return min(max(math.log2(max(near[-1], 1.0)) if near else 1.0, LEAST), MOST)


def next_ratio(trials: Sequence[Trial], start: float, most: float = MOST) -> float | None:
    """The size to try next, in powers of two below the dense model's, from the trials that kept the budget and those that did
    not; None where another trial would tell nothing new. start: the first to try; most: the last, for the smallest possible
    model.
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


def reached(trials: Sequence[Trial], dense: float, measure: str) -> list[Trial]:
    """The trials with what each says about sizes as its `ratio`, for `next_ratio`.

    One that kept the budget counts with the size it has where pressure alone made it smaller than asked: up to that size, the
    same pressure would lead to the same model again. One that lost too much counts with the size asked for, at which less
    pressure may lose less; but as small as it is, if another that was kept is smaller than asked there.

    dense: the dense model's value of the measure.
    """
    sizes = [max(trial.ratio, math.log2(dense / max(trial.costs[measure], 1e-12))) for trial in trials]
    most = max((size for size, trial in zip(sizes, trials, strict=True) if trial.met), default=-math.inf)
    counts = [trial.met or trial.ratio <= most for trial in trials]
    return [replace(trial, ratio=size) if it else trial for trial, size, it in zip(trials, sizes, counts, strict=True)]


def better_pressure(trials: Sequence[Trial], start: float, levels: int, lowest: float = LOWEST) -> float | None:
    """The pressure to try next for models of one size, to lose less; None where another trial would tell nothing new.

    `start` is the pressure that leads to the size by itself, an estimate that gets better with each trial; it is tried first.
    From there the search moves towards less error, by half a level, then by a quarter; of trials with nothing left, the one
    with the least pressure counts as the best.
    """
    if all(abs(start - trial.pressure) > FINEST for trial in trials):
        return start
    errors = {trial.pressure: trial.error if trial.estimate is None else trial.estimate for trial in trials}
    errors |= {trial.pressure: math.inf for trial in trials if trial.empty}
    best = min(errors, key=lambda pressure: (errors[pressure], pressure if math.isinf(errors[pressure]) else -pressure))
    step = 0.5
    while step > FINEST:
        for pressure in (best - step, best + step):
            at = min(max(pressure, lowest), float(levels))
            if all(abs(at - tried) > FINEST for tried in errors):
                return at
        step /= 2
    return None


def pressure_of_size(sizes: Sequence[float], target: float) -> float:
    """The pressure at which pressure alone leads to a size, interpolated between levels by the log of their sizes.

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
    """The smallest trial within the budget, the one that loses less if two are equal; None where none is within it."""
    kept = [trial for trial in trials if trial.met]
    return min(kept, key=lambda one: (one.costs[measure], one.lost, one.number), default=None)
