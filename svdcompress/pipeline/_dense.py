"""The dense model that a run begins with: made, loaded, and tried on the data."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from svdcompress.errors import ModelError, nearest
from svdcompress.pipeline._convert import planned
from svdcompress.pipeline._loss import check_loss
from svdcompress.recipe import Recipe
from svdcompress.sources import Data, arrives_trained, call, check_labels, load_weights, main_output, make_model
from svdcompress.train import seed_everything


def dense_model(recipe: Recipe) -> tuple[nn.Module, bool]:
    """The recipe's model with its weights, and whether they are trained already. Raises ModelError, CheckpointError."""
    seed_everything(recipe.seed, "model")
    model = make_model(recipe.model)
    weights = recipe.weights
    if weights.file:
        return load_weights(model, weights.file, weights.strip_prefix), True
    return model, weights.trained if weights.trained is not None else arrives_trained(recipe.model, model)


def check_model(model: nn.Module, recipe: Recipe, data: Data, inputs: Any) -> None:
    """Try what a run will need of its dense model, before anything is trained; it is in `eval()` then.

    inputs: the first few training examples. Raises ModelError if the model does not run on them, if its output does not fit
    the loss, or if a pattern of the recipe matches nothing in it; DataError if it has fewer outputs than there are classes;
    RecipeError for class weights of another number.
    """
    model.eval()
    try:
        with torch.no_grad():
            output = call(model, inputs)
        main = main_output(output)
    except Exception as error:  # whatever the user's model raises
        name = recipe.model.name
        reason = str(error).strip().partition("\n")[0]
        raise ModelError(f"model: {name} fails on inputs{_shapes(inputs)}: {type(error).__name__}: {reason}") from error
    if data.task == "classification" and main.dim() == 2:
        check_labels(data, main.shape[1])
    check_patterns(model, recipe, inputs)  # after a call: lazy layers have their shapes
    check_loss(model, recipe, data, inputs, output)


def check_patterns(model: nn.Module, recipe: Recipe, inputs: Any = None) -> None:
    """Raises ModelError, naming the field, for a pattern that matches no module, and where nothing would be converted.

    inputs: the first few training examples, of a model that runs on them.
    """
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    settings = recipe.convert
    fields = {"convert.include": settings.include, "convert.exclude": settings.exclude, "prune.protect": recipe.prune.protect}
    rules = {f"convert.layers.{index}.match": rule.patterns for index, rule in enumerate(settings.layers)}
    for field, patterns in {**fields, **rules}.items():
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                close = nearest(pattern, names)
                hint = f"did you mean {close}?" if close else f"there are {', '.join([n for n in names if n][:12])} ..."
                raise ModelError(f"{field}: {pattern!r} matches no module of {type(model).__name__}; {hint}")
    for field, patterns in rules.items():
        entries = planned(model, recipe, inputs, patterns)
        if not any(entry.converted for entry in entries):
            left = [f"{e.name}: {e.reason}" for e in entries if any(fnmatchcase(e.name, pattern) for pattern in patterns)]
            why = "; ".join(left[:4]) or "it has no weights"
            raise ModelError(f"{field}: no layer that {', '.join(patterns)} matches is converted ({why})")
    entries = planned(model, recipe, inputs)
    if not rules and not any(entry.converted or entry.reason == "already converted" for entry in entries):
        reasons = "; ".join(f"{entry.name}: {entry.reason}" for entry in entries[:8]) or "it has no layers"
        raise ModelError(f"convert: nothing to convert in {type(model).__name__} ({reasons})")


def _shapes(inputs: Any) -> str:
    if isinstance(inputs, dict):
        return " " + ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in inputs.items())
    shapes = getattr(inputs, "shape", None)
    return f" of shape {tuple(shapes)}" if shapes is not None else ""
