"""One linear map refitted by ridge regression towards the weights that it has; held-out rows choose the ridge."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

RIDGES = (1e-4, 1e-3, 1e-2, 1e-1)
"""Ridges that are tried, as shares of the mean square of the inputs' columns."""


@dataclass(frozen=True)
class Solution:
    """change: of the weight (outputs, inputs); shift: of the bias (outputs,), 0 without one. ridge: of `RIDGES`; None: the
    weight stays, as no change of it helps on held-out rows. before, after: squared error on these, summed over the outputs."""

    change: Tensor
    shift: Tensor
    ridge: float | None
    before: float
    after: float


def solve(x: Tensor, residual: Tensor, held: int, *, intercept: bool) -> Solution:
    """The change D of a weight, and of its bias, that minimises `|residual - x D' - shift|^2 + ridge |D|^2`.

    x: (rows, inputs). residual: (rows, outputs), what the map misses as it is. held: so many of the last rows choose among
    `RIDGES` and "no change"; the solution is then of all rows. intercept: whether there is a bias.

    With more inputs than rows the system of the rows is solved, which has the same solution (Saunders et al. 1998, eq. 11).
    """
    first = len(x) - held
    tested, missing = x[first:], residual[first:]
    sums = _Sums(x[:first], residual[:first])
    part = _Ridge(sums, intercept)
    before = after = float(missing.square().sum())
    ridge, moved = None, False
    if intercept and (missed := float((missing - part.mean_target).square().sum())) < after:
        after, moved = missed, True
    for each in RIDGES:
        change, shift = part.at(each)
        if (missed := float((missing - tested @ change.T - shift).square().sum())) < after:
            after, ridge = missed, each
    whole = _Ridge(sums.with_more(x, residual, held), intercept)
    if ridge is not None:
        return Solution(*whole.at(ridge), ridge, before, after)
    shift = whole.mean_target if moved else torch.zeros_like(whole.mean_target)
    return Solution(x.new_zeros(residual.shape[1], x.shape[1]), shift, None, before, after)


class _Sums:
    """Rows, and the products of their inputs where these are fewer than the rows."""

    def __init__(self, x: Tensor, target: Tensor, products: Tensor | None = None) -> None:
        self.x, self.target = x, target
        self.by_rows = len(x) < x.shape[1]
        self.products = x.T @ x if products is None and not self.by_rows else products

    def with_more(self, x: Tensor, target: Tensor, more: int) -> _Sums:
        """All rows, the last `more` of which are new."""
        if self.products is None:
            return _Sums(x, target)
        added = x[len(x) - more :]
        return _Sums(x, target, self.products + added.T @ added)


class _Ridge:
    """Solutions for several ridges of one set of rows."""

    def __init__(self, sums: _Sums, intercept: bool) -> None:
        x, target = sums.x, sums.target
        self.mean = x.mean(0) if intercept else x.new_zeros(x.shape[1])
        self.mean_target = target.mean(0) if intercept else target.new_zeros(target.shape[1])
        self.target, self.by_rows = target - self.mean_target, sums.by_rows
        if self.by_rows:
            self.x = x - self.mean
            self.products = self.x @ self.x.T
        else:
            assert sums.products is not None
            self.products = sums.products - len(x) * torch.outer(self.mean, self.mean)
            self.both = x.T @ self.target  # which has mean 0, or x none to take off
        self.scale = float(self.products.diagonal().sum()) / max(x.shape[1], 1)

    def at(self, ridge: float) -> tuple[Tensor, Tensor]:
        """Change of the weight and of the bias."""
        if not self.scale > 0:  # nothing comes in
            return self.mean.new_zeros(self.target.shape[1], len(self.mean)), self.mean_target
        matrix = self.products.clone()
        matrix.diagonal().add_(ridge * self.scale)
        factor = torch.linalg.cholesky(matrix)
        if self.by_rows:
            change = self.x.T @ torch.cholesky_solve(self.target, factor)
        else:
            change = torch.cholesky_solve(self.both, factor)
        return change.T, self.mean_target - change.T @ self.mean
