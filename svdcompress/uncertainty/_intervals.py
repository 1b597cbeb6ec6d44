"""95% intervals of figures on a finite test set: what another sample of as many examples could have given."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from svdcompress.uncertainty._quality import Z95


def wilson(count: float, total: int) -> tuple[float, float]:
    """The interval of a share that was seen in `count` of `total` independent examples (Wilson 1927), in [0, 1]."""
    if total < 1:
        return 0.0, 1.0
    share, square = count / total, Z95**2
    middle = (share + square / (2 * total)) / (1 + square / total)
    half = Z95 * math.sqrt(share * (1 - share) / total + square / (4 * total**2)) / (1 + square / total)
    return max(0.0, middle - half), min(1.0, middle + half)


def paired_shares(before: Tensor, after: Tensor, z: float = Z95) -> tuple[float, float]:
    """The interval of the change of a share, after - before, on the same examples; both (N,) of yes or no.

    The score interval of Tango (1998): the changes that McNemar's test would not reject. Only the examples on which the two
    differ count, and it is valid even if there are few or none. z: the normal quantile of its edges.
    """
    before, after = before.flatten().bool(), after.flatten().bool()
    gained, lost, total = int((after & ~before).sum()), int((before & ~after).sum()), len(before)
    if not total:
        return -1.0, 1.0
    middle = (gained - lost) / total
    return _edge(gained, lost, total, -1.0, middle, z), _edge(gained, lost, total, 1.0, middle, z)


def _edge(gained: int, lost: int, total: int, outside: float, inside: float, z: float) -> float:
    """The change at the edge of the interval, by bisection between one outside and one inside."""
    for _ in range(60):
        change = (outside + inside) / 2
        b = (2 * total - gained + lost) * change - gained - lost
        root = math.sqrt(max(b * b + 8 * total * lost * change * (1 - change), 0.0))
        left = (root - b) / (4 * total)  # most likely probability of a loss, given this change
        variance = total * (2 * left + change * (1 - change))
        if (gained - lost - total * change) ** 2 > z**2 * variance:
            outside = change
        else:
            inside = change
    return (outside + inside) / 2


def paired_means(difference: Tensor, z: float = Z95) -> tuple[float, float]:
    """The interval of a mean of (N,) independent differences, by the normal approximation; infinite for fewer than two.

    z: the normal quantile of its edges.
    """
    difference = difference.flatten().double()
    if len(difference) < 2:
        return -math.inf, math.inf
    mean, half = float(difference.mean()), z * float(difference.std()) / math.sqrt(len(difference))
    return mean - half, mean + half


def paired_rmse(before: Tensor, after: Tensor, z: float = Z95) -> tuple[float, float]:
    """The interval of the change of a root mean square, after - before, from (N,) squares of the same examples.

    By the delta method: to first order the change is a mean over the examples. z: the normal quantile of its edges.
    """
    roots = [max(math.sqrt(float(squares.double().mean())), torch.finfo(torch.float64).tiny) for squares in (before, after)]
    change = roots[1] - roots[0]
    parts = after.double() / (2 * roots[1]) - before.double() / (2 * roots[0])
    low, high = paired_means(parts - parts.mean(), z)
    return change + low, change + high
