"""A check, before training, that a model returns logits and no probabilities, which the loss would take for logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from svdcompress.batch import call, main_output
from svdcompress.errors import ModelError
from svdcompress.likelihoods import likelihood_for
from svdcompress.recipe import Recipe
from svdcompress.sources import Data
from svdcompress.sources.given import shown

SUM = 1e-3
"""How far the probabilities of an example may be from a sum of 1."""

SHAPES = ("View", "Reshape", "Squeeze", "Unsqueeze", "Select", "Slice", "Alias", "Permute", "Transpose", "T")
"""Operations, by the beginning of their names, that may follow a sigmoid without changing its numbers."""


def check_logits(model: nn.Module, recipe: Recipe, data: Data, inputs: Any, main: Tensor) -> list[str]:
    """Raises ModelError for outputs that add up to 1 over the classes or, for a binary task, that a sigmoid made; a warning
    where the loss is the user's own.

    model: in `eval()`. inputs: the first few training examples. main: the model's main output for them.
    """
    likelihood = likelihood_for(data.task, data.dim)
    if not likelihood.probabilities or not main.is_floating_point():
        return []
    if not (_sums_to_one(main, data.dim) if likelihood.classes else _by_sigmoid(model, inputs)):
        return []
    last = "softmax" if likelihood.classes else "sigmoid"
    why = "no number is below 0, and they add up to 1 over the classes" if likelihood.classes else "they come from a sigmoid"
    line = f"{shown(recipe.model.name)} returns probabilities ({why})"
    if ":" in recipe.loss.name:
        return [f"{line}, but everything except your loss takes its outputs for logits: let the model return those"]
    raise ModelError(
        f"model: {line}, but {recipe.loss.name} and the files take logits, the numbers before the {last}: leave out the last "
        f"{last}"
    )


def _sums_to_one(main: Tensor, dim: int) -> bool:
    if main.dim() < 2 or main.shape[dim] < 2:
        return False
    return bool((main >= 0).all()) and bool(((main.float().sum(dim) - 1).abs() <= SUM).all())


def _by_sigmoid(model: nn.Module, inputs: Any) -> bool:
    """Whether a sigmoid is the last operation of a model; False if it tracks no gradients. Numbers cannot tell: logits of an
    untrained model may all lie between 0 and 1."""
    try:
        with torch.enable_grad():
            node = main_output(call(model, inputs)).grad_fn
    except RuntimeError:  # a forward that changes weights in place, say
        return False
    while node is not None and node.name().startswith(SHAPES) and node.next_functions:
        node = node.next_functions[0][0]
    return node is not None and node.name().startswith("Sigmoid")
