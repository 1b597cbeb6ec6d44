"""Automatic relevance determination: a normal prior whose variance is learned, for each weight or each group of them.

Kharitonov et al. 2018 (arXiv 1811.00596). The prior's variance is at its optimum, which has a closed form, so that the KL
depends on the posterior alone. `kl_ard` and `kl_group_ard` are the plain formulas; layers use `ARD.kl`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from svdcompress.layers._alpha import EPS, wide
from svdcompress.layers.priors._groups import GroupedPrior, Parts, counts


class ARD(GroupedPrior):
    """N(0, lambda^2) with the best lambda for each weight or prior group: `0.5 sum [log(mu^2 + sigma2) - log sigma2]`."""

    name = "ard"

    @staticmethod
    def value(weight: Tensor, log_sigma2: Tensor, mask: Tensor | None, parts: Parts) -> tuple[Tensor, list[Tensor]]:
        """The KL to normal priors, each group's variance at its optimum:
        `0.5 sum_j [log mean_g(mu^2 + sigma2) - log_sigma2_j]`.

        Returns the sum, and the prior's variances for each share.
        """
        moment = log_sigma2.exp().addcmul_(weight, weight)
        if mask is not None:
            moment.mul_(mask)
        total, moments = weight.new_zeros(()), []
        for index, (dims, part) in enumerate(parts):
            if dims:
                count: Any = counts(mask, weight, dims)
                # Divided before summing: exp(80) over thousands of weights overflows float32 as a sum, but not as a mean.
                number = count if mask is None else count.clamp_min(1)
                each = moment.div_(number) if index + 1 == len(parts) else moment / number
                shared = each.sum(dims, keepdim=True).add_(EPS)
                groups = (shared.log() * count).sum()
                spread = log_sigma2 if mask is None else log_sigma2 * mask
                total = total.add(groups - spread.sum(), alpha=0.5 * part)
            else:
                shared = moment.add_(EPS) if len(parts) == 1 else moment + EPS
                terms = shared.log().sub_(log_sigma2)
                total = total.add((terms if mask is None else terms.mul_(mask)).sum(), alpha=0.5 * part)
            moments.append(shared)
        return total, moments

    @staticmethod
    def gradients(
        weight: Tensor,
        log_sigma2: Tensor,
        mask: Tensor | None,
        parts: Parts,
        moments: Sequence[Tensor],
        grad: Tensor,
        wanted: Sequence[bool],
    ) -> tuple[Tensor | None, Tensor | None]:
        # In place, and without broadcasting a number into addcmul, which is not vectorized: that was half of the KL's cost.
        precision: Any = None  # the gradient over the prior's variance, summed over shares
        for (_, part), shared in zip(parts, moments, strict=True):
            term = (grad * part) / shared
            precision = term if precision is None else precision + term
        if mask is not None:
            precision, grad = precision * mask, grad * mask
        of_weight = weight * precision if wanted[0] else None
        return of_weight, log_sigma2.exp().mul_(precision).sub_(grad).mul_(0.5) if wanted[1] else None


def kl_ard(log_alpha: Tensor) -> Tensor:
    """KL to N(0, lambda^2) at the best lambda^2 = mu^2 + sigma2; Kharitonov et al. 2018 (arXiv 1811.00596), eq. 9.

    `0.5 log(1 + 1/alpha)`, in the stable form of a softplus: no clamp is needed, so weights that start at a very small
    alpha keep their gradient.
    """
    return 0.5 * F.softplus(-wide(log_alpha)).sum()


def kl_group_ard(weight: Tensor, log_sigma2: Tensor, dims: tuple[int, ...]) -> Tensor:
    """KL to N(0, lambda_g^2) with one lambda per group; a group is the weights along `dims`.

    At the best lambda_g^2 = mean_g(mu^2 + sigma2) it is `0.5 sum_j [log mean_g(mu^2 + sigma2) - log_sigma2_j]`.
    """
    weight, log_sigma2 = wide(weight), wide(log_sigma2)
    second_moment = (weight.square() + log_sigma2.exp()).mean(dims, keepdim=True)
    return 0.5 * (torch.log(second_moment + EPS) - log_sigma2).sum()
