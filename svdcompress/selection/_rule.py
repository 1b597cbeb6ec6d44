"""From a threshold to masks: for each layer on its own, or for all layers that share a unit together."""

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
"""Maps a threshold (None: each layer's own) to a model's masks."""


def rule(model: nn.Module, settings: RelevanceSection, inputs: Any) -> Rule:
    """How thresholds become masks of a converted model: the same rule for training metrics, shrinking and the final choice.

    Units are judged as one (see `coupled_relevance`) where the settings say so. With "auto" they are if two or more layers
    read the same unit (or write it, where "output" has the larger part of the layers' shares) and one of them has a share of
    that side. inputs: examples for one forward pass.
    """
    return _judged(*_coupling(model, settings, inputs), model)


def _coupling(model: nn.Module, settings: RelevanceSection, inputs: Any) -> tuple[Coupling | None, str]:
    """The coupling of the layers (None: each is judged on its own), and the side by which shared units are judged."""
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
    """The masks of a model in training, as `rule` makes them; called with the model, on any device, after each epoch.

    The graph is traced once, on the CPU, and again only after units were removed. settings, inputs: as for `rule`; threshold:
    the one that its result is called with.
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
