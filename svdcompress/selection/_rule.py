"""From a threshold to masks: each layer for itself, or the layers that share a unit together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from svdcompress.layers import Threshold, variational_layers
from svdcompress.prune import on_cpu
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
    return _judged(*_coupling(model, settings, inputs), model)


def _coupling(model: nn.Module, settings: RelevanceSection, inputs: Any) -> tuple[Coupling | None, str]:
    """What layers share, and by which side they are judged as one; None where each is judged for itself."""
    wanted = settings.coupled
    parts = {side: sum(layer.share.get(side, 0.0) for _, layer in variational_layers(model)) for side in ("input", "output")}
    side = max(parts, key=lambda name: parts[name])  # "input" where neither has more
    if wanted is False or (wanted == "auto" and not any(parts.values())):
        return None, side
    coupling = Coupling(model, inputs)
    if wanted == "auto" and not any(side in layer.share for layer in coupling.sharing(side)):
        return None, side
    return coupling, side


def _judged(coupling: Coupling | None, side: str, model: nn.Module) -> Rule:
    if coupling is None:
        return lambda threshold: relevance(model, threshold)
    on_model = coupling.of(model)
    return lambda threshold: on_model.relevance(threshold, side)


class WhileTraining:
    """The masks of a model on its way, as `rule` would have them: called with the model, on any device, after each epoch.

    Its graph is traced once, on the CPU, and again only where units were removed since.
    threshold, settings, inputs: as for `rule`.
    """

    def __init__(self, threshold: Threshold | None, settings: RelevanceSection, inputs: Any) -> None:
        self._threshold, self._settings, self._inputs = threshold, settings, inputs
        self._shapes: dict[str, Any] | None = None
        self._traced: tuple[Coupling | None, str] = None, "input"

    def __call__(self, model: nn.Module) -> Masks:
        shapes = {name: layer.weight.shape for name, layer in variational_layers(model)}
        if shapes != self._shapes:
            here = all(parameter.device.type == "cpu" for parameter in model.parameters())
            traced = model if here else on_cpu(model)
            self._traced, self._shapes = _coupling(traced, self._settings, self._inputs), shapes
        return _judged(*self._traced, model)(self._threshold)
