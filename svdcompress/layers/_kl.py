"""The KL terms between a Gaussian posterior and the priors, one plain function each; `_divergence.py` is what layers use.

All take the posterior of each weight, N(mu, sigma2), and return a scalar summed over weights. All are computed in at
least float32, are non-negative up to their constant, and go to 0 as alpha = sigma2 / mu^2 grows.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

EPS = 1e-8
"""Added to mu^2 inside the logarithm of log alpha, so that a weight of exactly zero is irrelevant, not infinite."""

# Constants of the approximation in eq. 14 of Molchanov et al. 2017 (arXiv 1701.05369).
K1, K2, K3 = 0.63576, 1.87320, 1.48695


def log_alpha(weight: Tensor, log_sigma2: Tensor) -> Tensor:
    """Log of the noise-to-signal ratio alpha = sigma2 / mu^2, elementwise (additive form, Molchanov et al. 2017, sec. 4.2).

    weight, log_sigma2: any shape, the same; returns that shape, in float32 at least: half precision holds neither EPS nor the
    squares of large weights.
    """
    return wide(log_sigma2) - torch.log(wide(weight).square() + EPS)


def wide(tensor: Tensor) -> Tensor:
    """A tensor in float32 at least."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


@torch.no_grad()
def start_at(weight: Tensor, log_alpha: float) -> float:
    """The log variance that gives the root-mean-square weight of a layer this log alpha."""
    return float(log_alpha + torch.log(wide(weight).square().mean() + EPS))


def group_log_alpha(weight: Tensor, log_sigma2: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Log alpha of whole groups, `log(sum sigma2) - log(sum mu^2)` over `dims` (the reduced dimensions are dropped)."""
    return torch.logsumexp(wide(log_sigma2), dims) - torch.log(wide(weight).square().sum(dims) + EPS)


def kl_log_uniform(log_alpha: Tensor) -> Tensor:
    """KL to the log-uniform prior, approximated; eq. 14 of arXiv 1701.05369 with the sign of a loss, without its constant."""
    log_alpha = wide(log_alpha)
    return (K1 * torch.sigmoid(-(K2 + K3 * log_alpha)) + 0.5 * F.softplus(-log_alpha)).sum()


def kl_ard(log_alpha: Tensor) -> Tensor:
    """KL to N(0, lambda^2) at the best lambda^2 = mu^2 + sigma2; Kharitonov et al. 2018 (arXiv 1811.00596), eq. 9.

    `0.5 log(1 + 1/alpha)`, in the stable form of a softplus: no clamp is needed, so weights that start at a very small
    alpha keep their gradient.
    """
    return 0.5 * F.softplus(-wide(log_alpha)).sum()


def kl_group_ard(weight: Tensor, log_sigma2: Tensor, dims: tuple[int, ...]) -> Tensor:
    """KL to N(0, lambda_g^2) with one lambda per group; a group is what lies along `dims`.

    At the best lambda_g^2 = mean_g(mu^2 + sigma2) it is `0.5 sum_j [log mean_g(mu^2 + sigma2) - log_sigma2_j]`.
    """
    weight, log_sigma2 = wide(weight), wide(log_sigma2)
    second_moment = (weight.square() + log_sigma2.exp()).mean(dims, keepdim=True)
    return 0.5 * (torch.log(second_moment + EPS) - log_sigma2).sum()
