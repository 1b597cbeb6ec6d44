"""Dense against sparse, each with the uncertainties that it can give, on the same data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from svdcompress.errors import DataError
from svdcompress.uncertainty._baseline import dropout_baseline
from svdcompress.uncertainty._calibrate import fit_tau, fit_temperature
from svdcompress.uncertainty._predict import mc_predict, mean_predict
from svdcompress.uncertainty._prediction import Prediction
from svdcompress.uncertainty._quality import auroc, quality, regression_quality, rejection, reliability

Batches = Callable[[], Iterable[tuple[Any, Tensor]]]
"""Gives batches of (inputs, targets), the same ones at each call."""

Predict = Callable[[Any], Prediction]

FEW, SOME = 20, 1000
"""Samples and validation inputs with which dropout rates are compared."""


@dataclass(frozen=True)
class Gathered:
    """Predictions for a whole set of inputs, one row for each label or number, and what they are to be judged by.

    scores: measures of uncertainty by name, one number for each input.
    """

    mean: Tensor
    variance: Tensor
    targets: Tensor
    scores: dict[str, Tensor]


def compare(
    dense: nn.Module | None,
    sparse: nn.Module,
    test: Batches,
    validation: Batches,
    *,
    task: str = "classification",
    ood: Mapping[str, Batches] | None = None,
    samples: int = 100,
    seed: int = 0,
    scale: float = 1.0,
) -> dict[str, Any]:
    """Compare on the same test data: the dense model, the same with a temperature, the same with MC dropout, the sparse
    model by its mean, and the sparse model with Monte-Carlo samples.

    dense: the model before compression; None leaves its rows out. sparse: a variational model, pruned or not.
    test, validation: give batches of (inputs, targets). What has to be fitted (temperature, dropout rate, the noise of a
        regression) is fitted on `validation`.
    task: as in `mc_predict`. ood: batches from elsewhere, by name; their targets are not looked at.
    scale: for regression, the factor from a model's units to the target's own.

    MC dropout uses the dense model's own dropout; where it has none it is put in, at the rate of least validation NLL.

    Returns a JSON-able dict: "task", "samples", "seed", "temperature", "dropout", and "contenders", a list of
    {"name", "metrics", "reliability", "rejection", "ood"}; None for what has no meaning. Raises what `mc_predict` raises.
    """
    probabilities = task in ("classification", "binary")
    temperature, dropout, contenders = None, None, []
    if dense is not None:
        contenders.append(("dense", partial(mean_predict, dense, task=task)))
        if probabilities:
            temperature = _temperature(dense, validation, task)
            contenders.append(("dense, temperature", partial(mean_predict, dense, task=task, temperature=temperature)))
        few = min(samples, FEW)
        dropped, rate, inserted = dropout_baseline(
            dense, lambda model: _nll(_sampled(model, task, few, seed), head(validation, SOME), task)
        )
        dropout = {"rate": rate, "inserted": inserted}
        contenders.append(("dense, MC dropout", _sampled(dropped, task, samples, seed)))
    contenders.append(("sparse, mean", partial(mean_predict, sparse, task=task)))
    contenders.append(("sparse, samples", _sampled(sparse, task, samples, seed)))
    judge = _judge_probabilities if probabilities else _judge_values
    rows = [{"name": name, **judge(predict, test, validation, ood or {}, task, scale)} for name, predict in contenders]
    return {
        "task": task,
        "samples": samples,
        "seed": seed,
        "temperature": temperature,
        "dropout": dropout,
        "contenders": rows,
    }


def _sampled(model: nn.Module, task: str, samples: int, seed: int) -> Predict:
    """Monte-Carlo predictions, with one stream of noise for all batches."""
    generator = torch.Generator().manual_seed(seed)
    return lambda inputs: mc_predict(model, inputs, samples, task=task, generator=generator)


def _judge_probabilities(
    predict: Predict, test: Batches, validation: Batches, ood: Mapping[str, Batches], task: str, scale: float
) -> dict[str, Any]:
    inside = gather(predict, test, task)
    wrong = _wrong(inside)
    return {
        "metrics": quality(inside.mean, inside.targets),
        "reliability": reliability(inside.mean, inside.targets),
        "rejection": {"score": "entropy", **rejection(inside.scores["entropy"], wrong)},
        "ood": _outside(predict, inside, ood, task),
    }


def _judge_values(
    predict: Predict, test: Batches, validation: Batches, ood: Mapping[str, Batches], task: str, scale: float
) -> dict[str, Any]:
    inside = gather(predict, test, task)
    variance = inside.variance
    if task == "regression":  # the constant noise of the observations
        fitted = gather(predict, validation, task)
        variance = variance + 1 / fit_tau(fitted.mean, fitted.variance, fitted.targets)
    squares = (inside.mean - inside.targets).square() * scale**2
    knows = bool((inside.scores["variance"] > 0).any())
    return {
        "metrics": regression_quality(inside.mean * scale, variance * scale**2, inside.targets * scale),
        "reliability": None,
        "rejection": {"score": "variance", **rejection(inside.scores["variance"], squares)} if knows else None,
        "ood": _outside(predict, inside, ood, task) if knows else {},
    }


def _outside(predict: Predict, inside: Gathered, ood: Mapping[str, Batches], task: str) -> dict[str, dict[str, float]]:
    found = {}
    for name, batches in ood.items():
        scores = gather(predict, batches, task).scores
        found[name] = {score: auroc(inside.scores[score], scores[score]) for score in scores}
    return found


def gather(predict: Predict, batches: Batches, task: str) -> Gathered:
    """Predict all batches; labels and numbers one to a row, scores one to an input; on the CPU."""
    means, variances, targets, scores = [], [], [], []
    for inputs, target in batches():
        prediction = predict(inputs)
        means.append(_rows(prediction.mean, task))
        variances.append(_rows(prediction.variance, task))
        targets.append(target.detach().cpu().reshape(-1))
        scores.append({name: score.cpu() for name, score in _scores(prediction).items()})
    if not means:
        raise DataError("data: there are no examples to predict")
    mean, variance = torch.cat(means), torch.cat(variances)
    together = {name: torch.cat([score[name] for score in scores]) for name in scores[0]}
    return Gathered(mean, variance, torch.cat(targets), together)


def _rows(tensor: Tensor, task: str) -> Tensor:
    """(B, C, ...) -> (B ..., C) probabilities of classes; anything else as one long row."""
    tensor = tensor.cpu()
    return tensor.movedim(1, -1).reshape(-1, tensor.shape[1]) if task == "classification" else tensor.reshape(-1)


def _scores(prediction: Prediction) -> dict[str, Tensor]:
    if prediction.entropy is None:
        return {"variance": _per_input(prediction.variance)}
    p = prediction.mean
    confidence = p.amax(1) if prediction.task == "classification" else torch.maximum(p, 1 - p)
    scores = {"softmax": _per_input(1 - confidence), "entropy": _per_input(prediction.entropy)}
    if prediction.samples > 1 and prediction.mutual_information is not None:
        scores["mutual_information"] = _per_input(prediction.mutual_information)
    return scores


def _per_input(score: Tensor) -> Tensor:
    return score.reshape(len(score), -1).mean(1)


def _wrong(gathered: Gathered) -> Tensor:
    """For each input the share of its labels that are predicted wrongly."""
    mean = gathered.mean
    guess = mean.argmax(1) if mean.dim() == 2 else (mean > 0.5).long()
    return _per_input((guess != gathered.targets).double().view(len(gathered.scores["entropy"]), -1))


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


def _nll(predict: Predict, batches: Batches, task: str) -> float:
    gathered = gather(predict, batches, task)
    if task in ("classification", "binary"):
        return quality(gathered.mean, gathered.targets)["nll"]
    variance = gathered.variance
    if task == "regression":
        variance = variance + 1 / fit_tau(gathered.mean, variance, gathered.targets)
    return regression_quality(gathered.mean, variance, gathered.targets)["nll"]


def _temperature(dense: nn.Module, validation: Batches, task: str) -> float:
    # A "regression" hands the logits through as they are.
    gathered = gather(partial(mean_predict, dense, task="regression"), validation, task)
    return fit_temperature(gathered.mean, gathered.targets)
