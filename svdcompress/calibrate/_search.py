"""The minimum of a smooth function of one number: of a cheap one, and of one that is expensive to evaluate."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

GOLDEN = (math.sqrt(5) - 1) / 2

WORTH = 0.5
"""Nats, over all targets, for which a search goes on beyond its grid."""


def least(function: Callable[[float], float], grid: Sequence[float], steps: int = 24) -> tuple[float, float]:
    """(place, value) of the minimum: the best of an ascending grid, then golden-section search between its neighbors.

    The result is never worse than the grid's own best.
    """
    values = [function(point) for point in grid]
    at = min(range(len(grid)), key=values.__getitem__)
    best = grid[at], values[at]
    low, high = grid[max(at - 1, 0)], grid[min(at + 1, len(grid) - 1)]
    if low == high:
        return best
    left, right = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
    at_left, at_right = function(left), function(right)
    for _ in range(steps):
        if at_left < at_right:
            high, right, at_right = right, left, at_left
            left = high - GOLDEN * (high - low)
            at_left = function(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + GOLDEN * (high - low)
            at_right = function(right)
    found = min((at_left, left), (at_right, right))
    return (found[1], found[0]) if found[0] < best[1] else best


def widened(function: Callable[[float], float], grid: Sequence[float], step: float, farthest: float) -> list[float]:
    """The places of an ascending grid, and further ones, `step` apart and no farther than `farthest` from 0, until neither the
    first nor the last is the best."""
    values = {place: function(place) for place in grid}
    _beyond(function, values, grid[0], -step, -farthest)
    _beyond(function, values, grid[-1], step, farthest)
    return sorted(values)


def outward(
    function: Callable[[float], float], grid: Sequence[float], start: float, far: float, *, farther: int = 0
) -> list[float]:
    """The places of an ascending grid that were evaluated: from `start` down, then up, each way until two places in a row are
    worse than the best so far by more than `far`.

    farther: the most places that are tried beyond each end of the grid, as far apart as its first two, while the last one is
    the best by at least `WORTH`.
    """
    values = {start: function(start)}
    at = list(grid).index(start)
    for places in (grid[:at][::-1], grid[at + 1 :]):
        hopeless = 0
        for place in places:
            values[place] = function(place)
            hopeless = hopeless + 1 if values[place] > min(values.values()) + far else 0
            if hopeless == 2:
                break
    if len(grid) > 1:
        step = grid[1] - grid[0]
        for end, by in ((grid[0], -step), (grid[-1], step)):
            if end in values:
                _beyond(function, values, end, by, end + farther * by, WORTH)
    return sorted(values)


def _beyond(
    function: Callable[[float], float], values: dict[float, float], end: float, step: float, last: float, worth: float = 0.0
) -> None:
    """Add places beyond an end of those evaluated, up to `last`, while the end is the best by at least `worth`."""
    while (last - end) / step >= 1 - 1e-9:
        others = min((value for place, value in values.items() if place != end), default=math.inf)
        if not (math.isfinite(values[end]) and values[end] <= others - worth):
            break
        end += step
        values[end] = function(end)


def refined(function: Callable[[float], float], around: Sequence[float], steps: int, near: float) -> float:
    """The place of the minimum in the range of `around`, one to three ascending places: at most `steps` evaluations, each at
    the vertex of the parabola through the best place and its neighbors (Brent 1973, ch. 5), until it is within `near` of the
    best."""
    values = {place: function(place) for place in around}
    for _ in range(steps if len(values) > 1 else 0):
        best = min(values, key=values.__getitem__)
        below = max((place for place in values if place < best), default=None)
        above = min((place for place in values if place > best), default=None)
        if below is None or above is None:  # the best is at an end: go towards its one neighbor
            neighbour = above if below is None else below
            assert neighbour is not None
            place = best + (1 - GOLDEN) * (neighbour - best)
        else:
            place = _vertex([(each, values[each]) for each in (below, best, above)])
        if abs(place - best) < near:
            break
        values[place] = function(place)
    return min(values, key=values.__getitem__)


def _vertex(three: Sequence[tuple[float, float]]) -> float:
    """The vertex of the parabola through three points, of which the middle one is the lowest: it is between the others."""
    (a, at_a), (b, at_b), (c, at_c) = three
    right, left = (b - a) * (at_b - at_c), (b - c) * (at_b - at_a)
    bend = right - left
    return b if not bend else b - 0.5 * ((b - a) * right - (b - c) * left) / bend
