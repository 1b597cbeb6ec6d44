"""The choice of a threshold: the one in the recipe, or the sparsest candidate that keeps the validation error."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from svdcompress.batch import call, main_output
from svdcompress.errors import PruneError
from svdcompress.layers import Threshold, variational_layers
from svdcompress.likelihoods import likelihood_for, score
from svdcompress.prune import count_means
from svdcompress.recipe import Recipe
from svdcompress.relevance import Masks, hold, relevance
from svdcompress.selection._rule import rule
from svdcompress.sources import Examples, fitting

CURVE = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0)
"""Thresholds for which the validation error is plotted."""

CONSTANT_BATCH = 256
"""The number of examples whose outputs are compared to see whether a model still distinguishes inputs; fewer if they
are large."""

Validate = Callable[[nn.Module], dict[str, float]]


@dataclass(frozen=True)
class Selection:
    """What stays, and by which limits.

    masks: which weights stay. asked: the threshold that they come from (None: each layer's own). target: in a search, the
    size that they were chosen for; natural: the size that the model has by the threshold alone; else None. way: how a search
    arrived at the masks, JSON-able, so that they can be made again; else None. limits: the limits on log alpha that were
    used, by layer and share. curve: [{threshold, error | rmse, nll, nonzero}] on validation data.
    """

    masks: Masks
    asked: Threshold | None
    limits: dict[str, dict[str, float]]
    curve: list[dict[str, float]]
    target: float | None = None
    natural: float | None = None
    way: dict[str, Any] | None = None

    @property
    def threshold(self) -> float | dict[str, Any]:
        """The limits as in a report: one number if all are equal, else by share if all layers agree, else by layer."""
        by_layer = {name: _shortest(limits) for name, limits in self.limits.items()}
        alike = list(by_layer.values())
        return alike[0] if alike and all(limit == alike[0] for limit in alike) else by_layer

    def __repr__(self) -> str:
        return f"Selection({self.masks!r}, threshold={self.threshold})"


def _shortest(limits: dict[str, float]) -> float | dict[str, float]:
    values = set(limits.values())
    return values.pop() if len(values) == 1 else limits


def choose(model: nn.Module, recipe: Recipe, validate: Validate, inputs: Any = None) -> Selection:
    """What stays of a converted model by the recipe's section `relevance`, with the curve over other thresholds.

    With candidates, the threshold is the one with the sparsest model whose validation error is within the tolerance of the
    best candidate's. validate: returns the metrics of a model with frozen masks. inputs: examples to trace the model with,
    which shows the units that layers share, where these are judged as one (`relevance.coupled`).
    """
    settings = recipe.relevance
    judged = rule(model, settings, inputs)
    others = count_means(model) - relevance(model, 3.0).total
    tried: dict[str, tuple[Any, Masks, dict[str, float]]] = {}

    def look(threshold: Any) -> tuple[Any, Masks, dict[str, float]]:
        key = str(threshold)
        if key not in tried:
            masks = judged(threshold)
            tried[key] = threshold, masks, look_at(model, masks, validate)
        return tried[key]

    if settings.candidates:
        results = [look(threshold) for threshold in settings.candidates]
        best = min(score(metrics)[0] for _, _, metrics in results)
        allowed = best + settings.tolerance * (1 if likelihood_for(recipe.task).probabilities else best / 100)
        fitting = [result for result in results if score(result[2])[0] <= allowed + 1e-9]
        threshold, masks, _ = min(fitting, key=lambda result: (result[1].kept, score(result[2])))
    else:
        threshold, masks = settings.threshold, judged(settings.threshold)
    points = sorted({*CURVE, *(t for t in [*settings.candidates, threshold] if isinstance(t, float))})
    curve = [{"threshold": t, **look(t)[2], "nonzero": look(t)[1].kept + others} for t in points]
    return Selection(masks, threshold, limits_of(model, threshold), curve)


def look_at(model: nn.Module, masks: Mapping[str, Any], validate: Validate) -> dict[str, float]:
    """Metrics of a model with these masks frozen; the masks that it held before are restored."""
    with _held(model, masks):
        return validate(model)


@contextmanager
def _held(model: nn.Module, masks: Mapping[str, Any]) -> Iterator[None]:
    before = [(layer, layer.mask) for _, layer in variational_layers(model)]
    hold(model, masks)
    try:
        yield
    finally:
        for layer, mask in before:
            layer.mask = mask


def limits_of(model: nn.Module, threshold: Threshold | None) -> dict[str, dict[str, float]]:
    """The limit on log alpha for each share of each layer, by layer and share."""
    return {name: {share: layer.limits(threshold)[share] for share in layer.share} for name, layer in variational_layers(model)}


@torch.no_grad()
def check_some_left(model: nn.Module, masks: Masks, examples: Examples) -> None:
    """Raises PruneError, saying what to try, for masks that leave a model with one and the same answer to all inputs.

    A layer without any weights is no error where the signal bypasses it, as in a residual branch.
    """
    empty = [layer.name for layer in masks.layers if not layer.kept]
    if not empty:
        return
    inputs, _ = next(iter(examples.batches(max(2, fitting(model, examples, CONSTANT_BATCH)))))
    with _held(model, masks):
        output = main_output(call(model, inputs))
    if len(output) > 1 and bool((output - output[:1]).abs().max() <= 1e-6 * output.abs().max()):
        names = ", ".join(repr(name) for name in empty[:4]) + (" ..." if len(empty) > 4 else "")
        raise PruneError(
            f"nothing is left of layer {names}: the model gives the same answer to all inputs. The trained model is "
            "kept: continue with --resume --out FOLDER and a higher --set relevance.threshold=..., or start again with a lower "
            "train.beta.final, or more train.epochs"
        )
