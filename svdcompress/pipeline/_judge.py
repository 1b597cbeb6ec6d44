"""From a threshold to masks: each layer for itself, or the layers that share a unit together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from svdcompress.layers import variational_layers
from svdcompress.prune import Coupling
from svdcompress.recipe import Recipe
from svdcompress.relevance import Masks, relevance


def judge(model: nn.Module, recipe: Recipe, inputs: Any) -> Callable[[Any], Masks]:
    """How a converted model's masks come from a threshold, in choosing one and in shrinking alike.

    Units are judged as one (see `coupled_relevance`) where the recipe says so, and where it says auto if two or more layers
    read the same unit (or write it, where "output" has the larger part of the layers' shares) and one of them shares its
    relevance by that side. inputs: examples for one forward pass.
    """
    wanted = recipe.relevance.coupled
    parts = {side: sum(layer.share.get(side, 0.0) for _, layer in variational_layers(model)) for side in ("input", "output")}
    if wanted is False or (wanted == "auto" and not any(parts.values())):
        return lambda threshold: relevance(model, threshold)
    side = max(parts, key=lambda name: parts[name])  # "input" where neither has more
    coupling = Coupling(model, inputs)
    if wanted == "auto" and not any(side in layer.share for layer in coupling.sharing(side)):
        return lambda threshold: relevance(model, threshold)
    return lambda threshold: coupling.relevance(threshold, side)
