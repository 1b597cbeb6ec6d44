"""Surgery on the parameters of variances: cut along with their weight, or replaced by a variance for each weight."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from svdcompress.layers import VariationalLayer, set_posterior, variational_layers, weight_of
from svdcompress.prune._choice import Analysis, Choice
from svdcompress.prune._folding import holders
from svdcompress.prune._units import Parameter


def make_independent(model: nn.Module, analysis: Analysis, choice: Choice) -> None:
    """Give a variance for each weight to layers whose posterior cannot represent the result of the surgery, in place.

    These are layers whose variance parameters cannot be cut along the weight's axes, and layers with carriers of removed
    inputs' constants: a carrier's column of variances then becomes a sum over those of several inputs.
    """
    found: set[tuple[int, ...]] = set()
    for parameter in analysis.trace.units.parameters:
        if any(choice.removed[a : a + n].any() for a, n in zip(parameter.axes, parameter.sizes, strict=True)):
            found |= {weight_of(layer) for layer in _layers(model, parameter) if not _follows(layer)}
    for number, carriers in choice.carriers.items():
        if carriers:
            found |= {weight_of(layer) for layer in _layers(model, analysis.consumers[number].parameter)}
    if found:
        set_posterior([layer for _, layer in variational_layers(model) if weight_of(layer) in found], "independent")


def _layers(model: nn.Module, parameter: Parameter) -> Iterator[VariationalLayer]:
    for module, key in holders(model, parameter):
        if isinstance(module, VariationalLayer) and key == "weight" and module.posterior != "independent":
            yield module


def _follows(layer: VariationalLayer) -> bool:
    """Whether each variance parameter can be cut with the weight, having its shape or its canonical view's with sizes 1."""
    whole = layer.canonical(layer.weight).shape
    for own in layer.variance_parameters().values():
        if own.shape == layer.weight.shape:
            continue
        if own.dim() != 4 or any(size not in (1, full) for size, full in zip(own.shape, whole, strict=True)):
            return False
        if own.shape[0] != whole[0] and math.prod(own.shape[1:3]) > 1:  # groups may lose different units
            return False
        if not all(_only_there(layer, own, axis) for axis in (1, 2) if own.shape[axis] > 1):
            return False
    return True


@torch.no_grad()
def _only_there(layer: VariationalLayer, own: Tensor, axis: int) -> bool:
    """Whether the first index along an axis of a variance parameter affects only the first index along that axis of the
    canonical view. For a square convolution the shape doesn't tell a term for each input from one for each output."""
    before, kept = layer.canonical(layer.log_sigma2).clone(), own.detach().clone()
    try:
        own.data.select(axis, 0).add_(1.0)
        moved = layer.canonical(layer.log_sigma2) != before
    finally:
        own.data.copy_(kept)
    return not moved.narrow(axis, 1, moved.shape[axis] - 1).any()


def cut_view(layer: Any, parameter: Parameter, view: Tensor, keep: Sequence[np.ndarray]) -> Tensor:
    """A parameter in the shape of the layer's canonical view, some sizes 1, cut to the kept indices; contiguous.

    layer: with its weight not cut yet. keep: for each axis of the traced parameter.
    """
    groups, outputs, inputs, _ = layer.canonical(layer.weight).shape
    turned = layer.transposed and not parameter.grouped  # the axes of a grouped weight are outputs and inputs
    first, second = (part.reshape(groups, -1) for part in keep[:2])  # the kernel's axes are kept whole
    keep_out, keep_in = (second, first) if turned else (first, second)
    parts = []
    for group in range(groups) if view.shape[0] == groups else ():
        rows, columns = np.flatnonzero(keep_out[group]), np.flatnonzero(keep_in[group])
        if len(rows) and len(columns):
            part = view[group]
            if part.shape[0] == outputs > 1:
                part = part.index_select(0, torch.from_numpy(rows).to(view.device))
            if part.shape[1] == inputs > 1:
                part = part.index_select(1, torch.from_numpy(columns).to(view.device))
            parts.append(part)
    return torch.stack(parts).contiguous() if parts else view
