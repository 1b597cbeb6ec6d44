"""Predictions for whole data sets: one row for each label or number, and scores of doubt for each input."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from svdcompress.errors import DataError
from svdcompress.likelihoods import Likelihood, Prediction, likelihood_for

Batches = Callable[[], Iterable[tuple[Any, Tensor]]]
"""A function that gives batches of (inputs, targets), the same ones at each call."""

Predict = Callable[[Any], Prediction]


@dataclass(frozen=True)
class Gathered:
    """Predictions for a whole set of inputs, one row for each label or number, with the targets and scores to judge them.

    scores: measures of uncertainty by name, one number for each input. owner: the input that each row is of. Positions labeled
    -100 have no row and do not enter the scores.
    """

    mean: Tensor
    variance: Tensor
    targets: Tensor
    scores: dict[str, Tensor]
    owner: Tensor

    @property
    def inputs(self) -> int:
        """How many inputs there are."""
        return len(next(iter(self.scores.values())))

    def with_targets(self) -> Gathered:
        """The same without inputs that have no row: they cannot be judged, and their score of 0 would count as sure. Unchanged
        if no input has a row."""
        there = self.owner.bincount(minlength=self.inputs) > 0
        if bool(there.all()) or not bool(there.any()):
            return self
        number = there.cumsum(0) - 1
        scores = {name: score[there] for name, score in self.scores.items()}
        return replace(self, scores=scores, owner=number[self.owner])


def gather(
    predict: Predict,
    batches: Batches,
    task: str | Likelihood,
    dim: int | None = None,
    more: Mapping[str, Callable[[Any], Tensor]] | None = None,
) -> Gathered:
    """Predict all batches: one row for each label or number, one score of each kind for each input, all on the CPU.

    more: further scores by name, functions of a batch's inputs that give a number for each target, higher for more doubt.
    """
    likelihood = likelihood_for(task, dim)
    means, variances, targets, scores, owners, count = [], [], [], [], [], 0
    for inputs, target in batches():
        prediction = predict(inputs)
        target = target.detach().cpu()
        counts = likelihood.counts(target)
        owner = torch.arange(len(target)).view(-1, *[1] * (target.dim() - 1)).expand_as(target)
        means.append(likelihood.rows(prediction.mean.cpu())[counts.flatten()])
        variances.append(likelihood.rows(_variance(prediction, likelihood).cpu())[counts.flatten()])
        targets.append(target[counts])
        owners.append(owner[counts] + count)
        found = _scores(prediction, counts, likelihood)
        found |= {name: _per_input(score(inputs), counts) for name, score in (more or {}).items()}
        scores.append({name: score.cpu() for name, score in found.items()})
        count += len(target)
    if not means:
        raise DataError("data: there are no examples to predict")
    mean, variance = torch.cat(means), torch.cat(variances)
    together = {name: torch.cat([score[name] for score in scores]) for name in scores[0]}
    return Gathered(mean, variance, torch.cat(targets), together, torch.cat(owners))


def _variance(prediction: Prediction, likelihood: Likelihood) -> Tensor:
    """The variance without constant noise: that is fitted to the validation data, so the likelihood's must not count as
    well."""
    return prediction.epistemic if likelihood.constant_noise else prediction.variance


def _scores(prediction: Prediction, counts: Tensor, likelihood: Likelihood) -> dict[str, Tensor]:
    if prediction.entropy is None:
        return {"variance": _per_input(_variance(prediction, likelihood), counts)}
    uncertain = 1 - likelihood.confidence(prediction.mean)
    scores = {"softmax": _per_input(uncertain, counts), "entropy": _per_input(prediction.entropy, counts)}
    if prediction.samples > 1 and prediction.mutual_information is not None:
        scores["mutual_information"] = _per_input(prediction.mutual_information, counts)
    return scores


def _per_input(score: Tensor, counts: Tensor) -> Tensor:
    """The mean over those positions of an input that count, (N, ...); 0 if none does."""
    score, counts = score.reshape(len(score), -1).cpu(), counts.reshape(len(counts), -1)
    if score.shape != counts.shape or bool(counts.all()):  # a variance of logits has a number for each class
        return score.mean(1)
    return (score * counts).sum(1) / counts.sum(1).clamp_min(1)


def head(batches: Batches, count: int) -> Batches:
    """The first batches, until they hold `count` targets or more."""

    def first() -> Iterable[tuple[Any, Tensor]]:
        seen = 0
        for inputs, targets in batches():
            yield inputs, targets
            seen += len(targets)
            if seen >= count:
                return

    return first
