"""The delta method: how far the outputs of a trained network spread, to first order, if its weights follow their posterior.

The network is taken as linear in its weights about where training ended (Khan et al. 2019; Immer et al. 2021). With normal noise
of precision tau and a normal prior of variance v for each weight, the posterior covariance of the weights is the inverse of
the GGN, `(tau J^T J + diag(1 / v))^-1`, and the variance of an output `j^T (...)^-1 j`. In its other form, which is used here,
that is a Gaussian process with the kernel `J diag(v) J^T` (Jacot et al. 2018): a matrix of the examples' size, not the weights'.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from svdcompress.layers import variational_layers


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Which weights vary, Boolean by a parameter's name: those that are relevant, and all biases; all of a dense model."""
    relevant = {f"{name}.weight": layer.relevant() for name, layer in variational_layers(model)}
    spreads = {f"{name}.log_sigma2" for name, _ in variational_layers(model)}
    every = {name: torch.ones_like(p, dtype=torch.bool) for name, p in model.named_parameters() if name not in spreads}
    return {**every, **relevant}


def jacobian(model: nn.Module, x: Tensor, which: dict[str, Tensor]) -> Tensor:
    """Derivatives (N, P) of the one output for each of N inputs by the weights that vary, in float64; the model in `eval()`."""
    parameters = {name: p for name, p in model.named_parameters() if name in which}
    rows = []
    for one in x.split(1):
        output = model(one).sum()
        slopes = torch.autograd.grad(output, list(parameters.values()), allow_unused=True)
        parts = [torch.zeros_like(p) if slope is None else slope for p, slope in zip(parameters.values(), slopes, strict=True)]
        rows.append(torch.cat([part[which[name]].double() for name, part in zip(parameters, parts, strict=True)]))
    return torch.stack(rows)


def ard_variance(model: nn.Module, which: dict[str, Tensor], others: float = 1.0) -> Tensor:
    """Prior variances (P,) as ARD has learnt them, mu^2 + sigma^2 of each weight; others: of parameters without any."""
    layers: dict[str, Any] = {f"{name}.weight": layer for name, layer in variational_layers(model)}
    parts = []
    for name, p in model.named_parameters():
        if name in which:
            layer = layers.get(name)
            prior = torch.full_like(p, others) if layer is None else p.square() + layer.log_sigma2.exp()
            parts.append(prior.detach()[which[name]].double())
    return torch.cat(parts)


@dataclass(frozen=True)
class Delta:
    """Outputs' spread by the delta method. kernel: of the training inputs (N, N), `J diag(v) J^T`, for a scale of 1 of the
    prior; residual: (N,), targets less outputs at the trained weights."""

    jacobian: Tensor
    prior: Tensor
    residual: Tensor

    def evidence(self, scale: float, tau: float) -> float:
        """The log marginal likelihood of the residuals, less a constant: of a normal distribution with the covariance
        `scale J diag(v) J^T + I / tau` (MacKay 1992)."""
        covariance = scale * self._kernel() + torch.eye(len(self.residual), dtype=torch.float64) / tau
        root = torch.linalg.cholesky(covariance)
        white = torch.linalg.solve_triangular(root, self.residual[:, None], upper=False)
        return float(-0.5 * white.square().sum() - root.diagonal().log().sum())

    def best_scale(self, tau: float, low: float = -8.0, high: float = 4.0) -> float:
        """The factor on all prior variances of most evidence, between 10^low and 10^high."""
        grid = torch.linspace(low, high, 121).tolist()
        return 10 ** max(grid, key=lambda power: self.evidence(10**power, tau))

    def variance(self, at: Tensor, scale: float, tau: float) -> Tensor:
        """Variances (M,) of the outputs whose derivatives are `at` (M, P), without noise."""
        prior = scale * self.prior
        covariance = scale * self._kernel() + torch.eye(len(self.residual), dtype=torch.float64) / tau
        root = torch.linalg.cholesky(covariance)
        cross = torch.linalg.solve_triangular(root, (self.jacobian * prior) @ at.T, upper=False)
        return ((at.square() @ prior) - cross.square().sum(0)).clamp_min(0)

    def _kernel(self) -> Tensor:
        return (self.jacobian * self.prior) @ self.jacobian.T


def normal_nll(mean: Tensor, variance: Tensor, target: Tensor) -> float:
    """Mean negative log likelihood of targets (N,) under normal distributions."""
    return float(0.5 * (math.log(2 * math.pi) + variance.log() + (target - mean).square() / variance).mean())
