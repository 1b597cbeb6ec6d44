"""Priors that groups of weights can share: the KL of a whole layer for any share, with a hand-written gradient.

All shares of a layer are computed together, so that exp(log_sigma2) and mu^2 are computed once for all of them; the backward
keeps at most one number for each weight.

Weights are seen in the canonical view (groups, outputs, inputs, kernel); a share is given by the dimensions that its groups
span; the share "weight" spans none. Weights outside the mask contribute nothing and have no gradient; the sizes, sums and
means of groups cover the weights inside it, and a group with none contributes 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from svdcompress.layers._alpha import wide
from svdcompress.layers._once import once_differentiable
from svdcompress.layers._share import REDUCED, canonical
from svdcompress.layers.priors._base import Layout, Prior
from svdcompress.renamed import renamed_arguments

Parts = tuple[tuple[tuple[int, ...], float], ...]
"""For each share, the dimensions that a group spans and the part of its KL in the sum."""


class GroupedPrior(Prior):
    """A prior whose variance any group of weights can share. A subclass implements `value` and `gradients`.

    Both get weights in the canonical view (or flat, only those inside a sparse mask), float32 at least, and `mask` as bool
    of the same shape, or None for all.
    """

    shares: ClassVar[tuple[str, ...]] = tuple(REDUCED)
    _function: ClassVar[Any]

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        cls._function = _function_of(cls)

    @renamed_arguments(keep="mask")
    def kl(
        self,
        mean: Tensor,
        log_sigma2: Tensor,
        mask: Tensor | None = None,
        share: Mapping[str, float] | None = None,
        layout: Layout = (1, False),
    ) -> Tensor:
        """As `Prior.kl`, for every share."""
        parts = tuple((REDUCED[name], part) for name, part in (share or {"weight": 1.0}).items())
        return self._function.apply(wide(mean), wide(log_sigma2), mask, parts, layout)

    @staticmethod
    def value(weight: Tensor, log_sigma2: Tensor, mask: Tensor | None, parts: Parts) -> tuple[Tensor, list[Tensor]]:
        """The KL summed over the mask in nats, and the tensors that `gradients` needs."""
        raise NotImplementedError

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
        """`grad` times the derivatives of the KL with respect to means and log variances; None for those not wanted."""
        raise NotImplementedError


def _function_of(prior: type[GroupedPrior]) -> Any:
    """The autograd function of a prior: a separate class for each, as torch.compile cannot follow a class as argument."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, weight: Tensor, log_sigma2: Tensor, mask: Tensor | None, parts: Parts, layout: Layout) -> Tensor:
            # The canonical view is taken in here: autograd could not accumulate gradients of a view in place.
            few = _few(mask, parts)
            if few is None:
                mean, spread, where = _canonical(weight, log_sigma2, mask, layout)
            else:  # the weights inside the mask alone, with nothing to leave out
                mean, spread = (tensor.reshape(-1).index_select(0, few) for tensor in (weight, log_sigma2))
                where = None
            total, saved = prior.value(mean, spread, where, parts)
            seen = (weight, log_sigma2, mask) if few is None else (mean, spread, None)  # what was gathered is kept
            ctx.save_for_backward(weight, log_sigma2, *seen, few, *saved)  # the first two: see once_differentiable
            ctx.parts, ctx.layout, ctx.shape = parts, layout, weight.shape
            return total

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
            _, _, mean, spread, where, few, *saved = ctx.saved_tensors
            if few is None:
                mean, spread, where = _canonical(mean, spread, where, ctx.layout)
            found = prior.gradients(mean, spread, where, ctx.parts, saved, grad, ctx.needs_input_grad[:2])
            return *(None if one is None else _restored(one, ctx.shape, few, ctx.layout) for one in found), None, None, None

    return Function


FEW = 0.25
"""Fraction of weights inside the mask up to which gathering them and computing on them alone is cheaper than on all."""


def _few(mask: Tensor | None, parts: Parts) -> Tensor | None:
    """Flat indices of the weights inside the mask if these are few and each has a prior of its own; None to compute on all.

    Only on a CPU and not in a compiled graph, since their number has to be known.
    """
    if mask is None or mask.device.type != "cpu" or torch.compiler.is_compiling() or any(dims for dims, _ in parts):
        return None
    flat = mask.detach().reshape(-1).numpy()  # numpy finds them four times faster than torch
    return torch.from_numpy(np.flatnonzero(flat)) if np.count_nonzero(flat) <= FEW * flat.size else None


def _canonical(weight: Tensor, log_sigma2: Tensor, mask: Tensor | None, layout: Layout) -> tuple[Tensor, Tensor, Tensor | None]:
    where = None if mask is None else canonical(mask, *layout)
    return canonical(weight, *layout), canonical(log_sigma2, *layout), where


def _restored(view: Tensor, shape: torch.Size, few: Tensor | None, layout: Layout) -> Tensor:
    """A canonical view, or few gathered weights, in a weight's shape. Detached: autograd adds in place only to non-views."""
    if few is not None:
        return view.new_zeros(shape.numel()).index_copy_(0, few, view).view(shape).detach()
    return (view.transpose(1, 2) if layout[1] else view).reshape(shape).detach()


def counts(mask: Tensor | None, like: Tensor, dims: tuple[int, ...]) -> Tensor | int:
    """Number of weights of each group inside the mask."""
    if mask is not None:
        return mask.sum(dims, keepdim=True)
    count = 1
    for dim in dims:
        count *= like.shape[dim]
    return count
