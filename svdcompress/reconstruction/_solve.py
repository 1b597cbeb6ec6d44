"""One linear map refitted by ridge regression towards the weights that it has; held-out rows choose the ridge."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

RIDGES = (1e-4, 1e-3, 1e-2, 1e-1)
"""Ridges that are tried, as shares of the mean of the eigenvalues of the rows' or the inputs' products, whichever are fewer."""


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

    x: (rows, inputs). residual: (rows, outputs), what the map misses as it is, in double precision. held: so many of the last
    rows choose among `RIDGES` and "no change"; the solution is then of all rows. intercept: whether there is a bias.

    With more inputs than rows the system of the rows is solved, which has the same solution (Saunders et al. 1998); its
    products are made in the precision of x.
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
        if (missed := float((missing - rows.told(first, each)).square().sum())) < after:
            after, ridge = missed, each
    if ridge is not None:
        return Solution(*rows.solution(ridge), ridge, before, after)
    shift = residual.mean(0) if moved else torch.zeros_like(residual[0])
    return Solution(residual.new_zeros(residual.shape[1], x.shape[1]), shift, None, before, after)


class _ByInputs:
    """With the products of the inputs over all rows."""

    def __init__(self, x: Tensor, target: Tensor, intercept: bool) -> None:
        self.x, self.target, self.intercept = x.to(target.dtype), target, intercept
        self.of: dict[int, tuple[Tensor, Tensor, Tensor, Tensor]] = {}

    def told(self, first: int, ridge: float) -> Tensor:
        """What the solution of the first rows says of the others."""
        change, shift = self._at(first, ridge)
        return self.x[first:] @ change.T + shift

    def solution(self, ridge: float) -> tuple[Tensor, Tensor]:
        """Of all rows: the change of the weight and of the bias."""
        return self._at(len(self.x), ridge)

    def _at(self, count: int, ridge: float) -> tuple[Tensor, Tensor]:
        if count not in self.of:
            self.of[count] = self._sums(count)
        products, both, mean, mean_target = self.of[count]
        change = _solved(products, both, ridge).T
        return change, mean_target - change @ mean

    def _sums(self, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Products of the inputs, and of inputs and targets, of the first rows about their means; and the means."""
        x, target = self.x[:count], self.target[:count]
        mean, mean_target = x.mean(0), target.mean(0)
        if not self.intercept:
            mean, mean_target = torch.zeros_like(mean), torch.zeros_like(mean_target)
        products = x.T @ x - count * torch.outer(mean, mean)
        return products, x.T @ (target - mean_target), mean, mean_target


class _ByRows:
    """With the products of the rows."""

    def __init__(self, x: Tensor, target: Tensor, intercept: bool) -> None:
        self.x, self.target, self.intercept = x, target, intercept
        self.products = (x @ x.T).to(target.dtype)

    def told(self, first: int, ridge: float) -> Tensor:
        """What the solution of the first rows says of the others."""
        products, across = self.products[:first, :first], self.products[first:, :first]
        target, mean = self.target[:first], self.target.new_zeros(self.target.shape[1])
        if self.intercept:
            means, mean = products.mean(0), target.mean(0)
            across = across - across.mean(1, keepdim=True) - means + means.mean()
            products = products - means - means[:, None] + means.mean()
        return across @ _solved(products, target - mean, ridge) + mean

    def solution(self, ridge: float) -> tuple[Tensor, Tensor]:
        """Of all rows: the change of the weight and of the bias."""
        products, target, mean = self.products, self.target, torch.zeros_like(self.target[0])
        centre = torch.zeros_like(self.x[0])
        if self.intercept:
            means, mean, centre = products.mean(0), target.mean(0), self.x.mean(0)
            products = products - means - means[:, None] + means.mean()
        factors = _solved(products, target - mean, ridge)
        if self.intercept:  # as the inputs' own mean is taken off
            factors = factors - factors.mean(0)
        change = (factors.T.to(self.x.dtype) @ self.x).to(target.dtype)
        return change, mean - change @ centre.to(target.dtype)


def _solved(products: Tensor, targets: Tensor, ridge: float) -> Tensor:
    """The solution of the system with a ridge on its diagonal; 0 where nothing comes in."""
    scale = float(products.diagonal().mean())
    if not scale > 0:
        return torch.zeros_like(targets)
    matrix = products.clone()
    matrix.diagonal().add_(ridge * scale)
    return torch.cholesky_solve(targets, torch.linalg.cholesky(matrix))
