"""95% intervals of figures on a finite test set: what another sample of as many examples could have given."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import torch
from torch import Tensor

from svdcompress.uncertainty._quality import Z95
from svdcompress.uncertainty._shapes import shaped_like

MANY, DRAWS = 5000, 4000
"""Differences above which `paired_parts` takes the normal approximation, and its draws of random weights below that."""


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
    differ count, and it is valid even if there are few or none. z: the normal quantile of its edges. Raises UsageError for
    shapes that differ by more than dimensions of 1.
    """
    before, after = before.flatten().bool(), shaped_like(before, after, "after", of="before", spread=False).flatten().bool()
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


def paired_parts(difference: Tensor, z: float = Z95, far: float = 1.0) -> tuple[float, float]:
    """The interval of a mean of (N,) independent differences that can be no further from 0 than `far`, such as those of shares.

    Valid even if most differences are 0 and a few, perhaps none of those seen, are large, for which the normal approximation
    of `paired_means` is too narrow. Each edge is a quantile of the mean under random weights (Dirichlet, all parameters 1) of
    the differences and of one more at the far end, far or -far (Gaffke 2005; Learned-Miller & Thomas 2019, arXiv 1905.06208).
    If all are 0 that is the interval of Clopper and Pearson. z: the normal quantile of its edges. Infinite for fewer than two.
    """
    values = difference.flatten().double().numpy()
    if len(values) < 2:
        return -math.inf, math.inf
    level = NormalDist().cdf(z)
    other = values[values != 0]
    if not len(other):
        edge = far * (1 - (1 - level) ** (1 / len(values)))
        return -edge, edge
    if len(values) > MANY:  # the normal approximation, with that further difference
        edges = [paired_means(torch.tensor([*values, end]), z) for end in (-far, far)]
        return edges[0][0], edges[1][1]
    draw = np.random.default_rng(0)
    weights = draw.exponential(size=(DRAWS, len(other)))
    still = len(values) - len(other)
    rest = draw.standard_gamma(still, DRAWS) if still else np.zeros(DRAWS)
    end = draw.exponential(size=DRAWS)
    total, known = weights.sum(1) + rest + end, weights @ other
    low, high = (known - far * end) / total, (known + far * end) / total
    return float(np.quantile(low, 1 - level)), float(np.quantile(high, level))


def paired_rmse(before: Tensor, after: Tensor, z: float = Z95) -> tuple[float, float]:
    """The interval of the change of a root mean square, after - before, from (N,) squares of the same examples.

    By the delta method: to first order the change is a mean over the examples. Squared errors have heavy tails, of which a
    sample shows too little: the interval counts one more example, with a change as far from the mean as the furthest of those
    seen. The rare error that no example shows cannot be counted: hundreds of examples are needed for errors of one input in a
    hundred. z: the normal quantile of its edges. Infinite for fewer than two. Raises UsageError for shapes that differ by more
    than dimensions of 1.
    """
    after = shaped_like(before, after, "after", of="before", spread=False)
    if len(before) < 2:
        return -math.inf, math.inf
    roots = [max(math.sqrt(float(squares.double().mean())), torch.finfo(torch.float64).tiny) for squares in (before, after)]
    change = roots[1] - roots[0]
    parts = (after.double() / (2 * roots[1]) - before.double() / (2 * roots[0])).flatten()
    parts = parts - parts.mean()
    far = parts.abs().max()
    low, high = (paired_means(torch.cat([parts, end[None]]), z)[edge] for edge, end in enumerate((-far, far)))
    return change + low, change + high
