"""Log alpha: the noise of weights over their signal, for one weight or a group of them."""

from __future__ import annotations

import torch
from torch import Tensor

EPS = 1e-8
"""Added to mu^2 inside the logarithm of log alpha, so that a weight of exactly zero is irrelevant, not infinite."""


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
