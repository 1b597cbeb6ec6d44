"""A trial's masks: by thresholds that cost little on validation data, or for a size that is asked for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from svdcompress.layers import variational_layers
from svdcompress.likelihoods import score
from svdcompress.pipeline._begin import Dense, Opened
from svdcompress.pipeline._context import Context
from svdcompress.pipeline._measure import Measure
from svdcompress.prune import prune
from svdcompress.relevance import Masks
from svdcompress.selection import Selection, choose, limits_of, look_at, rule

LOWER = (3.0, 2.0, 1.0)
"""Thresholds that a trial looks at, where all layers have the usual one."""

STEPS = 24
"""Bisections of a threshold: beyond them, two thresholds differ by less than any two weights."""

LOWEST, HIGHEST = -12.0, 30.0


def masks_for(
    context: Context, opened: Opened, dense: Dense, model: nn.Module, measure: Measure, target: float | None, allowed: float
) -> Selection:
    """What stays of a cooled posterior.

    target: the size that `measure` is to have (None: what the model itself finds irrelevant). Without one, of the usual
    thresholds the sparsest is taken that loses, before recovery, at most half of `allowed` (in the units of the error) against
    the best of them.
    """
    recipe, inputs = context.recipe, opened.inputs
    settings = recipe.relevance
    if target is not None:
        return _of_size(context, opened, dense, model, measure, target)
    own = [layer.threshold[share] for _, layer in variational_layers(model) for share in layer.share]
    if settings.threshold is None and not settings.candidates and set(own) == {LOWER[0]}:
        judged = rule(model, settings, inputs)
        looked = [(limit, masks, look_at(model, masks, dense.trainer.validate)) for limit in LOWER for masks in [judged(limit)]]
        bound = min(score(metrics)[0] for _, _, metrics in looked) + 0.5 * min(allowed, 1e9)
        limit, masks, _ = min((one for one in looked if score(one[2])[0] <= bound + 1e-9), key=lambda one: one[1].kept)
        curve = [{"threshold": limit, **metrics, "nonzero": float(masks.kept)} for limit, masks, metrics in looked]
        return Selection(masks, limit, limits_of(model, limit), curve)
    return choose(model, recipe, dense.trainer.validate, inputs)


def _of_size(context: Context, opened: Opened, dense: Dense, model: nn.Module, measure: Measure, target: float) -> Selection:
    """Masks of which a size comes, by one threshold on all shares, from bisection."""
    judged = rule(model, context.recipe.relevance, opened.inputs)
    fixed = sum(p.numel() for p in model.parameters()) - 2 * _weights(model)

    def size(masks: Masks) -> float:
        if measure.name == "nonzero":
            return float(masks.kept + fixed)
        asked: dict[str, Any] = {
            name: getattr(context.recipe.prune, name) for name in ("remove_inputs", "protect", "time_budget")
        }
        return measure.of(small=prune(model, opened.inputs, masks=masks, **asked))["small"][measure.name]

    low, high = LOWEST, HIGHEST
    steps = STEPS if measure.name == "nonzero" else 8  # each prunes the model
    for _ in range(steps):
        middle = (low + high) / 2
        if size(judged(middle)) <= target:
            low = middle
        else:
            high = middle
    masks = judged(low)
    metrics = look_at(model, masks, dense.trainer.validate)
    curve = [{"threshold": low, **metrics, "nonzero": float(masks.kept + fixed)}]
    return replace(Selection(masks, low, limits_of(model, low), curve), target=target)


def _weights(model: nn.Module) -> int:
    return sum(layer.weight.numel() for _, layer in variational_layers(model))
