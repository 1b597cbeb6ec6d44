"""The dense model that a run begins with: made, loaded, and tried on the data."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from svdcompress.errors import ModelError
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
    """Raises ModelError if the model does not run on such inputs, DataError if it has fewer outputs than there are classes."""
    model.eval()
    try:
        with torch.no_grad():
            output = main_output(call(model, inputs))
    except Exception as error:  # whatever the user's model raises
        name = recipe.model.name
        reason = str(error).strip().partition("\n")[0]
        raise ModelError(f"model: {name} fails on inputs{_shapes(inputs)}: {type(error).__name__}: {reason}") from error
    if data.task == "classification" and output.dim() == 2:
        check_labels(data, output.shape[1])


def _shapes(inputs: Any) -> str:
    if isinstance(inputs, dict):
        return " " + ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in inputs.items())
    shapes = getattr(inputs, "shape", None)
    return f" of shape {tuple(shapes)}" if shapes is not None else ""
