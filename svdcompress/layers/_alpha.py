"""Log alpha: the log of the noise-to-signal ratio of a weight or of a group of weights."""

from __future__ import annotations

import torch
from torch import Tensor

EPS = 1e-8
"""Added to mu^2 inside the logarithm of log alpha, so that a weight of exactly zero has a high but finite log alpha."""


def log_alpha(weight: Tensor, log_sigma2: Tensor) -> Tensor:
    """Log of the noise-to-signal ratio alpha = sigma2 / mu^2, elementwise (additive form, Molchanov et al. 2017, sec. 4.2).

    weight, log_sigma2: any shape, the same; returns that shape, in float32 at least: half precision holds neither EPS nor the
    squares of large weights.
    """
    return wide(log_sigma2) - torch.log(wide(weight).square() + EPS)


def wide(tensor: Tensor) -> Tensor:
    """Cast a tensor to float32, unless its dtype is wider."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


@torch.no_grad()
def start_at(weight: Tensor, log_alpha: float) -> float:
    """The log variance at which a weight of the layer's root-mean-square size has this log alpha."""
    return float(log_alpha + torch.log(wide(weight).square().mean() + EPS))


def group_log_alpha(weight: Tensor, log_sigma2: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Log alpha of whole groups, `log(sum sigma2) - log(sum mu^2)` over `dims` (the reduced dimensions are dropped)."""
    return torch.logsumexp(wide(log_sigma2), dims) - torch.log(wide(weight).square().sum(dims) + EPS)
