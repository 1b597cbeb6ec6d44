"""The contenders of a comparison: ways of predicting, each with the scores of doubt that only it can give."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from svdcompress.likelihoods import Likelihood, Regression, likelihood_for
from svdcompress.uncertainty._baseline import dropout_baseline
from svdcompress.uncertainty._calibrate import fit_tau, fit_temperature
from svdcompress.uncertainty._gather import Batches, Predict, gather, head
from svdcompress.uncertainty._predict import ensemble_predict, mc_predict, mean_predict
from svdcompress.uncertainty._quality import quality, regression_quality

RULED_OUT = -1e4
"""Replaces a logit of -inf: its probability is negligible at any temperature that is fitted."""

FEW, SOME = 20, 1000
"""Numbers of samples and of validation inputs with which dropout rates are compared."""


@dataclass(frozen=True)
class Contender:
    """A row of a comparison.

    predict: maps inputs to a Prediction. scores: further scores of doubt by name, functions of the inputs with a number for
    each target. about: how the contender was made, if its name does not say so.
    """

    name: str
    predict: Predict
    scores: Mapping[str, Callable[[Any], Tensor]] = field(default_factory=dict)
    about: str = ""


def mean_contender(name: str, model: nn.Module, task: str | Likelihood, temperature: float = 1.0, about: str = "") -> Contender:
    """A model without noise; for several classes, the energy of its logits is a further score."""
    likelihood = likelihood_for(task)
    options: dict[str, Any] = {} if temperature == 1 else {"temperature": temperature}
    scores = {"energy": partial(energy, model, likelihood, temperature)} if likelihood.classes else {}
    return Contender(name, partial(mean_predict, model, task=likelihood, **options), scores, about)


def sampled_contender(name: str, model: nn.Module, task: str | Likelihood, samples: int, seed: int) -> Contender:
    """Monte-Carlo predictions, with one stream of noise for all batches."""
    likelihood, generator = likelihood_for(task), torch.Generator().manual_seed(seed)
    return Contender(name, lambda inputs: mc_predict(model, inputs, samples, task=likelihood, generator=generator))


def ensemble_contender(models: Sequence[nn.Module], task: str | Likelihood, about: str = "") -> Contender:
    """A deep ensemble of dense networks."""
    predict = partial(ensemble_predict, models, task=likelihood_for(task))
    return Contender(f"deep ensemble of {len(models)}", predict, about=about)


class _Logits(Regression):
    """Passes logits through unchanged, except -inf for classes that a model rules out."""

    def heads(self, output: Any) -> Any:
        return super().heads(output).clamp_min(RULED_OUT)


def energy(model: nn.Module, likelihood: Likelihood, temperature: float, inputs: Any) -> Tensor:
    """`-T logsumexp(logits / T)` (Liu et al. 2020, eq. 4), a number for each target: the higher, the less like the data."""
    logits = mean_predict(model, inputs, task=_Logits(likelihood.dim)).mean
    return -temperature * (logits / temperature).logsumexp(likelihood.dim)


def dense_contenders(
    dense: nn.Module, validation: Batches, likelihood: Likelihood, samples: int, seed: int
) -> tuple[list[Contender], float | None, dict[str, Any]]:
    """The dense model as it is, with a temperature (if it predicts probabilities) and with MC dropout; the temperature; and
    the dropout's {"rate", "inserted"}."""
    found, temperature = [mean_contender("dense", dense, likelihood)], None
    if likelihood.probabilities:
        temperature = _temperature(dense, validation, likelihood)
        found.append(mean_contender("dense, temperature", dense, likelihood, temperature))
    few = min(samples, FEW)
    some = head(validation, SOME)

    def nll(model: nn.Module) -> float:
        return _nll(sampled_contender("", model, likelihood, few, seed).predict, some, likelihood)

    dropped, rate, inserted = dropout_baseline(dense, nll)
    found.append(sampled_contender("dense, MC dropout", dropped, likelihood, samples, seed))
    return found, temperature, {"rate": rate, "inserted": inserted}


def _nll(predict: Predict, batches: Batches, likelihood: Likelihood) -> float:
    gathered = gather(predict, batches, likelihood)
    if likelihood.probabilities:
        return quality(gathered.mean, gathered.targets)["nll"]
    variance = gathered.variance
    if likelihood.constant_noise:
        variance = variance + 1 / fit_tau(gathered.mean, variance, gathered.targets)
    return regression_quality(gathered.mean, variance, gathered.targets)["nll"]


def _temperature(dense: nn.Module, validation: Batches, likelihood: Likelihood) -> float:
    gathered = gather(partial(mean_predict, dense, task=_Logits(likelihood.dim)), validation, likelihood)
    return fit_temperature(gathered.mean, gathered.targets)
