"""A check, before training, that a model returns logits and no probabilities, which the loss would take for logits."""

from __future__ import annotations

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

FEW = 32
"""Fewer outputs than this may all lie between 0 and 1 by chance."""


@torch.no_grad()
def check_logits(model: nn.Module, recipe: Recipe, data: Data, main: Tensor) -> list[str]:
    """Raises ModelError for outputs that add up to 1 over the classes; warnings where that is less sure: with a loss of the
    user's own, and for a binary task, if all outputs lie between 0 and 1.

    model: in `eval()`. main: its main output for the first few training examples.
    """
    likelihood = likelihood_for(data.task, data.dim)
    if not likelihood.probabilities or not main.is_floating_point():
        return []
    if not likelihood.classes:
        return _binary(model, recipe, data)
    if main.dim() < 2 or main.shape[data.dim] < 2:
        return []
    sums = main.float().sum(data.dim)
    if not (bool((main >= 0).all()) and bool(((sums - 1).abs() <= SUM).all())):
        return []
    line = f"{shown(recipe.model.name)} returns probabilities (no number below 0, and they add up to 1 over the classes)"
    if ":" in recipe.loss.name:
        return [f"{line}. Errors are right, but everything else here takes its outputs for logits: return those"]
    raise ModelError(
        f"model: {line}, but {recipe.loss.name} and the files take logits, the numbers before the softmax: leave out the last "
        "softmax"
    )


def _binary(model: nn.Module, recipe: Recipe, data: Data) -> list[str]:
    inputs, _ = next(iter(data.train.subset(torch.arange(min(FEW, len(data.train)))).batches(FEW)))
    found = main_output(call(model, inputs))
    if found.numel() < FEW or not bool(((found >= 0) & (found <= 1)).all()):
        return []
    return [
        f"all outputs of {shown(recipe.model.name)} for {len(found)} examples lie between 0 and 1, like probabilities. "
        f"{recipe.loss.name} and the files take logits, the numbers before the sigmoid: leave out the last sigmoid"
    ]
