"""What to tell a user before a long run: settings that are unlikely to suit the model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from svdcompress.calibrate import least_examples, out_of_reach, targets_of
from svdcompress.errors import counted
from svdcompress.likelihoods import likelihood_for
from svdcompress.pipeline._convert import LARGE, PUSH, final_beta, sizes
from svdcompress.recipe import Recipe, in_epochs
from svdcompress.sources import Data, fresh_weights, image_statistics
from svdcompress.train import resolved_precision

STAGES = ("dense", "train", "recover")
"""The sections of a recipe that train a model."""

HARD, HARD_LARGE = 50.0, 10.0
"""Values of beta * weights / N likely to prune a small and a large model very hard (ResNet-50 on ImageNet with beta 1: 20)."""


def unpromised(recipe: Recipe, data: Data) -> list[str]:
    """A warning if the validation data cannot promise the requested coverage; data: with their validation split."""
    coverage, likelihood = recipe.calibrate.coverage, likelihood_for(data.task, data.dim)
    if coverage is None:
        return []
    if likelihood.probabilities and not likelihood.classes:
        return [f"calibrate.coverage: task {data.task!r} has neither prediction sets nor intervals, so nothing is promised"]
    if line := out_of_reach(coverage):
        return [f"calibrate.coverage: {line}"]
    targets, count, needed = next(iter(data.validation.batches(1)))[1], len(data.validation), least_examples(coverage)
    several = 1 if likelihood.probabilities else targets_of(targets)
    if targets.numel() > several or count >= needed:  # each position counts
        return []
    each = f" for each of {several} targets" if several > 1 else ""
    return [
        f"calibrate.coverage: {coverage:g} cannot be promised{each} from {counted(count, 'validation example')}; it takes "
        f"{needed:,}: set a larger data.validation, or a smaller coverage"
    ]


def advice(recipe: Recipe, model: nn.Module, examples: int, processes: int = 1, inputs: Any = None) -> list[str]:
    """Warnings, one line each. model: the dense one. examples: N, the number of training examples. inputs: a few of them."""
    weights, total = sizes(recipe, model, inputs)
    train, beta = recipe.train, recipe.train.beta
    lines = []
    final = final_beta(recipe, model, examples, inputs)
    if beta.final != "auto" and final * weights / examples >= (HARD_LARGE if total >= LARGE else HARD):
        better = "0.05 to 0.2" if total >= LARGE else f"{PUSH * examples / weights:.2g}"
        lines.append(
            f"train.beta.final={final:g} with {weights:,} weights and N={examples:,} examples is likely to prune "
            f"very hard; {better} is a better start"
        )
    draws = train.epochs or (recipe.recover.epochs and recipe.recover.noise)
    if draws and recipe.convert.log_alpha is None and recipe.convert.log_sigma2 > -12 and total >= LARGE:
        lines.append(
            f"convert.log_sigma2={recipe.convert.log_sigma2:g} is a lot of noise for a large pretrained model; start with "
            "--set convert.log_sigma2=-15"
        )
    if beta.name in ("linear", "cosine") and in_epochs(beta.stop, train.epochs) > train.epochs:
        lines.append(f"train.beta.stop={beta.stop} lies beyond train.epochs={train.epochs}: beta never reaches {final:g}")
    if beta.name == "additive" and beta.step * train.epochs < final:
        lines.append(f"beta rises by {beta.step:g} an epoch and ends at {beta.step * train.epochs:g}, not at {final:g}")
    if weights < 0.5 * total:
        share = 100 * weights / total
        lines.append(f"only {share:.0f}% of the {total:,} parameters are in layers to be converted (svdc inspect shows why)")
    if examples < 500:
        much = "" if beta.final == "auto" else f", and the KL has a weight of 1/{examples}: expect heavy pruning"
        lines.append(f"only {counted(examples, 'training example')}: a small drop can't be told from chance{much}")
    if train.shrink is not None and processes > 1:
        lines.append("train.shrink works in one process only: in this run nothing is removed before the training ends")
    return lines + _pretrained(recipe, model)


def _training(recipe: Recipe, trained: bool) -> list[str]:
    """The sections in which this run trains anything. trained: whether the dense model is trained already."""
    return [name for name in STAGES if getattr(recipe, name).epochs and not (trained and name == "dense")]


def slow_precision(recipe: Recipe, device: torch.device, trained: bool) -> list[str]:
    """A warning if a training stage asks for bfloat16 on a CPU that emulates it."""
    stages = [name for name in _training(recipe, trained) if getattr(recipe, name).precision == "bf16"]
    if not stages or device.type != "cpu" or resolved_precision("auto", device) == "bf16":
        return []
    which = " ".join(f"--set {name}.precision=auto" for name in stages)
    return [f"precision bf16: this CPU has no bfloat16 instructions and is faster in float32: {which}"]


def precision_taken(recipe: Recipe, device: torch.device, trained: bool) -> str | None:
    """A note on what `precision: auto` means on this device; None if no training stage uses it."""
    if all(getattr(recipe, name).precision != "auto" for name in _training(recipe, trained)):
        return None
    taken = {"bf16": "bfloat16 (bf16)", "no": "float32 (no)"}[resolved_precision("auto", device)]
    return f"precision auto: {taken} on {device.type}"


def _pretrained(recipe: Recipe, model: nn.Module) -> list[str]:
    """Warnings about what is easily missed with a model from a folder or a hub: a random head, image normalization."""
    lines = []
    if fresh := fresh_weights(model):
        what = f"{', '.join(fresh[:3])}{' ...' if len(fresh) > 3 else ''}"
        then = "the dense model is trained first" if recipe.weights.trained is None else "they start from random numbers"
        lines.append(f"{recipe.model.name} lacks {what}: {then}")
    found = image_statistics(recipe.model)
    if found and not recipe.data.transform:
        setting = f"data.transform=[{{normalize: {{mean: {found['mean']}, std: {found['std']}}}}}]"
        lines.append(
            f"{recipe.model.name} was trained on normalized images (preprocessor_config.json), but data.transform is empty; "
            f"add --set '{setting}'"
        )
    return lines
