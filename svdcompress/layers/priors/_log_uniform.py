"""The log-uniform prior of variational dropout, in the approximation of Molchanov et al. 2017 (arXiv 1701.05369).

`kl_log_uniform` is the formula as it stands; layers use `LogUniform.kl`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from svdcompress.layers._alpha import EPS, wide
from svdcompress.layers._share import REDUCED
from svdcompress.layers.priors import _groups
from svdcompress.layers.priors._base import Layout, Prior
from svdcompress.layers.priors._groups import Parts, kept_of

# Constants of the approximation in eq. 14 of Molchanov et al. 2017 (arXiv 1701.05369).
K1, K2, K3 = 0.63576, 1.87320, 1.48695


class LogUniform(Prior):
    """p(log |w|) constant: eq. 14 of arXiv 1701.05369 on the log alpha of each weight or prior group."""

    name = "log-uniform"
    shares: ClassVar[tuple[str, ...]] = tuple(REDUCED)

    def kl(
        self,
        mean: Tensor,
        log_sigma2: Tensor,
        keep: Tensor | None = None,
        share: Mapping[str, float] | None = None,
        layout: Layout = (1, False),
    ) -> Tensor:
        """As `Prior.kl`, for every share."""
        return _groups.apply(_Function, mean, log_sigma2, keep, share, layout)


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, log_sigma2: Tensor, keep: Tensor | None, parts: Parts, layout: Layout) -> Tensor:
        return _groups.forward(ctx, _value, weight, log_sigma2, keep, parts, layout)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _groups.backward(ctx, _gradients, grad)


def kl_log_uniform(log_alpha: Tensor) -> Tensor:
    """KL to the log-uniform prior, approximated; eq. 14 of arXiv 1701.05369 with the sign of a loss, without its constant."""
    log_alpha = wide(log_alpha)
    return (K1 * torch.sigmoid(-(K2 + K3 * log_alpha)) + 0.5 * F.softplus(-log_alpha)).sum()


def _value(weight: Tensor, log_sigma2: Tensor, keep: Tensor | None, parts: Parts) -> tuple[Tensor, list[Tensor]]:
    """The log-uniform prior: eq. 14 of arXiv 1701.05369 on the log alpha of each weight or group, times the group's size.

    Returns the sum, and for each share log alpha, for groups the signal too.
    """
    square = weight.square()
    total, saved = weight.new_zeros(()), []
    for dims, part in parts:
        count: Any = 1 if keep is None else keep
        signal, noise = square, log_sigma2
        if dims:
            signal = (square if keep is None else square * keep).sum(dims, keepdim=True)
            noise = log_sigma2 if keep is None else log_sigma2.masked_fill(~keep, -torch.inf)
            noise, count = torch.logsumexp(noise, dims, keepdim=True), kept_of(keep, weight, dims)
            if keep is not None:
                noise = torch.where(count > 0, noise, 0)
        signal = signal + EPS
        log_alpha = torch.log(signal).neg_().add_(noise)
        values = F.logsigmoid(log_alpha).mul_(-0.5).add_(_gate(log_alpha), alpha=K1)
        total = total.add((values if dims == () and keep is None else values * count).sum(), alpha=part)
        saved += [log_alpha, signal] if dims else [log_alpha]
    return total, saved


def _gradients(
    weight: Tensor,
    log_sigma2: Tensor,
    keep: Tensor | None,
    parts: Parts,
    saved: Sequence[Tensor],
    grad: Tensor,
    wanted: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None]:
    rest = iter(saved)
    of_weight: Any = None
    of_log_sigma2: Any = None
    for dims, part in parts:
        log_alpha = next(rest)
        slope = _slope(log_alpha).mul_(grad * part)
        signal = next(rest) if dims else weight.square() + EPS
        by_noise = slope
        if dims:
            slope = slope * kept_of(keep, weight, dims)
            by_noise = slope * torch.exp(log_sigma2 - (log_alpha + signal.log()))  # the noise's share of each weight
        by_signal = weight * (slope / signal).mul_(-2)
        of_weight = by_signal if of_weight is None else of_weight.add_(by_signal)
        of_log_sigma2 = by_noise if of_log_sigma2 is None else of_log_sigma2.add_(by_noise)
    if keep is not None:
        of_weight, of_log_sigma2 = of_weight * keep, of_log_sigma2 * keep
    return of_weight if wanted[0] else None, of_log_sigma2 if wanted[1] else None


def _gate(log_alpha: Tensor) -> Tensor:
    """sigmoid(-(K2 + K3 log alpha)), in a tensor of its own."""
    return (log_alpha * -K3).sub_(K2).sigmoid_()


def _slope(log_alpha: Tensor) -> Tensor:
    """Derivative of the approximated KL by log alpha."""
    gate = _gate(log_alpha)
    gate = torch.addcmul(gate, gate, gate, value=-1)
    return gate.mul_(-K1 * K3).sub_(log_alpha.neg().sigmoid_(), alpha=0.5)
