"""The stage after recovery: what validation data say of the small model's certainty, put into it, and what it may promise."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from svdcompress import cost
from svdcompress.calibrate import (
    AnswerAbove,
    Calibrated,
    ConformalIntervals,
    ConformalSets,
    Promises,
    calibrate,
    from_dict,
    measured,
    promises_of,
    save_promises,
)
from svdcompress.errors import DataError, UsageError
from svdcompress.likelihoods import Likelihood, likelihood_for, own_likelihood, set_likelihood
from svdcompress.pipeline import _figures
from svdcompress.pipeline._begin import Opened
from svdcompress.pipeline._context import Context
from svdcompress.pipeline._select import bare
from svdcompress.pipeline._smaller import Small
from svdcompress.sources import Data, Examples
from svdcompress.uncertainty import mc_predict, mean_predict

KEPT = "validation.safetensors"
"""What a run keeps of its validation data."""

CHUNK = 500

MOST_MACS = 2 * 10**12
"""Multiply-accumulates of one look at validation or test data by draws."""

EXAMPLES, SAMPLES = 20_000, 100

Promise = ConformalSets | ConformalIntervals | AnswerAbove


def calibrate_stage(context: Context, opened: Opened, small: Small) -> Small:
    """The small model with its posterior chosen and its likelihood calibrated, as the recipe's `calibrate` says."""
    settings, data, model = context.recipe.calibrate, opened.data, small.model
    tau = _figures.noise_precision(model, data)
    plain = likelihood_for(data.task, data.dim, tau)
    if not settings.temperature and settings.posterior == "variational":
        return replace(small, model=_carrying(model, plain))
    with _figures.there(context.place.device, model):
        try:
            found = calibrate(
                model,
                data.train,
                data.validation,
                plain,
                posterior=settings.posterior,
                temperature=settings.temperature,
                macs=_macs(model, opened.inputs),
                epochs=settings.epochs,
                beta=settings.beta,
                seed=context.recipe.seed,
                device=context.place.device,
            )
        except DataError as error:
            context.warn(f"not calibrated: {error}")
            return replace(small, model=_carrying(model, plain))
    found.model.cpu()
    context.results.calibrate = found.to_dict()
    for line in found.notes:
        context.note(f"calibration: {line}")
    if found.better == "mean":
        context.note("on validation data, draws are no better than the mean: model.onnx says as much as model_mc.onnx")
    context.say(f"[dim]calibrated: {_told(found)}[/]")
    return replace(small, model=_carrying(found.model, found.likelihood))


def _carrying(model: nn.Module, likelihood: Likelihood) -> nn.Module:
    """The model, and the one within it that a checkpoint holds, with a likelihood."""
    set_likelihood(bare(model), likelihood)
    return set_likelihood(model, likelihood)


def _told(found: Calibrated) -> str:
    parts = []
    for what, one in (("mean", found.mean), ("samples", found.samples)):
        unit = "noise precision" if found.likelihood.constant_noise else "temperature"
        parts.append(f"{what} {unit} {one.value:.3g}, validation NLL {one.before:.4f} to {one.after:.4f}" if one.taken else "")
    return "; ".join(part for part in parts if part) + f" (posterior: {found.posterior})"


def _macs(model: nn.Module, inputs: Any) -> int:
    """Of one example."""
    try:
        return int(cost.measure(model, inputs).to_dict().get("macs") or 0)
    except Exception:  # a model that cannot be counted is taken as small
        return 0


def predictors(model: nn.Module, data: Data, seed: int, samples: int) -> dict[str, Callable[[Any], Any]]:
    """The model's predictions by the mean and by draws, with its own likelihood."""
    own = own_likelihood(model, data.task, data.dim)
    generator = torch.Generator().manual_seed(seed)
    return {
        "mean": partial(mean_predict, model, task=own),
        "samples": partial(mc_predict, model, samples=samples, generator=generator, task=own),
    }


def promise_stage(context: Context, opened: Opened, small: Small) -> None:
    """What the validation data let the model promise: kept in the folder, and what the recipe asks for in the report."""
    settings, data, model = context.recipe.calibrate, opened.data, small.model
    likelihood = own_likelihood(model, data.task, data.dim)
    macs = _macs(model, opened.inputs)
    found: dict[str, Promises] = {}
    with _figures.there(context.place.device, model), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop")
        validation, samples = bounded(data.validation, macs)
        for who, predict in predictors(model, data, context.recipe.seed, samples).items():
            its = likelihood.of_mean() if who == "mean" else likelihood
            found[who] = promises_of(predict, _batches(validation, context), its)
    save_promises(context.out / KEPT, found)
    results = context.results.promises = {}
    for name, wanted in (("coverage", settings.coverage), ("answer_above", settings.answer_above)):
        if wanted is None:
            continue
        for who, promises in found.items():
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                try:
                    promise = getattr(promises, name)(wanted)
                except (DataError, UsageError) as error:
                    context.warn(f"{who}: {error}")
                    continue
            for one in {str(each.message) for each in told} if who == "mean" else ():
                context.warn(one)
            results.setdefault(name, {})[who] = promise.to_dict()


def measure_promises(context: Context, opened: Opened, small: Small) -> None:
    """What the promises were worth on the test data, into the report."""
    results, data, model = context.results.promises, opened.data, small.model
    if not results:
        return
    likelihood = own_likelihood(model, data.task, data.dim)
    with _figures.there(context.place.device, model):
        test, samples = bounded(data.test, _macs(model, opened.inputs))
        for stored in results.values():
            predict = predictors(model, data, context.recipe.seed, samples)
            for who, promise in stored.items():
                its = likelihood.of_mean() if who == "mean" else likelihood
                promise["test"] = measured(predict[who], _batches(test, context), its, from_dict(promise))


def _batches(examples: Examples, context: Context) -> Any:
    return lambda: examples.batches(CHUNK, device=context.place.device)


def bounded(examples: Examples, macs: int) -> tuple[Examples, int]:
    """So many of the examples, and draws of each, that the work stays within MOST_MACS."""
    allowed = MOST_MACS // max(macs, 1)
    samples = max(10, min(SAMPLES, allowed // max(min(len(examples), 2000), 1)))
    count = min(len(examples), EXAMPLES, max(100, allowed // samples))
    if count == len(examples):
        return examples, samples
    order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(0))
    return examples.subset(order[:count].sort().values), samples
