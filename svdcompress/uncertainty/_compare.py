"""Dense against sparse, each with the uncertainties that it can give, on the same data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from svdcompress.errors import DataError
from svdcompress.layers import unwrapped
from svdcompress.likelihoods import Likelihood, Prediction, likelihood_for, resolve
from svdcompress.uncertainty._baseline import dropout_baseline
from svdcompress.uncertainty._calibrate import fit_tau, fit_temperature
from svdcompress.uncertainty._predict import mc_predict, mean_predict
from svdcompress.uncertainty._quality import auroc, quality, regression_quality, rejection, reliability

Batches = Callable[[], Iterable[tuple[Any, Tensor]]]
"""Gives batches of (inputs, targets), the same ones at each call."""

Predict = Callable[[Any], Prediction]

FEW, SOME = 20, 1000
"""Samples and validation inputs with which dropout rates are compared."""


@dataclass(frozen=True)
class Gathered:
    """Predictions for a whole set of inputs, one row for each label or number, and what they are to be judged by.

    scores: measures of uncertainty by name, one number for each input. owner: the input that each row is of. Positions of the
    class -100 have no row, and no part in the scores.
    """

    mean: Tensor
    variance: Tensor
    targets: Tensor
    scores: dict[str, Tensor]
    owner: Tensor


def compare(
    dense: nn.Module | None,
    sparse: nn.Module,
    test: Batches,
    validation: Batches,
    *,
    task: str | Likelihood | None = None,
    ood: Mapping[str, Batches] | None = None,
    samples: int = 100,
    seed: int = 0,
    scale: float = 1.0,
    dim: int | None = None,
) -> dict[str, Any]:
    """Compare on the same test data: the dense model, the same with a temperature, the same with MC dropout, the sparse
    model by its mean, and the sparse model with Monte-Carlo samples.

    dense: the model before compression; None leaves its rows out. sparse: a variational model, pruned or not.
    test, validation: give batches of (inputs, targets). What has to be fitted (temperature, dropout rate, the noise of a
        regression) is fitted on `validation`.
    task, dim: as in `mc_predict`; classes of -100 do not count.
    ood: batches from elsewhere, by name; their targets are not looked at, but for -100.
    scale: for regression, the factor from a model's units to the target's own.

    MC dropout uses the dense model's own dropout; where it has none it is put in, at the rate of least validation NLL.

    Returns a JSON-able dict: "task", "samples", "seed", "temperature", "dropout", and "contenders", a list of
    {"name", "metrics", "reliability", "rejection", "ood"}; None for what has no meaning. Raises what `mc_predict` raises.
    """
    likelihood = resolve(unwrapped(sparse), task, dim)
    plain = likelihood.plain()  # the dense model has a calibration of its own
    probabilities = likelihood.probabilities
    temperature, dropout, contenders = None, None, []
    if dense is not None:
        contenders.append(("dense", partial(mean_predict, dense, task=plain)))
        if probabilities:
            temperature = _temperature(dense, validation, plain)
            warmed = partial(mean_predict, dense, task=plain, temperature=temperature)
            contenders.append(("dense, temperature", warmed))
        few = min(samples, FEW)
        dropped, rate, inserted = dropout_baseline(
            dense, lambda model: _nll(_sampled(model, plain, few, seed), head(validation, SOME), plain)
        )
        dropout = {"rate": rate, "inserted": inserted}
        contenders.append(("dense, MC dropout", _sampled(dropped, plain, samples, seed)))
    contenders.append(("sparse, mean", partial(mean_predict, sparse, task=likelihood)))
    contenders.append(("sparse, samples", _sampled(sparse, likelihood, samples, seed)))
    judge = _judge_probabilities if probabilities else _judge_values
    rows = [{"name": name, **judge(predict, test, validation, ood or {}, likelihood, scale)} for name, predict in contenders]
    return {
        "task": likelihood.name,
        "samples": samples,
        "seed": seed,
        "temperature": temperature,
        "dropout": dropout,
        "contenders": rows,
    }


def _sampled(model: nn.Module, likelihood: Likelihood, samples: int, seed: int) -> Predict:
    """Monte-Carlo predictions, with one stream of noise for all batches."""
    generator = torch.Generator().manual_seed(seed)
    return lambda inputs: mc_predict(model, inputs, samples, task=likelihood, generator=generator)


def _judge_probabilities(
    predict: Predict, test: Batches, validation: Batches, ood: Mapping[str, Batches], likelihood: Likelihood, scale: float
) -> dict[str, Any]:
    inside = gather(predict, test, likelihood)
    wrong = _wrong(inside)
    return {
        "metrics": quality(inside.mean, inside.targets),
        "reliability": reliability(inside.mean, inside.targets),
        "rejection": {"score": "entropy", **rejection(inside.scores["entropy"], wrong)},
        "ood": _outside(predict, inside, ood, likelihood),
    }


def _judge_values(
    predict: Predict, test: Batches, validation: Batches, ood: Mapping[str, Batches], likelihood: Likelihood, scale: float
) -> dict[str, Any]:
    inside = gather(predict, test, likelihood)
    variance = inside.variance
    if likelihood.constant_noise:
        fitted = gather(predict, validation, likelihood)
        variance = variance + 1 / fit_tau(fitted.mean, fitted.variance, fitted.targets)
    squares = (inside.mean - inside.targets).square() * scale**2
    knows = bool((inside.scores["variance"] > 0).any())
    return {
        "metrics": regression_quality(inside.mean * scale, variance * scale**2, inside.targets * scale),
        "reliability": None,
        "rejection": {"score": "variance", **rejection(inside.scores["variance"], squares)} if knows else None,
        "ood": _outside(predict, inside, ood, likelihood) if knows else {},
    }


def _outside(
    predict: Predict, inside: Gathered, ood: Mapping[str, Batches], likelihood: Likelihood
) -> dict[str, dict[str, float]]:
    found = {}
    for name, batches in ood.items():
        scores = gather(predict, batches, likelihood).scores
        found[name] = {score: auroc(inside.scores[score], scores[score]) for score in scores}
    return found


def gather(predict: Predict, batches: Batches, task: str | Likelihood, dim: int | None = None) -> Gathered:
    """Predict all batches; labels and numbers one to a row, scores one to an input; on the CPU."""
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
        scores.append({name: score.cpu() for name, score in _scores(prediction, counts, likelihood).items()})
        count += len(target)
    if not means:
        raise DataError("data: there are no examples to predict")
    mean, variance = torch.cat(means), torch.cat(variances)
    together = {name: torch.cat([score[name] for score in scores]) for name in scores[0]}
    return Gathered(mean, variance, torch.cat(targets), together, torch.cat(owners))


def _variance(prediction: Prediction, likelihood: Likelihood) -> Tensor:
    """Constant noise is fitted to the validation data, and what the likelihood knows of it must not count twice."""
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
    """The mean over an input's positions that count (N, ...); 0 where none does."""
    score, counts = score.reshape(len(score), -1).cpu(), counts.reshape(len(counts), -1)
    if score.shape != counts.shape or bool(counts.all()):  # a variance of logits has one for each class
        return score.mean(1)
    return (score * counts).sum(1) / counts.sum(1).clamp_min(1)


def _wrong(gathered: Gathered) -> Tensor:
    """For each input the share of its labels that are predicted wrongly."""
    mean = gathered.mean
    guess = mean.argmax(1) if mean.dim() == 2 else (mean > 0.5).long()
    wrong = (guess != gathered.targets).double()
    total = torch.zeros(len(gathered.scores["entropy"]), dtype=torch.float64)
    return total.index_add(0, gathered.owner, wrong) / gathered.owner.bincount(minlength=len(total)).clamp_min(1)


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


def _nll(predict: Predict, batches: Batches, likelihood: Likelihood) -> float:
    gathered = gather(predict, batches, likelihood)
    if likelihood.probabilities:
        return quality(gathered.mean, gathered.targets)["nll"]
    variance = gathered.variance
    if likelihood.constant_noise:
        variance = variance + 1 / fit_tau(gathered.mean, variance, gathered.targets)
    return regression_quality(gathered.mean, variance, gathered.targets)["nll"]


def _temperature(dense: nn.Module, validation: Batches, likelihood: Likelihood) -> float:
    # A "regression" hands the logits through as they are.
    gathered = gather(partial(mean_predict, dense, task="regression", dim=likelihood.dim), validation, likelihood)
    return fit_temperature(gathered.mean, gathered.targets)
