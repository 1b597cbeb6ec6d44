"""A run's loss for its model and data: class weights, and a check before any training."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from svdcompress.batch import call, main_output, other_outputs
from svdcompress.errors import ModelError, RecipeError, SvdcError
from svdcompress.likelihoods import PAIR_ADVICE, HeadsError, is_pair, likelihood_for, make_loss
from svdcompress.objective import sums
from svdcompress.recipe import LossSection, Recipe
from svdcompress.sources import IGNORED, Data, batch_length, fitting
from svdcompress.sources.given import shown
from svdcompress.train import evaluate

BATCH = 100
"""Examples read at once if all of them must be read to count their labels."""

TAKES = {
    "cross-entropy": "one output for each class (for positions: (N, classes, ...) or (N, ..., classes))",
    "binary": "one output, a logit, for each target",
    "mse": "one output for each target",
    "gaussian-nll": "two outputs for each target, its mean and its log variance",
}


@torch.no_grad()
def class_weights(section: LossSection, data: Data, model: nn.Module, inputs: Any) -> Tensor | None:
    """Class weights, (classes,), or (1,) for the positive class of a binary loss; None if the recipe has none.

    "balanced": all classes that occur have the same total weight in the training data; these are read once if they are not in
    memory. model: in `eval()`, on the device of `inputs`, a few examples that show how many classes it has.
    """
    wanted = section.class_weights
    if wanted is None or isinstance(wanted, list):
        return None if wanted is None else torch.tensor(wanted)
    targets = _targets(data.train).long().flatten()
    if not likelihood_for(data.task).classes:
        counts = torch.bincount(targets, minlength=2).float().clamp_min(1)
        return counts[:1] / counts[1:2]
    classes = main_output(call(model, inputs)).shape[data.dim]
    counts = torch.bincount(targets[targets != IGNORED], minlength=classes).float()
    seen = counts > 0
    return torch.where(seen, counts.sum() / (seen.sum() * counts.clamp_min(1)), 1.0)


def _targets(examples: Any) -> Tensor:
    held = getattr(examples, "targets", None)
    return held if held is not None else torch.cat([targets for _, targets in examples.batches(fitting(None, examples, BATCH))])


@torch.no_grad()
def check_loss(model: nn.Module, recipe: Recipe, data: Data, targets: Tensor, output: Any) -> float:
    """Compute the loss and the metrics of a few examples once; returns the loss.

    model: in `eval()`. targets: of the first training examples. output: the model's for them. Raises ModelError, naming the
    loss and the shapes, if they do not fit, or if the loss is not one average over the batch; RecipeError for a wrong number
    of class weights.
    """
    section = recipe.loss
    weights = section.class_weights
    likelihood = likelihood_for(data.task, data.dim)
    if likelihood.classes and main_output(output).dim() < 2:
        raise ModelError(
            f"loss.name: {section.name} does not fit the output of {shown(recipe.model.name)}: an output of shape "
            f"{_shape(output)} has no dimension of classes, and {no_classes(section.name)}"
        )
    classes = main_output(output).shape[data.dim] if likelihood.classes else 0
    if isinstance(weights, list) and likelihood.classes and len(weights) != classes:
        raise RecipeError(
            f"loss.class_weights: {len(weights)} weights, but the model has {classes} outputs, one for each class"
        )
    loss = make_loss(section, class_weights=torch.tensor(weights) if isinstance(weights, list) else None, dim=data.dim)
    few = data.train.subset(torch.arange(len(targets)))
    try:
        value = loss(output, targets)
        if bool(likelihood.counts(targets).any()):
            evaluate(model, few, likelihood)
    except Exception as error:  # whatever torch raises for the shapes or in the user's loss
        if isinstance(error, SvdcError) and not isinstance(error, HeadsError):
            raise
        reason = str(error).strip().partition("\n")[0]
        named = section.name in TAKES
        takes = f"; {section.name} takes {TAKES[section.name]}" if named else f" (task {recipe.task})"
        several = named and data.task != "gaussian" and other_outputs(output)
        main = "logits" if likelihood.probabilities else "prediction"
        first = f"; the first of several outputs is used: return the {main} first, or a dict with '{main}'" if several else ""
        if named and data.task == "gaussian" and not isinstance(output, Tensor) and not isinstance(error, HeadsError):
            first = f"; of several outputs two alone are a pair, else the first is read: {PAIR_ADVICE}"
        hot = (
            "; the targets look one-hot: pass the number of each class, targets.argmax(1)" if _one_hot(targets, classes) else ""
        )
        raise ModelError(
            f"loss.name: {section.name} does not fit the output of {shown(recipe.model.name)}, of shape {_shape(output)}, and "
            f"targets of shape {tuple(targets.shape)}{takes}{first}{hot} ({type(error).__name__}: {reason})"
        ) from error
    if not isinstance(value, Tensor) or value.dim():
        what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise ModelError(f"loss.name: {section.name} returns {what}; it must average over the batch and return one number")
    if section.name not in TAKES and (why := sums(loss, float(value), output, targets)):
        raise ModelError(f"loss.name: {shown(section.name)}: {why}")
    return float(value)


def no_classes(name: str) -> str:
    """What to do about an output without a dimension of classes. name: what needs one, a loss or a task."""
    taker = f"{name} takes" if name in TAKES else "classification takes"
    return f"{taker} (N, classes); for a regression use --loss mse, for a yes-or-no question --loss binary"


def first_targets(data: Data, inputs: Any) -> Tensor:
    """The targets of the first training examples, as many as there are inputs."""
    count = batch_length(inputs)
    _, targets = next(iter(data.train.subset(torch.arange(count)).batches(count)))
    return targets


def _one_hot(targets: Tensor, classes: int) -> bool:
    """Whether each target has a number for each class, one of them 1 and the others 0."""
    if targets.dim() != 2 or targets.shape[1] != classes:
        return False
    return bool(((targets == 0) | (targets == 1)).all() and (targets.sum(1) == 1).all())


def _shape(output: Any) -> str:
    if is_pair(output):
        return " and ".join(str(tuple(part.shape)) for part in output)
    return str(tuple(main_output(output).shape))
