"""Relevance of coupled units: units that layers share (a residual stream, a gated product, a head) go or stay as a whole."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from svdcompress.batch import unwrapped
from svdcompress.errors import UsageError
from svdcompress.layers import Threshold, VariationalLayer, variational_layers
from svdcompress.prune import Analysis, Consumer, analyse, holders, oriented
from svdcompress.relevance import Masks, as_masks, relevance

EPS = 1e-8
"""Added to the sum of squares, as in the log alpha of a prior group, so that a unit whose weights are all 0 is irrelevant."""


def coupled_relevance(
    model: nn.Module, example_inputs: Any, *, threshold: Threshold | None = None, side: str = "input"
) -> Masks:
    """Masks in which each unit stays or goes in all layers that share it.

    A unit is judged as one prior group of all weights that read it (side "input") or write it ("output"), whatever layers
    they are in: it is irrelevant if `log(sum sigma2) - log(sum mu^2)` is at or above the limit of that share. Within units
    that stay, each layer still drops what its other shares ("weight", the other side, "layer") find irrelevant. Units that
    cannot go (see `groups`), or that a layer without variances reads, are judged by each layer on its own, as by `relevance`.

    example_inputs: as for `prune`. threshold: as for `relevance`; without one, layers that hold a mask keep it.
    Raises UsageError for another side or a model without variational layers, and whatever `prune` raises.

    Example:
        >>> masks = svdc.coupled_relevance(svdc.convert(model, share="input"), x, threshold=3.0)
    """
    _check(side)
    relevance(model, threshold)  # raises for a model without variational layers, before it is traced
    return Coupling(model, example_inputs).relevance(threshold, side)


class Coupling:
    """Which units the layers of a model share, traced once; `relevance` is `coupled_relevance` at any threshold.

    model, example_inputs: as for `coupled_relevance`; the model keeps its architecture, its weights may change.
    """

    def __init__(self, model: nn.Module, example_inputs: Any) -> None:
        self.model, self._analysis = unwrapped(model), analyse(model, example_inputs)

    def of(self, model: nn.Module) -> Coupling:
        """The same coupling for another model with this architecture, or for this one on another device."""
        other = copy.copy(self)
        other.model = unwrapped(model)
        return other

    def relevance(self, threshold: Threshold | None = None, side: str = "input") -> Masks:
        """The masks; arguments and errors as for `coupled_relevance`."""
        _check(side)
        model, analysis = self.model, self._analysis
        masks = {name: mask.clone() for name, mask in relevance(model, threshold).items()}
        if analysis is None:
            return as_masks(model, masks)
        own = {id(layer): masks[name] for name, layer in variational_layers(model)}
        scores, limit = _scores(model, analysis, side, threshold)
        for consumer in analysis.consumers:
            for module, key in holders(model, consumer.parameter):
                if not isinstance(module, VariationalLayer) or key != "weight":
                    continue
                if threshold is not None or module.mask is None:  # a mask that is held decides, as in `relevance`
                    _decide(consumer, module, own[id(module)], analysis, scores, limit, side, threshold)
        return as_masks(model, masks)

    def sharing(self, side: str = "input") -> list[VariationalLayer]:
        """The layers that share, on this side, a unit that is judged as one with another layer."""
        _check(side)
        if self._analysis is None:
            return []
        root = self._analysis.root
        judged = ~np.isnan(_scores(self.model, self._analysis, side, None)[0])
        used: dict[int, set[int]] = {}  # a weight that is used several times counts once
        for consumer in self._analysis.consumers:
            used.setdefault(id(consumer.parameter), set()).update(root[_slots(consumer, side)].flat)
        count = np.zeros(self._analysis.count, int)
        for roots in used.values():
            count[list(roots)] += 1
        shared = judged & (count > 1)
        return [
            module
            for consumer in self._analysis.consumers
            if shared[root[_slots(consumer, side)]].any()
            for module, key in holders(self.model, consumer.parameter)
            if isinstance(module, VariationalLayer) and key == "weight"
        ]


def _check(side: str) -> None:
    if side not in ("input", "output"):
        raise UsageError(f"side: {side!r} is neither 'input' nor 'output'")


def _slots(consumer: Consumer, side: str) -> np.ndarray:
    return consumer.ins if side == "input" else consumer.outs


def _scores(model: nn.Module, analysis: Analysis, side: str, threshold: Threshold | None) -> tuple[np.ndarray, np.ndarray]:
    """Log alpha of each unit (NaN where it is not judged as one) and its limit, by root."""
    variance, square = np.zeros(analysis.count), np.zeros(analysis.count)
    limit = np.full(analysis.count, np.inf)
    judged = analysis.free.copy()
    for consumer in analysis.consumers:
        roots = analysis.root[_slots(consumer, side)]
        modules = [m for m, key in holders(model, consumer.parameter) if isinstance(m, VariationalLayer) and key == "weight"]
        if not modules:
            judged[roots] = False
            continue
        layer = modules[0]
        mask = 1 if layer.mask is None else oriented(consumer, layer.mask)
        dims = (1, 3) if side == "input" else (2, 3)
        with torch.no_grad():
            squares = (oriented(consumer, layer.weight).double().square() * mask).sum(dims)
            variances = (oriented(consumer, layer.log_sigma2).double().exp() * mask).sum(dims)
        np.add.at(variance, roots, variances.cpu().numpy())
        np.add.at(square, roots, squares.cpu().numpy())
        np.minimum.at(limit, roots, layer.limits(threshold)[side])
    with np.errstate(divide="ignore"):
        scores = np.log(variance) - np.log(square + EPS)
    scores[~judged] = np.nan
    return scores, limit


def _decide(
    consumer: Consumer,
    layer: VariationalLayer,
    mask: Tensor,
    analysis: Analysis,
    scores: np.ndarray,
    limit: np.ndarray,
    side: str,
    threshold: Threshold | None,
) -> None:
    """Apply the decisions on units to a layer's mask, in place."""
    roots = analysis.root[_slots(consumer, side)]
    judged = ~np.isnan(scores[roots])
    if not judged.any():
        return
    relevant = torch.from_numpy(scores[roots] < limit[roots])
    alone = layer.relevant(threshold, ignoring=side)  # what its other shares drop stays dropped
    shape = (slice(None), None, slice(None), None) if side == "input" else (slice(None), slice(None), None, None)
    decided = oriented(consumer, alone) & relevant[shape].to(mask.device)
    view = oriented(consumer, mask)
    view.copy_(torch.where(torch.from_numpy(judged)[shape].to(mask.device), decided, view))
