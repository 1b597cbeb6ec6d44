"""Units that no search can take, as the model fails without them whatever its graph says: found before any is masked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from svdcompress.errors import PruneError
from svdcompress.pipeline._context import Context
from svdcompress.prune import prune
from svdcompress.relevance import Masks
from svdcompress.selection import Ranking, whole_units

FAILS = ("left masked: without it the model fails", "left masked: the output would change")
"""How pruning tells of a group that it has had to put back."""

LEAST, HALF = (1e-9, 0.0), (0.5, 1.0)
"""Shares of the parameters, and the evenness, that are tried: what fails with one unit left may do with half of them."""


def protecting(
    context: Context, model: nn.Module, inputs: Any, masks: Masks, pruning: Mapping[str, Any], time_budget: float
) -> dict[str, Any]:
    """The arguments of `prune`, with what it would put back protected; that is looked for once in a run, and told."""
    stays = context.state.facts.get("stays")  # also in one that goes on
    if stays is None:
        stays = that_stay(model, inputs, masks, pruning, time_budget)
        context.state.put(stays=stays)
        for name, why in stays.items():
            context.note(f"{name}: no search takes its units, as pruning could not remove them ({why})")
    return {**pruning, "protect": [*pruning["protect"], *stays]}


def that_stay(model: nn.Module, inputs: Any, masks: Masks, pruning: Mapping[str, Any], time_budget: float) -> dict[str, str]:
    """{layer: why its units stay}, of those that a ranking would take and pruning would put back.

    A reshape with numbers of its own, as of heads that are not counted by the tensor, fails when a model runs, and its units
    would be masked without making anything smaller. model: on the CPU; masks: of what lives; pruning: arguments of `prune`.
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
    except PruneError:  # which the search meets and tells of
        return {}
    return {group.name: group.reason for group in small.pruning.groups if group.reason.startswith(FAILS)}
