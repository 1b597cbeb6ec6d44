"""The share of the targets' variance that a model's values explain, computed batch by batch."""

from __future__ import annotations

import torch
from torch import Tensor

from svdcompress.uncertainty._shapes import shaped_like


class Explained:
    """R2 = 1 - SS_res / SS_tot of values, accumulated batch by batch in double precision.

    SS_tot is taken about the mean of the given targets. R2 has no unit, and is the same for standardized targets. With several
    outputs it is the mean over them (`uniform_average` of scikit-learn's `r2_score`), without those whose target is constant.

    Example: `Explained().add(mean, target).r2` or `r2(mean, target)`.
    """

    def __init__(self) -> None:
        self._sums: Tensor | None = None
        self._fits = True

    def add(self, mean: Tensor, target: Tensor, counts: Tensor | None = None) -> Explained:
        """Add a batch: values (N, ...) or (N,), targets of the same shape, and which of them count (None: all)."""
        mean, target = (each.detach().double().reshape(len(each), -1) for each in (mean, target))
        weight = torch.ones_like(target) if counts is None else counts.detach().to(target).reshape(target.shape)
        if not len(target):
            return self
        if self._sums is None:
            self._origin = target[0].clone()  # near the mean, so that squares stay small
            self._sums = torch.zeros(6, target.shape[1], dtype=torch.float64, device=target.device)
            self._sums[4], self._sums[5] = torch.inf, -torch.inf
        if target.shape[1] != self._sums.shape[1]:  # outputs of different lengths, such as sequences
            self._fits = False
            return self
        away, there = target - self._origin, weight > 0
        parts = (weight, weight * (target - mean).square(), weight * away, weight * away.square())
        self._sums[:4] += torch.stack([part.sum(0) for part in parts])
        self._sums[4] = torch.minimum(self._sums[4], target.where(there, torch.inf).amin(0))
        self._sums[5] = torch.maximum(self._sums[5], target.where(there, -torch.inf).amax(0))
        return self

    @property
    def r2(self) -> float | None:
        """R2; None if no target varies, or if batches have outputs of different lengths."""
        if self._sums is None or not self._fits:
            return None
        count, residual, first, second, low, high = self._sums.cpu()
        varies = high > low
        if not bool(varies.any()):
            return None
        total = second - first.square() / count.clamp_min(1)
        return float((1 - residual[varies] / total[varies]).mean())


def r2(mean: Tensor, target: Tensor) -> float | None:
    """R2 of values (N, ...) for targets of the same shape, as computed by `Explained`. Raises UsageError for shapes that differ
    by more than dimensions of 1."""
    return Explained().add(mean, shaped_like(mean, target, "target", spread=False)).r2
