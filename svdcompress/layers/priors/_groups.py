"""The KL of a whole layer for any share, with its gradient written out: what the priors of the package have in common.

All shares of a layer are taken together, so that exp(log_sigma2) and mu^2 are computed once for them; the backward keeps at
most one number for each weight.

Weights are seen in the canonical view (groups, outputs, inputs, kernel); a share is the dimensions that its groups span, the
share "weight" spans none. Weights outside `keep` contribute nothing and have no gradient; the sizes, sums and means of
groups are over what is kept, and a group without any contributes 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from svdcompress.layers._alpha import wide
from svdcompress.layers._share import REDUCED, canonical
from svdcompress.layers.priors._base import Layout

Parts = tuple[tuple[tuple[int, ...], float], ...]
"""Dimensions that a group spans, and the part of its KL in the sum, for each share."""


def apply(
    function: Any, mean: Tensor, log_sigma2: Tensor, keep: Tensor | None, share: Mapping[str, float] | None, layout: Layout
) -> Tensor:
    """An autograd function made of `forward` and `backward`, on a layer's weights in float32 at least."""
    parts = tuple((REDUCED[name], part) for name, part in (share or {"weight": 1.0}).items())
    return function.apply(wide(mean), wide(log_sigma2), keep, parts, layout)


def forward(
    ctx: Any, value: Callable, weight: Tensor, log_sigma2: Tensor, keep: Tensor | None, parts: Parts, layout: Layout
) -> Tensor:
    """The KL, and what its gradients need put into `ctx`. The canonical view is taken inside the autograd function: autograd
    could not add up gradients of a view in place.

    value: (mean, log_sigma2, keep, parts) -> (the sum, tensors to be kept for the gradients), in the canonical view.
    """
    few = _few(keep, parts)
    if few is None:
        mean, noise, kept = _canonical(weight, log_sigma2, keep, layout)
    else:  # the kept weights alone, with nothing to leave out
        mean, noise = (tensor.reshape(-1).index_select(0, few) for tensor in (weight, log_sigma2))
        kept = None
    total, saved = value(mean, noise, kept, parts)
    seen = (weight, log_sigma2, keep) if few is None else (mean, noise, None)  # few numbers are kept, not looked up again
    ctx.save_for_backward(*seen, few, *saved)
    ctx.parts, ctx.layout, ctx.shape = parts, layout, weight.shape
    return total


def backward(ctx: Any, gradients: Callable, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of all that `forward` took after `value`.

    gradients: (mean, log_sigma2, keep, parts, kept tensors, grad, which are wanted) -> those of mean and log_sigma2.
    """
    mean, noise, kept, few, *saved = ctx.saved_tensors
    if few is None:
        mean, noise, kept = _canonical(mean, noise, kept, ctx.layout)
    found = gradients(mean, noise, kept, ctx.parts, saved, grad, ctx.needs_input_grad[:2])
    return *(None if one is None else _restored(one, ctx.shape, few, ctx.layout) for one in found), None, None, None


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


def kept_of(keep: Tensor | None, like: Tensor, dims: tuple[int, ...]) -> Tensor | int:
    """Kept weights of each group."""
    if keep is not None:
        return keep.sum(dims, keepdim=True)
    count = 1
    for dim in dims:
        count *= like.shape[dim]
    return count
