"""Figures of the predictive distributions on the test data, within a budget of seconds."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from svdcompress.likelihoods import likelihood_for, own_likelihood
from svdcompress.pipeline._doubts import doubts
from svdcompress.pipeline._some import places, some
from svdcompress.sources import Data, Examples, fitting
from svdcompress.uncertainty import fit_tau, gather, mc_predict, mean_predict, quality, regression_quality, reliability

CHUNK = 500
"""Examples per batch of predictions, or fewer if they are large."""

SHARE, LEAST = 0.2, 30.0
"""The time that "auto" allows for the figures: this fraction of the seconds of training, and at least this many seconds."""

EXAMPLES, SAMPLES, FEWEST = 1000, 30, 50
"""To stay within the budget, examples are reduced down to EXAMPLES, then samples to SAMPLES, then examples to FEWEST."""

TRIALS = ((2, 2), (8, 4), (64, 10), (500, 20))
"""Examples and samples of the predictions that are timed, one after another until one takes long enough."""

LONG_ENOUGH = 0.5

MOST_NUMBERS = 2 * 10**7
"""The most predicted numbers to keep at once: with a prediction for each pixel, an image has millions."""


def uncertainty(
    dense: nn.Module, small: nn.Module, data: Data, samples: int, seed: int, budget: float | None = None
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any], list[dict[str, Any]]]:
    """`uncertainty`, `calibration`, `uncertainty_of` and `doubts` of the report; both models are on the same device.

    budget: roughly how many seconds they may take; None: no limit. All rows use the same examples, so they can be compared.
    """
    device = next(small.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    likelihood = likelihood_for(data.task, data.dim)
    what = {"task": likelihood}
    own = own_likelihood(small, likelihood)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop")  # vmap and fused attention
        asked, (count, samples) = samples, _affordable(small, data, samples, budget, what)
        test, known = some(data.test, count), some(data.validation, count)
        contenders: dict[str, Callable] = {
            "dense": partial(mean_predict, dense, **what),
            "sparse, mean": partial(mean_predict, small, task=own),
            f"sparse, {samples} samples": partial(mc_predict, small, samples=samples, generator=generator, task=own),
        }
        figures, diagrams = {}, {}
        size = min(fitting(model, data.test, CHUNK, device=device) for model in (dense, small))
        for name, predict in contenders.items():
            figures[name], found = row(predict, test, known, data, size, device)
            if likelihood.probabilities:
                known_of_weights = found.scores.get("mutual_information")
                if known_of_weights is not None:
                    figures[name]["mutual_information"] = float(known_of_weights.mean())
                diagrams[name] = {**reliability(found.mean, found.targets), "ece": figures[name]["ece"]}
    # found now holds the predictions of the last contender, which averages over samples
    unsure = doubts(found, test, data, likelihood, places(len(data.test), count))
    of = {"examples": len(test), "test": len(data.test), "samples": samples, "asked": asked}
    return figures, diagrams, {**of, "text": _text(of)}, unsure


def row(
    predict: Callable[[Any], Any], test: Examples, known: Examples, data: Data, size: int, device: Any = "cpu"
) -> tuple[dict[str, Any], Any]:
    """The figures of one predictor on test examples, and its predictions. known: validation examples, on which the noise of a
    regression is fitted. size: examples per batch."""
    likelihood = likelihood_for(data.task, data.dim)
    found = gather(predict, lambda: test.batches(size, device=device), likelihood)
    if likelihood.probabilities:
        return quality(found.mean, found.targets), found
    variance = found.variance
    if likelihood.constant_noise:
        fitted = gather(predict, lambda: known.batches(size, device=device), likelihood)
        variance = variance + 1 / fit_tau(fitted.mean, fitted.variance, fitted.targets)
    scale = 1.0 if data.target_scale is None else data.target_scale[1]
    return regression_quality(found.mean * scale, variance * scale**2, found.targets * scale), found


def _text(of: dict[str, int]) -> str:
    """What the figures are computed from, if it is less than was asked for; else ""."""
    if of["examples"] == of["test"] and of["samples"] == of["asked"]:
        return ""
    what = f"{of['examples']:,} of the {of['test']:,} test examples with {of['samples']} samples"
    others = "; error and NLL of the models are from all examples"
    if of["examples"] == of["test"]:
        what, others = f"all {of['test']:,} test examples, with {of['samples']} samples instead of {of['asked']}", ""
    return (
        f"the uncertainty figures (NLL, ECE, ...) are from {what}, to take less time than training{others}. "
        "For all of it: --set uncertainty.budget=none, or svdc evaluate"
    )


def seconds_for(budget: float | str, trained: float) -> float | None:
    """A recipe's `uncertainty.budget` in seconds. trained: the seconds that training took."""
    if budget == "none":
        return None
    return max(LEAST, SHARE * trained) if budget == "auto" else float(budget)


def _affordable(model: nn.Module, data: Data, samples: int, budget: float | None, what: dict[str, Any]) -> tuple[int, int]:
    """How many test examples, and samples of each, fit into the budget, judging by the time of a few predictions."""
    every = len(data.test)
    inputs, _ = next(iter(_first(data.test, 1).batches(1, device=next(model.parameters()).device)))
    most = max(1, min(every, MOST_NUMBERS // mean_predict(model, inputs, **what).mean.numel()))
    if budget is None:
        return most, samples
    fitted = likelihood_for(data.task).constant_noise  # which takes predictions on the validation data
    rounds = 1 + min(1.0, len(data.validation) / every) if fitted else 1
    return _plan(most, samples, budget / rounds, _seconds(model, data, samples, what))


def _plan(examples: int, samples: int, budget: float, each: float) -> tuple[int, int]:
    """The numbers of examples and samples for a budget in seconds. each: seconds per sample of one example."""

    def fit(floor: int, most: int, cost: float) -> int:
        """The largest number that the budget allows, rounded down to one significant digit, but not below `floor`."""
        if most * cost <= budget:
            return most
        allowed = int(budget / cost)
        digits = 10 ** (len(str(max(allowed, 1))) - 1)
        return min(most, max(min(floor, most), allowed // digits * digits))

    examples = fit(EXAMPLES, examples, samples * each)
    samples = fit(SAMPLES, samples, examples * each)
    return fit(FEWEST, examples, samples * each), samples


def _seconds(model: nn.Module, data: Data, samples: int, what: dict[str, Any]) -> float:
    """Seconds per sample of one example, in a batch of many; the first trial is only a warm-up."""
    each = 0.0
    device = next(model.parameters()).device
    size = fitting(model, data.test, CHUNK, device=device)
    for index, (count, draws) in enumerate(TRIALS):
        count = min(count, size)
        inputs, _ = next(iter(_first(data.test, count).batches(count, device=device)))
        draws = min(draws, samples)
        started = time.perf_counter()
        mc_predict(model, inputs, draws, generator=torch.Generator().manual_seed(0), **what)
        took = time.perf_counter() - started
        each = took / (min(count, len(data.test)) * draws)
        if (index and took > LONG_ENOUGH) or took > 10 * LONG_ENOUGH or count >= len(data.test):
            break
    return each


def _first(examples: Examples, count: int) -> Examples:
    return examples.subset(torch.arange(min(count, len(examples))))
