"""The delta method: how far the outputs of a trained network spread, to first order, if its weights follow their posterior.

The network is taken as linear in its weights around the point where training ended (Khan et al. 2019; Immer et al. 2021). With
normal noise of precision tau and a normal prior of variance v for each weight, the posterior covariance of the weights is the
inverse of the GGN, `(tau J^T J + diag(1 / v))^-1`, and the variance of an output `j^T (...)^-1 j`. In its other form, used
here, that is a Gaussian process with the kernel `J diag(v) J^T` (Jacot et al. 2018): a matrix of the size of the examples, not
of the weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from svdcompress.layers import variational_layers


def weights_of(model: nn.Module, biases: bool = True) -> dict[str, Tensor]:
    """Masks by parameter name of the weights that vary: relevant weights and all biases, or all weights of a dense model.

    biases: False leaves out every parameter that has no posterior variance in the variational model."""
    relevant = {_within(name, "weight"): layer.relevant() for name, layer in variational_layers(model)}
    spreads = {_within(name, "log_sigma2") for name, _ in variational_layers(model)}
    every = {name: torch.ones_like(p, dtype=torch.bool) for name, p in model.named_parameters() if name not in spreads}
    return {**every, **relevant} if biases else relevant


def _within(layer: str, parameter: str) -> str:
    return f"{layer}.{parameter}" if layer else parameter


def jacobian(model: nn.Module, x: Tensor, which: dict[str, Tensor]) -> Tensor:
    """Derivatives (N, P) of the one output for each of N inputs by the weights that vary, in float64; model: in `eval()`."""
    parameters = {name: p for name, p in model.named_parameters() if name in which}
    rows = []
    for one in x.split(1):
        output = model(one).sum()
        slopes = torch.autograd.grad(output, list(parameters.values()), allow_unused=True)
        parts = [torch.zeros_like(p) if slope is None else slope for p, slope in zip(parameters.values(), slopes, strict=True)]
        rows.append(torch.cat([part[which[name]].double() for name, part in zip(parameters, parts, strict=True)]))
    return torch.stack(rows)


def weights(model: nn.Module, which: dict[str, Tensor]) -> Tensor:
    """The weights that vary, (P,), in float64."""
    return torch.cat([p.detach()[which[name]].double() for name, p in model.named_parameters() if name in which])


def groups_of(model: nn.Module, which: dict[str, Tensor]) -> dict[str, Tensor]:
    """For each parameter by name, which of the weights that vary are its own: (P,), Boolean."""
    counts = {name: int(which[name].sum()) for name, _ in model.named_parameters() if name in which}
    owner = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(list(counts.values())))
    return {name: owner == place for place, name in enumerate(counts) if counts[name]}


def ard_variance(model: nn.Module, which: dict[str, Tensor], others: float = 1.0) -> Tensor:
    """Prior variances (P,) as learned by ARD, mu^2 + sigma^2 of each weight; others: that of parameters without one."""
    layers: dict[str, Any] = {_within(name, "weight"): layer for name, layer in variational_layers(model)}
    parts = []
    for name, p in model.named_parameters():
        if name in which:
            layer = layers.get(name)
            prior = torch.full_like(p, others) if layer is None else p.square() + layer.log_sigma2.exp()
            parts.append(prior.detach()[which[name]].double())
    return torch.cat(parts)


@dataclass(frozen=True)
class Delta:
    """Variances of outputs by the delta method. jacobian: (N, P), at the training inputs. prior: (P,) variances about 0, for a
    scale of 1. weights: (P,), at the end of training."""

    jacobian: Tensor
    prior: Tensor
    weights: Tensor

    def evidence(self, scale: float, tau: float) -> float:
        """The log marginal likelihood of the training data, without terms that do not depend on the scale:
        `-1/2 sum w^2 / (scale v) - 1/2 log det(I + tau scale J diag(v) J^T)` (MacKay 1992; Immer et al. 2021, eq. 6)."""
        spread = torch.linalg.eigvalsh(self._kernel).clamp_min(0)
        penalty = (self.weights.square() / self.prior).sum() / scale
        return float(-0.5 * penalty - 0.5 * torch.log1p(tau * scale * spread).sum())

    def best_scale(self, tau: float, low: float = -6.0, high: float = 4.0) -> float:
        """The factor on all prior variances that has the most evidence, between 10^low and 10^high."""
        return 10 ** max(torch.linspace(low, high, 201).tolist(), key=lambda power: self.evidence(10**power, tau))

    def variance(self, at: Tensor, scale: float, tau: float) -> Tensor:
        """Variances (M,) of the outputs whose derivatives are `at` (M, P), without noise."""
        prior = scale * self.prior
        covariance = scale * self._kernel + torch.eye(len(self.jacobian), dtype=torch.float64) / tau
        root = torch.linalg.cholesky(covariance)
        cross = torch.linalg.solve_triangular(root, (self.jacobian * prior) @ at.T, upper=False)
        return ((at.square() @ prior) - cross.square().sum(0)).clamp_min(0)

    def by_group(self, groups: Tensor, tau: float, rounds: int = 200) -> Delta:
        """The same with a prior variance for each group of weights (a layer's, say). groups: (P,), whole numbers from 0 on.

        The variances are MacKay's (1992) fixed point of the evidence: `v = sum w^2 / gamma`, where gamma is the group's number
        of well-determined weights, `sum (1 - posterior variance / v)`.
        """
        count = int(groups.max()) + 1
        squares = torch.zeros(count, dtype=torch.float64).index_add_(0, groups, self.weights.square())
        variances = squares / groups.bincount(minlength=count)
        eye = torch.eye(len(self.jacobian), dtype=torch.float64) / tau
        for _ in range(rounds):
            prior = variances[groups]
            root = torch.linalg.cholesky((self.jacobian * prior) @ self.jacobian.T + eye)
            half = torch.linalg.solve_triangular(root, self.jacobian, upper=False)
            known = torch.zeros(count, dtype=torch.float64).index_add_(0, groups, prior * half.square().sum(0))
            variances = squares / known.clamp_min(1e-6)  # if the data say nothing of a group, no variance is too large
        return Delta(self.jacobian, variances[groups], self.weights)

    @cached_property
    def _kernel(self) -> Tensor:
        return (self.jacobian * self.prior) @ self.jacobian.T


def normal_nll(mean: Tensor, variance: Tensor, target: Tensor) -> float:
    """Mean negative log likelihood of targets (N,) under normal distributions."""
    return float(0.5 * (math.log(2 * math.pi) + variance.log() + (target - mean).square() / variance).mean())
