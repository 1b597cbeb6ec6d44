"""The KL of weights that each have an ARD prior of their own, for many layers in one autograd function.

It is what `_groups.py` computes for ARD with the share "weight" and no mask, with fewer torch calls, which take most of the
KL's time in small networks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from svdcompress.layers._alpha import EPS
from svdcompress.layers._once import once_differentiable

_torch: Any = torch  # its stubs do not declare the functions on lists of tensors


def kl_apart(weights: Sequence[Tensor], log_sigma2s: Sequence[Tensor]) -> Tensor:
    """KL to the ARD prior in nats, summed over all weights; a scalar with gradients for all tensors.

    `0.5 sum [log(mu^2 + sigma2) - log_sigma2]`, eq. 9 of Kharitonov et al. 2018 (arXiv 1811.00596) at the best prior variance.

    weights, log_sigma2s: pairs of one shape, float32 or float64, all of one dtype and on one device.
    """
    return _Apart.apply(len(weights), *weights, *log_sigma2s)


class _Apart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> Tensor:
        weights, log_sigma2s = tensors[:count], tensors[count:]
        moments = _torch._foreach_exp(log_sigma2s)
        _torch._foreach_addcmul_(moments, weights, weights)
        _torch._foreach_add_(moments, EPS)
        terms = _torch._foreach_log(moments)
        _torch._foreach_sub_(terms, log_sigma2s)
        ctx.count = count
        ctx.save_for_backward(*weights, *moments, *log_sigma2s)  # log_sigma2s: see once_differentiable
        return torch.stack([term.sum() for term in terms]).sum().mul_(0.5)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weights, moments = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count : 2 * ctx.count]
        # With m = mu^2 + sigma2 + EPS: mu / m, and 0.5 (sigma2 / m - 1) = -0.5 (mu^2 + EPS) / m, without another exp.
        precisions = [grad / moment for moment in moments]
        of_weights = _torch._foreach_mul(weights, precisions)
        _torch._foreach_mul_(precisions, -0.5 * EPS)
        _torch._foreach_addcmul_(precisions, weights, of_weights, value=-0.5)
        found = (*of_weights, *precisions)
        return None, *(one if wanted else None for one, wanted in zip(found, ctx.needs_input_grad[1:], strict=True))
