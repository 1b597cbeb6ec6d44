"""Fits one number on validation data: the temperature of a softmax, or the noise of a regression."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from svdcompress.errors import DataError
from svdcompress.uncertainty._quality import as_rows, regression_quality
from svdcompress.uncertainty._shapes import shaped_like

LEAST, MOST = 0.01, 100.0
"""Limits of a temperature; a network that makes no mistake on the validation data ends at the lower one."""

LEAST_LOG_NOISE = -690.0
"""Lower limit of the log of a noise variance: 1 / the variance, tau, is still a number, even where there are no errors."""

NEVER = -1e300
"""Replaces a logit of -inf: at any of these temperatures its probability is exactly 0, and so is probability times logit."""


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    """The T with the lowest NLL of `softmax(logits / T)` (Guo et al. 2017); logits: (N, C), or (N,) for yes or no.

    The NLL is convex in 1 / T; bisection finds the zero of its slope `mean(E_p[z] - z_label)`. A logit of -inf rules its class
    out. Raises DataError for logits that are NaN or +inf, for labels that don't fit them, and for a label whose class is ruled
    out (infinite NLL).
    """
    z = logits.detach().double()
    z = z.flatten() if z.dim() == 2 and z.shape[1] == 1 else z
    z = torch.stack([torch.zeros_like(z), z], 1) if z.dim() == 1 else z
    if bool((z.isnan() | (z == math.inf)).any()):
        raise DataError("logits: they contain NaN or +inf, which no temperature can fit; has the training diverged?")
    z = z.masked_fill(z == -math.inf, NEVER)
    _, labels = as_rows(z, labels)
    chosen = z.gather(1, labels[:, None]).squeeze(1)
    if impossible := int((chosen == NEVER).sum()):
        raise DataError(
            f"labels: {impossible:,} of them belong to a class whose logit is -inf, which no temperature can make possible"
        )

    def slope(inverse: float) -> float:
        return float(((z * inverse).softmax(1) * z).sum(1).sub(chosen).mean())

    low, high = math.log(1 / MOST), math.log(1 / LEAST)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if slope(math.exp(middle)) < 0 else (low, middle)
    return math.exp(-(low + high) / 2)


def fit_tau(mean: Tensor, epistemic: Tensor, target: Tensor) -> float:
    """The tau with the lowest NLL of `N(target; mean, epistemic + 1 / tau)`, all of one shape (Gal & Ghahramani 2016).

    Without epistemic variance, tau is 1 / mean squared error. Raises UsageError for shapes that differ by more than dimensions
    of 1.
    """
    target = shaped_like(mean, target, "target", spread=False)
    error = float((target.double() - mean.double()).square().mean())
    best = math.log(max(error, 1e-300))

    def nll(log_noise: float) -> float:
        return regression_quality(mean, epistemic.double() + math.exp(log_noise), target)["nll"]

    # The best noise lies below the mean squared error. A coarse grid, then ternary search: near it the NLL has one minimum.
    low, high = max(best - 25.0, LEAST_LOG_NOISE), best + 1.0
    grid = [low + (high - low) * i / 52 for i in range(53)]
    at = min(range(53), key=lambda i: nll(grid[i]))
    low, high = grid[max(at - 1, 0)], grid[min(at + 1, 52)]
    for _ in range(60):
        third = (high - low) / 3
        low, high = (low, high - third) if nll(low + third) < nll(high - third) else (low + third, high)
    return math.exp(-(low + high) / 2)
