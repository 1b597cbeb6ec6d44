"""Refits one linear map by ridge regression towards its current weights; held-out rows choose the ridge."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

RIDGES = (1e-4, 1e-3, 1e-2, 1e-1)
"""Ridges to try, as shares of the mean eigenvalue of the products of the rows or of the inputs, whichever are fewer."""

LEAST = 1e-10
"""Share of the inputs' mean square below which their variance counts as rounding."""


@dataclass(frozen=True)
class Solution:
    """change: of the weight (outputs, inputs); shift: of the bias (outputs,), 0 without one. ridge: one of `RIDGES`; None: the
    weight is kept, as no change helps on held-out rows. before, after: squared error on these, summed over outputs."""

    change: Tensor
    shift: Tensor
    ridge: float | None
    before: float
    after: float


def solve(x: Tensor, residual: Tensor, held: int, *, intercept: bool) -> Solution:
    """The change D of a weight, and of its bias, that minimizes `|residual - x D' - shift|^2 + ridge |D|^2`.

    x: (rows, inputs). residual: (rows, outputs), the error of the map as it is, in double precision. held: how many of the
    last rows are held out to choose among `RIDGES` and "no change"; the solution is then fitted to all rows. intercept:
    whether there is a bias.

    With more inputs than rows, the system of the rows is solved, which has the same solution (Saunders et al. 1998); its
    products are computed in the precision of x.
    """
    kind = _ByRows if len(x) < x.shape[1] else _ByInputs
    rows = kind(x, residual, intercept)
    first = len(x) - held
    missing = residual[first:]
    before = after = float(missing.square().sum())
    ridge, moved = None, False
    if intercept and (missed := float((missing - residual[:first].mean(0)).square().sum())) < after:
        after, moved = missed, True
    for each in RIDGES:
        told = rows.told(first, each)
        if told is not None and (missed := float((missing - told).square().sum())) < after:
            after, ridge = missed, each
    found = None if ridge is None else rows.solution(ridge)
    if found is not None:
        return Solution(*found, ridge, before, after)
    shift = residual.mean(0) if moved else torch.zeros_like(residual[0])
    return Solution(residual.new_zeros(residual.shape[1], x.shape[1]), shift, None, before, after)


class _ByInputs:
    """Solves the system of the inputs, from their products with each other over the rows."""

    def __init__(self, x: Tensor, target: Tensor, intercept: bool) -> None:
        self.x, self.target, self.intercept = x.to(target.dtype), target, intercept
        self.of: dict[int, tuple[Tensor, Tensor, Tensor, Tensor]] = {}
        self.least = LEAST * float(self.x.square().sum()) / max(x.shape[1], 1)

    def told(self, first: int, ridge: float) -> Tensor | None:
        """Targets that the solution of the first rows predicts for the others; None if there is no solution."""
        found = self._at(first, ridge)
        return None if found is None else self.x[first:] @ found[0].T + found[1]

    def solution(self, ridge: float) -> tuple[Tensor, Tensor] | None:
        """The change of the weight and of the bias, fitted to all rows; None if there is no solution."""
        return self._at(len(self.x), ridge)

    def _at(self, count: int, ridge: float) -> tuple[Tensor, Tensor] | None:
        if count not in self.of:
            self.of[count] = self._sums(count)
        products, both, mean, mean_target = self.of[count]
        found = _solved(products, both, ridge, self.least)
        return None if found is None else (found.T, mean_target - found.T @ mean)

    def _sums(self, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Products of the inputs, and of inputs and targets, over the first rows and about their means; and the means."""
        x, target = self.x[:count], self.target[:count]
        mean, mean_target = torch.zeros_like(x[0]), torch.zeros_like(target[0])
        if self.intercept:  # subtracted first: a difference of large products would be rounding
            mean, mean_target = x.mean(0), target.mean(0)
            x, target = x - mean, target - mean_target
        return x.T @ x, x.T @ target, mean, mean_target


class _ByRows:
    """Solves the system of the rows, from their products with each other."""

    def __init__(self, x: Tensor, target: Tensor, intercept: bool) -> None:
        self.mean = x.mean(0) if intercept else torch.zeros_like(x[0])
        self.least = LEAST * float(x.square().sum()) / len(x)
        self.x, self.target, self.intercept = x - self.mean, target, intercept
        self.products = (self.x @ self.x.T).to(target.dtype)

    def told(self, first: int, ridge: float) -> Tensor | None:
        """Targets that the solution of the first rows predicts for the others; None if there is no solution."""
        products, across = self.products[:first, :first], self.products[first:, :first]
        target, mean = self.target[:first], torch.zeros_like(self.target[0])
        if self.intercept:
            means, mean = products.mean(0), target.mean(0)
            across = across - across.mean(1, keepdim=True) - means + means.mean()
            products = products - means - means[:, None] + means.mean()
        factors = _solved(products, target - mean, ridge, self.least)
        return None if factors is None else across @ factors + mean

    def solution(self, ridge: float) -> tuple[Tensor, Tensor] | None:
        """The change of the weight and of the bias, fitted to all rows; None if there is no solution."""
        mean = self.target.mean(0) if self.intercept else torch.zeros_like(self.target[0])
        factors = _solved(self.products, self.target - mean, ridge, self.least)
        if factors is None:
            return None
        change = (factors.T.to(self.x.dtype) @ self.x).to(self.target.dtype)
        return change, mean - change @ self.mean.to(self.target.dtype)


def _solved(products: Tensor, targets: Tensor, ridge: float, least: float) -> Tensor | None:
    """The solution of the system with a ridge on its diagonal; None if the inputs are constant up to rounding."""
    scale = float(products.diagonal().mean())
    if not scale > least:
        return None
    matrix = products.clone()
    matrix.diagonal().add_(ridge * scale)
    factor, failed = torch.linalg.cholesky_ex(matrix)
    return None if int(failed) else torch.cholesky_solve(targets, factor)
