"""The KL of a whole layer, for every prior and share, with its gradient written out.

The formulas are those of `_kl.py`, which tests hold this against. All shares of a layer are taken together, so that
exp(log_sigma2) and mu^2 are computed once for them; the backward keeps at most one number for each weight.

Weights are seen in the canonical view (groups, outputs, inputs, kernel); a share is the dimensions that its groups span, the
share "weight" spans none. Weights outside `keep` contribute nothing and have no gradient; the sizes, sums and means of
groups are over what is kept, and a group without any contributes 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from svdcompress.layers._kl import EPS, K1, K2, K3
from svdcompress.layers._share import REDUCED, canonical

Parts = tuple[tuple[tuple[int, ...], float], ...]
"""Dimensions that a group spans, and the part of its KL in the sum, for each share."""


Layout = tuple[int, bool]
"""Groups, and whether the weight is a transposed convolution's: what `canonical` needs."""


def divergence(
    weight: Tensor, log_sigma2: Tensor, keep: Tensor | None, prior: str, share: Mapping[str, float], layout: Layout = (1, False)
) -> Tensor:
    """KL(posterior || prior) in nats, summed over the kept weights; a scalar with gradients of weight and log_sigma2.

    weight, log_sigma2: of one shape, as the layer has them. keep: bool of that shape, or None for all.
    """
    wide = torch.promote_types(weight.dtype, torch.float32)
    parts = tuple((REDUCED[name], part) for name, part in share.items())
    return Divergence.apply(weight.to(wide), log_sigma2.to(wide), keep, prior, parts, layout)


class Divergence(torch.autograd.Function):
    """The KL under the prior of a name. The canonical view is taken inside: autograd could not add up gradients of a view
    in place."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, log_sigma2: Tensor, keep: Tensor | None, prior: str, parts: Parts, layout: Layout
    ) -> Tensor:
        few = _few(keep, parts)
        if few is None:
            mean, noise, kept = _canonical(weight, log_sigma2, keep, layout)
        else:  # the kept weights alone, with nothing to leave out
            mean, noise = (tensor.reshape(-1).index_select(0, few) for tensor in (weight, log_sigma2))
            kept = None
        total, saved = (_ard if prior == "ard" else _log_uniform)(mean, noise, kept, parts)
        seen = (weight, log_sigma2, keep) if few is None else (mean, noise, None)  # few numbers are kept, not looked up again
        ctx.save_for_backward(*seen, few, *saved)
        ctx.prior, ctx.parts, ctx.layout, ctx.shape = prior, parts, layout, weight.shape
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        mean, noise, kept, few, *saved = ctx.saved_tensors
        if few is None:
            mean, noise, kept = _canonical(mean, noise, kept, ctx.layout)
        gradients = _ard_gradients if ctx.prior == "ard" else _log_uniform_gradients
        found = gradients(mean, noise, kept, ctx.parts, saved, grad, ctx.needs_input_grad[:2])
        return *(None if one is None else _restored(one, ctx.shape, few, ctx.layout) for one in found), None, None, None, None


FEW = 0.25
"""Share of kept weights up to which taking them out and computing on them alone is cheaper than computing on all."""


def _few(keep: Tensor | None, parts: Parts) -> Tensor | None:
    """Places of the kept weights where these are few and each has a prior of its own; None to compute on all.

    On a CPU only, and not in a graph: how many they are has to be known.
    """
    if keep is None or keep.device.type != "cpu" or torch.compiler.is_compiling() or any(dims for dims, _ in parts):
        return None
    flat = keep.detach().reshape(-1).numpy()  # numpy finds them four times faster than torch
    return torch.from_numpy(np.flatnonzero(flat)) if np.count_nonzero(flat) <= FEW * flat.size else None


def _canonical(weight: Tensor, log_sigma2: Tensor, keep: Tensor | None, layout: Layout) -> tuple[Tensor, Tensor, Tensor | None]:
    kept = None if keep is None else canonical(keep, *layout)
    return canonical(weight, *layout), canonical(log_sigma2, *layout), kept


def _restored(view: Tensor, shape: torch.Size, few: Tensor | None, layout: Layout) -> Tensor:
    """What has the canonical shape in that of a weight. Detached: autograd adds in place to nothing that has a base."""
    if few is not None:
        return view.new_zeros(shape.numel()).index_copy_(0, few, view).view(shape).detach()
    return (view.transpose(1, 2) if layout[1] else view).reshape(shape).detach()


def _count(keep: Tensor | None, like: Tensor, dims: tuple[int, ...]) -> Tensor | int:
    """Kept weights of each group."""
    if keep is not None:
        return keep.sum(dims, keepdim=True)
    count = 1
    for dim in dims:
        count *= like.shape[dim]
    return count


def _ard(weight: Tensor, log_sigma2: Tensor, keep: Tensor | None, parts: Parts) -> tuple[Tensor, list[Tensor]]:
    """Normal priors, each group's variance at its optimum: `0.5 sum_j [log mean_g(mu^2 + sigma2) - log_sigma2_j]`.

    Returns the sum, and the prior's variances for each share.
    """
    moment = log_sigma2.exp().addcmul_(weight, weight)
    if keep is not None:
        moment.mul_(keep)
    total, moments = weight.new_zeros(()), []
    for index, (dims, part) in enumerate(parts):
        if dims:
            count: Any = _count(keep, weight, dims)
            # Divided before it is summed: exp(80) of thousands of weights has no sum in float32, but a mean.
            number = count if keep is None else count.clamp_min(1)
            each = moment.div_(number) if index + 1 == len(parts) else moment / number
            shared = each.sum(dims, keepdim=True).add_(EPS)
            groups = (shared.log() * count).sum()
            spread = log_sigma2 if keep is None else log_sigma2 * keep
            total = total.add(groups - spread.sum(), alpha=0.5 * part)
        else:
            shared = moment.add_(EPS) if len(parts) == 1 else moment + EPS
            terms = shared.log().sub_(log_sigma2)
            total = total.add((terms if keep is None else terms.mul_(keep)).sum(), alpha=0.5 * part)
        moments.append(shared)
    return total, moments


def _ard_gradients(
    weight: Tensor,
    log_sigma2: Tensor,
    keep: Tensor | None,
    parts: Parts,
    moments: Sequence[Tensor],
    grad: Tensor,
    wanted: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None]:
    # In place, and without broadcasting a number into addcmul, which is not vectorised: that was half of the KL's cost.
    precision: Any = None  # the gradient over the prior's variance, summed over shares
    for (_, part), shared in zip(parts, moments, strict=True):
        term = (grad * part) / shared
        precision = term if precision is None else precision + term
    if keep is not None:
        precision, grad = precision * keep, grad * keep
    of_weight = weight * precision if wanted[0] else None
    return of_weight, log_sigma2.exp().mul_(precision).sub_(grad).mul_(0.5) if wanted[1] else None


def _log_uniform(weight: Tensor, log_sigma2: Tensor, keep: Tensor | None, parts: Parts) -> tuple[Tensor, list[Tensor]]:
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
            noise, count = torch.logsumexp(noise, dims, keepdim=True), _count(keep, weight, dims)
            if keep is not None:
                noise = torch.where(count > 0, noise, 0)
        signal = signal + EPS
        log_alpha = torch.log(signal).neg_().add_(noise)
        values = F.logsigmoid(log_alpha).mul_(-0.5).add_(_gate(log_alpha), alpha=K1)
        total = total.add((values if dims == () and keep is None else values * count).sum(), alpha=part)
        saved += [log_alpha, signal] if dims else [log_alpha]
    return total, saved


def _log_uniform_gradients(
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
            slope = slope * _count(keep, weight, dims)
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
