"""The least of a smooth function of one number."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

GOLDEN = (math.sqrt(5) - 1) / 2


def least(function: Callable[[float], float], grid: Sequence[float], steps: int = 24) -> tuple[float, float]:
    """(place, value) of the least: the best of an ascending grid, then golden sections between its neighbours.

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
