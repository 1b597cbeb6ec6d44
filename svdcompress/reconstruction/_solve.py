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
    `RIDGES` and "no change"; the solution is then of all rows. intercept: whether there is a bias. All in double precision.

    With more inputs than rows the system of the rows is solved, which has the same solution (Saunders et al. 1998, eq. 11).
    """
    rows = len(x)
    fitted, tested = slice(0, rows - held), slice(rows - held, rows)
    solver = _Ridge(x[fitted], residual[fitted], intercept)
    before = float(residual[tested].square().sum())
    zero, shift = x.new_zeros(residual.shape[1], x.shape[1]), solver.target_mean
    best: tuple[float, float | None] = before, None
    if intercept:
        best = min(best, (float((residual[tested] - shift).square().sum()), None), key=lambda each: each[0])
    for ridge in RIDGES:
        change, shift = solver.at(ridge)
        missed = float((residual[tested] - x[tested] @ change.T - shift).square().sum())
        if missed < best[0]:
            best = missed, ridge
    after, ridge = best
    whole = _Ridge(x, residual, intercept)
    if ridge is None:
        moved = intercept and after < before
        return Solution(zero, whole.target_mean if moved else torch.zeros_like(whole.target_mean), None, before, after)
    return Solution(*whole.at(ridge), ridge, before, after)


class _Ridge:
    """Solutions for several ridges of one set of rows."""

    def __init__(self, x: Tensor, target: Tensor, intercept: bool) -> None:
        self.mean = x.mean(0) if intercept else x.new_zeros(x.shape[1])
        self.target_mean = target.mean(0) if intercept else target.new_zeros(target.shape[1])
        self.x, self.target = x - self.mean, target - self.target_mean
        self.by_rows = len(x) < x.shape[1]
        self.products = self.x @ self.x.T if self.by_rows else self.x.T @ self.x
        self.scale = float(self.products.diagonal().sum()) / max(x.shape[1], 1)

    def at(self, ridge: float) -> tuple[Tensor, Tensor]:
        """Change of the weight and of the bias."""
        if not self.scale > 0:  # nothing comes in
            return self.x.new_zeros(self.target.shape[1], self.x.shape[1]), self.target_mean
        matrix = self.products.clone()
        matrix.diagonal().add_(ridge * self.scale)
        factor = torch.linalg.cholesky(matrix)
        if self.by_rows:
            change = self.x.T @ torch.cholesky_solve(self.target, factor)
        else:
            change = torch.cholesky_solve(self.x.T @ self.target, factor)
        return change.T, self.target_mean - change.T @ self.mean
