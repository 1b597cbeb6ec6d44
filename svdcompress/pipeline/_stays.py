"""Units that no search can remove because the model fails without them, whatever its graph says: found before any is masked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from svdcompress.errors import PruneError
from svdcompress.pipeline._context import Context
from svdcompress.prune import PUT_BACK, prune
from svdcompress.relevance import Masks
from svdcompress.selection import Ranking, whole_units

LEAST, HALF = (1e-9, 0.0), (0.5, 1.0)
"""Pairs of a share of the parameters and an evenness that are tried: a model that fails with one unit left may work with half
of them."""


def protecting(
    context: Context, model: nn.Module, inputs: Any, masks: Masks, pruning: Mapping[str, Any], time_budget: float
) -> dict[str, Any]:
    """The arguments `pruning`, with layers protected whose units `prune` would put back: found once per run, and noted."""
    stays = context.state.facts.get("stays")  # also in a resumed run
    if stays is None:
        stays = that_stay(model, inputs, masks, pruning, time_budget)
        context.state.put(stays=stays)
        for name, why in stays.items():
            context.note(f"{name}: a search leaves its units, as pruning could not remove them ({why})")
    return {**pruning, "protect": [*pruning["protect"], *stays]}


def that_stay(model: nn.Module, inputs: Any, masks: Masks, pruning: Mapping[str, Any], time_budget: float) -> dict[str, str]:
    """{layer: why its units stay}, for units that a ranking would remove and pruning would put back.

    A reshape to hard-coded sizes, such as a fixed number of heads, fails when the pruned model runs, so masking its units
    would not make anything smaller. model: on the CPU; masks: of what lives; pruning: arguments of `prune`.
    """
    ranking = Ranking(model, inputs, masks, **pruning)
    found = _failing(ranking, model, inputs, LEAST, pruning, time_budget)
    if not found:
        return {}
    again = _failing(ranking, model, inputs, HALF, pruning, time_budget)
    modules = dict(model.named_modules())
    return {name: why for name, why in found.items() if name in again and name in modules}


def _failing(
    ranking: Ranking, model: nn.Module, inputs: Any, to: tuple[float, float], pruning: Mapping[str, Any], time_budget: float
) -> dict[str, str]:
    share, evenness = to
    chosen = whole_units(model, ranking.at({"parameters": share}, evenness=evenness).masks)
    try:
        small: Any = prune(model, inputs, masks=chosen, time_budget=time_budget, **pruning)
    except PruneError:  # the search will run into it and report it
        return {}
    return {group.name: group.reason for group in small.pruning.groups if group.reason.startswith(PUT_BACK)}
