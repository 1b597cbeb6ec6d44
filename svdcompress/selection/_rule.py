"""From a threshold to masks: each layer for itself, or the layers that share a unit together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from svdcompress.layers import Threshold, variational_layers
from svdcompress.recipe import RelevanceSection
from svdcompress.relevance import Masks, relevance
from svdcompress.selection._coupled import Coupling

Rule = Callable[[Threshold | None], Masks]
"""From a threshold (None: each layer's own) to a model's masks."""


def rule(model: nn.Module, settings: RelevanceSection, inputs: Any) -> Rule:
    """How a converted model's masks come from a threshold: in training's figures, in shrinking and in the last choice alike.

    Units are judged as one (see `coupled_relevance`) where the settings say so, and where they say auto if two or more layers
    read the same unit (or write it, where "output" has the larger part of the layers' shares) and one of them shares its
    relevance by that side. inputs: examples for one forward pass.
    """
    wanted = settings.coupled
    parts = {side: sum(layer.share.get(side, 0.0) for _, layer in variational_layers(model)) for side in ("input", "output")}
    if wanted is False or (wanted == "auto" and not any(parts.values())):
        return lambda threshold: relevance(model, threshold)
    side = max(parts, key=lambda name: parts[name])  # "input" where neither has more
    coupling = Coupling(model, inputs)
    if wanted == "auto" and not any(side in layer.share for layer in coupling.sharing(side)):
        return lambda threshold: relevance(model, threshold)
    return lambda threshold: coupling.relevance(threshold, side)
