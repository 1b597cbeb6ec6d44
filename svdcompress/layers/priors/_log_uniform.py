"""The log-uniform prior of variational dropout, in the approximation of Molchanov et al. 2017 (arXiv 1701.05369).

`kl_log_uniform` is the plain formula; layers use `LogUniform.kl`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from svdcompress.layers._alpha import EPS, wide
from svdcompress.layers.priors._groups import GroupedPrior, Parts, counts

# Constants of the approximation in eq. 14 of Molchanov et al. 2017 (arXiv 1701.05369).
K1, K2, K3 = 0.63576, 1.87320, 1.48695


class LogUniform(GroupedPrior):
    """p(log |w|) constant: eq. 14 of arXiv 1701.05369 on the log alpha of each weight or prior group."""

    name = "log-uniform"

    @staticmethod
    def value(weight: Tensor, log_sigma2: Tensor, mask: Tensor | None, parts: Parts) -> tuple[Tensor, list[Tensor]]:
        """The log-uniform KL: eq. 14 of arXiv 1701.05369 on the log alpha of each weight or group, times the group's size.

        Returns the sum and, for each share, log alpha (and, for groups, the signal).
        """
        square = weight.square()
        total, saved = weight.new_zeros(()), []
        for dims, part in parts:
            count: Any = 1 if mask is None else mask
            signal, log_variance = square, log_sigma2
            if dims:
                signal = (square if mask is None else square * mask).sum(dims, keepdim=True)
                log_variance = log_sigma2 if mask is None else log_sigma2.masked_fill(~mask, -torch.inf)
                log_variance, count = torch.logsumexp(log_variance, dims, keepdim=True), counts(mask, weight, dims)
                if mask is not None:
                    log_variance = torch.where(count > 0, log_variance, 0)
            signal = signal + EPS
            log_alpha = torch.log(signal).neg_().add_(log_variance)
            values = F.logsigmoid(log_alpha).mul_(-0.5).add_(_gate(log_alpha), alpha=K1)
            total = total.add((values if dims == () and mask is None else values * count).sum(), alpha=part)
            saved += [log_alpha, signal] if dims else [log_alpha]
        return total, saved

    @staticmethod
    def gradients(
        weight: Tensor,
        log_sigma2: Tensor,
        mask: Tensor | None,
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
            by_variance = slope
            if dims:
                slope = slope * counts(mask, weight, dims)
                by_variance = slope * torch.exp(log_sigma2 - (log_alpha + signal.log()))  # each weight's share of the variance
            by_signal = weight * (slope / signal).mul_(-2)
            of_weight = by_signal if of_weight is None else of_weight.add_(by_signal)
            of_log_sigma2 = by_variance if of_log_sigma2 is None else of_log_sigma2.add_(by_variance)
        if mask is not None:
            of_weight, of_log_sigma2 = of_weight * mask, of_log_sigma2 * mask
        return of_weight if wanted[0] else None, of_log_sigma2 if wanted[1] else None


def kl_log_uniform(log_alpha: Tensor) -> Tensor:
    """KL to the log-uniform prior, approximated; eq. 14 of arXiv 1701.05369 with the sign of a loss, without its constant."""
    log_alpha = wide(log_alpha)
    return (K1 * torch.sigmoid(-(K2 + K3 * log_alpha)) + 0.5 * F.softplus(-log_alpha)).sum()


def _gate(log_alpha: Tensor) -> Tensor:
    """sigmoid(-(K2 + K3 log alpha)), as a new tensor."""
    return (log_alpha * -K3).sub_(K2).sigmoid_()


def _slope(log_alpha: Tensor) -> Tensor:
    """Derivative of the approximated KL with respect to log alpha."""
    gate = _gate(log_alpha)
    gate = torch.addcmul(gate, gate, gate, value=-1)
    return gate.mul_(-K1 * K3).sub_(log_alpha.neg().sigmoid_(), alpha=0.5)
