"""A trial's masks, for the size that is asked for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from svdcompress.pipeline._begin import Dense, Opened
from svdcompress.pipeline._context import Context
from svdcompress.pipeline._measure import Measure
from svdcompress.pipeline._select import whole
from svdcompress.prune import count_means, prune
from svdcompress.relevance import Masks
from svdcompress.selection import Ranking, Rule, Selection, limits_of, look_at, rule, whole_units

STEPS = 24
"""Bisections of a threshold: beyond them, two thresholds differ by less than any two weights."""

LOWEST, HIGHEST = -12.0, 30.0

FOLLOWS = {"nonzero": "nonzero", "parameters": "parameters", "bytes": "parameters", "macs": "macs", "latency": "macs"}
"""By what a size is known without a file."""


def masks_for(context: Context, opened: Opened, dense: Dense, model: nn.Module, measure: Measure, target: float) -> Selection:
    """Masks of a cooled posterior of which a size comes: single weights go by one threshold on all shares, units by their rank.

    Where the size follows the shapes alone, no single weight of a unit that stays is masked. target: the size that `measure` is
    to have. See `Ranking` for the rank.
    """
    own = rule(model, context.recipe.relevance, opened.inputs)
    asked = context.recipe.relevance.threshold
    found = own(asked)
    others = count_means(model) - found.total
    if measure.name == "nonzero":
        natural = float(found.kept + others)
        asked, masks = _threshold_for(own, target - others)
    else:
        masks, natural = _units_for(context, opened, dense, model, found, measure, target)
        if measure.name != "bytes":  # a weight between units that stay costs nothing, and may help
            masks = whole_units(model, masks)
    metrics = look_at(model, masks, dense.trainer.validate)
    curve = [{"threshold": asked, **metrics, "nonzero": float(masks.kept + others)}] if isinstance(asked, float) else []
    return replace(Selection(masks, asked, limits_of(model, asked), curve), target=target, natural=natural)


def _threshold_for(masks_at: Rule, kept: float) -> tuple[float, Masks]:
    """The highest threshold that keeps at most so many weights."""
    low, high = LOWEST, HIGHEST
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if masks_at(middle).kept <= kept else (low, middle)
    return low, masks_at(low)


def _units_for(
    context: Context, opened: Opened, dense: Dense, model: nn.Module, masks: Masks, measure: Measure, target: float
) -> tuple[Masks, float]:
    """Masks with further units dead, and what the model would have had without. Bytes and latency follow parameters and
    multiply-accumulates, and are corrected once."""
    settings = context.recipe.prune
    asked: dict[str, Any] = {name: getattr(settings, name) for name in ("remove_inputs", "protect", "round_to")}
    ranking = Ranking(model, opened.inputs, masks, **asked)
    follows = FOLLOWS[measure.name]
    natural = float(getattr(ranking.at({follows: 1.0}), follows))
    if measure.name == follows:
        return ranking.at({follows: max(target, 1.5)}).masks, natural  # up to 1 it would be a share

    def cost_of(chosen: Masks) -> dict[str, float]:
        small: Any = prune(model, opened.inputs, masks=chosen, time_budget=settings.time_budget, **asked)
        return measure.of_small(whole(small, small.pruning.to_dict()).eval(), dense.model, alone=True)

    now = cost_of(masks)
    count = now[follows]
    for _ in range(2):
        if now[measure.name] <= target:
            break
        count = max(count * target / now[measure.name], 1.5)
        masks = ranking.at({follows: count}).masks
        now = cost_of(masks)
    return masks, natural
