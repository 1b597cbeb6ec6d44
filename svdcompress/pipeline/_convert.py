"""Turns a recipe's settings into converted models, schedules of beta, and the masks that training uses."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import nn

from svdcompress.batch import call
from svdcompress.convert import PlanEntry, convert, convert_dropout, leave_fused_paths, plan
from svdcompress.errors import RecipeError
from svdcompress.layers import (
    DROPOUT_CLASSES,
    Threshold,
    VariationalLayer,
    parse_threshold,
    variance_parameters,
    variational_layers,
)
from svdcompress.objective import SCHEDULES, Schedule
from svdcompress.recipe import BetaSchedule, ConvertSection, LayerRule, Recipe, in_epochs
from svdcompress.relevance import Masks
from svdcompress.selection import WhileTraining, rule
from svdcompress.train import shrink


def converted(model: nn.Module, recipe: Recipe, inputs: Any = None) -> nn.Module:
    """Convert a model in place as the recipe says: first the layers that rules match, then the rest.

    inputs: examples for one forward pass, which finds layers whose weight is read without calling them (see `convert`).
    """
    settings = recipe.convert
    base = {name: getattr(settings, name) for name in ("prior", "posterior", "share", "threshold")}
    for_all: dict[str, Any] = {name: getattr(settings, name) for name in ("exclude", "variance_dtype", "derived")}
    for_all["example_inputs"] = inputs
    for_all["filter_fn"] = lambda module, name: not isinstance(module, VariationalLayer)  # the first rule that matches counts
    for own_rule in settings.layers:
        own = {name: getattr(own_rule, name) if getattr(own_rule, name) is not None else value for name, value in base.items()}
        convert(model, include=own_rule.patterns, **own, **_start(own_rule, settings), **for_all)
    convert(model, include=settings.include, **base, **_start(settings), **for_all)
    return convert_dropout(model) if settings.dropout == "draw" else model


def _start(*nearest_first: LayerRule | ConvertSection) -> dict[str, float]:
    """Where log variances start: from the first settings that say so. If they set both, log alpha counts."""
    for settings in nearest_first:
        for name in ("log_alpha", "log_sigma2"):
            if (start := getattr(settings, name)) is not None:
                return {name: start}
    return {}


def check_dropout(model: nn.Module, recipe: Recipe, inputs: Any) -> list[str]:
    """Notes about a model's own dropout that is to draw: layers that a forward pass never reaches.

    inputs: a few examples. Raises RecipeError if none of it would draw, or if a layer has rate 1.
    """
    if recipe.convert.dropout == "keep":
        return []
    model = copy.deepcopy(model).eval()
    leave_fused_paths(model)  # as conversion will do
    found = [(name, layer) for name, layer in model.named_modules() if type(layer) in DROPOUT_CLASSES]
    layers = [(name, layer) for name, layer in found if getattr(layer, "p", 0)]
    if total := next((name for name, layer in layers if getattr(layer, "p", 0) >= 1), None):
        raise RecipeError(
            f"convert.dropout: draw: dropout layer {total!r} has rate 1, which leaves nothing. Use convert.dropout: keep"
        )
    reached: set[str] = set()
    for name, layer in layers:
        layer.register_forward_hook(lambda *given, name=name: reached.add(name))
    with torch.no_grad():
        call(model, inputs)
    if not reached:
        why = f"calls none of its {len(layers)} dropout layers" if layers else "has no dropout layer with a rate above 0"
        raise RecipeError(
            f"convert.dropout: draw: {type(model).__name__} {why} (torch.nn.Dropout, Dropout1d, Dropout2d or Dropout3d; "
            "functions such as F.dropout and attention with built-in dropout cannot draw outside of training). Use "
            "convert.dropout: keep"
        )
    idle = [name for name, _ in layers if name not in reached]
    if not idle:
        return []
    some = ", ".join(idle[:3]) + (" ..." if len(idle) > 3 else "")
    return [f"convert.dropout: {len(idle)} dropout layers are never called (attention may have its own dropout): {some}"]


def planned(model: nn.Module, recipe: Recipe, inputs: Any = None, include: list[str] | None = None) -> list[PlanEntry]:
    """What `converted` would do with each layer of a dense model; include: patterns in place of the recipe's."""
    settings = recipe.convert
    patterns = settings.include if include is None else include
    return plan(model, patterns, settings.exclude, derived=settings.derived, example_inputs=inputs)


LARGE = 5_000_000
"""The number of parameters at which a model counts as large: pretrained ResNets and transformers, not small MNIST nets."""

LARGE_BETA = 0.1
"""The largest beta that "auto" takes for a large model (ResNet-50 on ImageNet: 73.8% top-1 at 0.1, 67% at 1)."""

PUSH = 10.0
"""The beta * weights / N that "auto" aims at, close to settings that worked: digits 11, LeNet-300-100 on MNIST 22 to 43."""


def final_beta(recipe: Recipe, model: nn.Module, examples: int, inputs: Any = None) -> float:
    """The beta that training ends with, as a number even if the recipe says auto. model: dense or converted. examples: N.

    inputs: as for `converted`.
    """
    final = recipe.train.beta.final
    if final != "auto":
        return final
    weights, total = sizes(recipe, model, inputs)
    return min(LARGE_BETA if total >= LARGE else 1.0, float(f"{PUSH * examples / max(weights, 1):.2g}"))


def sizes(recipe: Recipe, model: nn.Module, inputs: Any = None) -> tuple[int, int]:
    """The number of weights to be converted, and of parameters of the dense model; inputs: as for `converted`."""
    entries = planned(model, recipe, inputs)
    already = sum(layer.weight.numel() for _, layer in variational_layers(model))  # converted by the model's author
    variances = sum(own.numel() for own in variance_parameters(model))
    return sum(e.parameters for e in entries if e.converted) + already, sum(p.numel() for p in model.parameters()) - variances


def make_schedule(beta: BetaSchedule, epochs: int, final: float) -> Schedule:
    """The schedule that a recipe names, in epochs, up to `final` (see `final_beta`)."""
    return SCHEDULES[beta.name](beta, epochs, final)


def mildest(recipe: Recipe) -> Threshold | None:
    """The threshold that keeps the most, share by share, of those that a recipe may choose; None: each layer's own.

    Where one of them names no limit for a share, the highest limit of any layer is used.
    """
    candidates = [] if recipe.search.wanted else recipe.relevance.candidates  # a search does not choose among them
    wanted = candidates or [recipe.relevance.threshold]
    settings = recipe.convert
    owns = [parse_threshold(one.threshold) for one in (settings, *settings.layers) if one.threshold is not None]
    own = {name: max(limit[name] for limit in owns) for name in owns[0]}
    limits = [parse_threshold(limit, own) for limit in wanted if limit is not None]
    return {name: max(limit[name] for limit in limits) for name in limits[0]} if limits else None


def while_training(recipe: Recipe, inputs: Any) -> WhileTraining:
    """The masks that the history's sparsity is counted from: by the threshold and the coupling that choose in the end (of
    several candidates the mildest, so that no fewer weights will go). inputs: examples for one forward pass."""
    return WhileTraining(mildest(recipe), recipe.relevance, inputs)


def shrinking(recipe: Recipe, inputs: Any) -> dict[str, Any]:
    """The arguments of `fit` that remove dead units during training, but none that the final pruning would keep.

    inputs: examples for one forward pass.
    """
    if recipe.train.shrink is None:
        return {}

    def masks(model: nn.Module) -> Masks:
        return rule(model, recipe.relevance, inputs)(mildest(recipe))

    settings = recipe.prune
    options = {"round_to": settings.round_to, "protect": settings.protect, "time_budget": settings.time_budget}
    return {
        "shrink_from": in_epochs(recipe.train.shrink, recipe.train.epochs),
        "shrink": partial(shrink, inputs=inputs, masks=masks, **options),
    }
