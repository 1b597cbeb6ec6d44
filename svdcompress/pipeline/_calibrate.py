"""The stage after recovery: calibrates the small model on validation data, and finds what it can promise."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

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
from svdcompress.pipeline._passes import Passes
from svdcompress.pipeline._select import bare
from svdcompress.pipeline._smaller import Small
from svdcompress.pipeline._some import some
from svdcompress.sources import Data, Examples, fitting
from svdcompress.uncertainty import mc_predict, mean_predict

KEPT = "validation.safetensors"
"""The file for what a run keeps of its validation data."""

CHUNK = 500
"""Examples per batch of predictions, or fewer if they are large."""

MOST_NUMBERS = 5 * 10**7
"""The most numbers in the predictions of all examples: with one for each pixel and class, an image has millions."""

MOST_MACS = 2 * 10**12
"""The most multiply-accumulates of one pass of draws over validation or test data if the recipe asks for a promise: a minute
or two on one core."""

LATER_MACS = 2 * 10**11
"""The same if only a later `svdc predict` might ask for a promise."""

EXAMPLES, SAMPLES = 20_000, 100

FEWEST, FEWEST_SAMPLES = 100, 10
"""The fewest examples, and draws of each, from which a promise is worth making."""

UNEVEN, LEAST = 1.5, 30
"""For several targets: the factor by which their standardized errors may differ without a warning, and the fewest validation
examples that can tell."""

Promise = ConformalSets | ConformalIntervals | AnswerAbove


def calibrate_stage(context: Context, opened: Opened, small: Small) -> Small:
    """Choose the small model's posterior and calibrate its likelihood, as the recipe's `calibrate` says."""
    settings, data, model = context.recipe.calibrate, opened.data, small.model
    with _figures.there(context.place.device, model):
        tau = Passes(model, data).noise_precision
    plain = likelihood_for(data.task, data.dim, tau)
    if not settings.temperature and settings.posterior == "variational":
        return replace(small, model=_carrying(model, plain))
    macs = _figures.macs_of(model, opened.inputs)
    with _figures.there(context.place.device, model):
        try:
            found = calibrate(
                model,
                data.train,
                data.validation,
                plain,
                posterior=settings.posterior,
                temperature=settings.temperature,
                macs=macs,
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
    of = ""
    if data.target_scale is not None:
        of = ", of the standardized target"
        context.results.calibrate["notes"] = [*found.notes, _standardized(data.target_scale[1])]
    if found.better == "mean":
        context.note("on validation data, draws are no better than the mean: model.onnx predicts as well as model_mc.onnx")
    context.say(f"[dim]calibrated: {_told(found)}{of}[/]")
    return replace(small, model=_carrying(found.model, found.likelihood))


def _carrying(model: nn.Module, likelihood: Likelihood) -> nn.Module:
    """Attach a likelihood to the model and to the one inside it that a checkpoint holds; returns the model."""
    set_likelihood(bare(model), likelihood)
    return set_likelihood(model, likelihood)


def _standardized(deviation: float) -> str:
    """What turns the figures of a model that predicts a standardized target into those of the target."""
    return (
        "precisions and NLLs are of the standardized target; for the target's own units, multiply precisions by "
        f"{deviation**-2:.4g} and add {math.log(deviation):.4f} to NLLs"
    )


def _told(found: Calibrated) -> str:
    parts = []
    for what, one in (("mean", found.mean), ("samples", found.samples)):
        if found.likelihood.constant_noise:  # without it there is no NLL to compare with
            parts.append(f"{what} noise precision {one.value:.3g}, validation NLL {one.after:.4f} (cross-validated)")
        elif one.taken:
            parts.append(f"{what} temperature {one.value:.3g}, validation NLL {one.before:.4f} to {one.after:.4f}")
    told = "; ".join(parts) or "no temperature is needed"
    return f"{told} (posterior: {found.posterior})"


def predictors(model: nn.Module, data: Data, seed: int, samples: int) -> dict[str, Callable[[Any], Any]]:
    """Functions that predict by the mean and by draws, with the model's own likelihood."""
    own = own_likelihood(model, data.task, data.dim)
    generator = torch.Generator().manual_seed(seed)
    return {
        "mean": partial(mean_predict, model, task=own),
        "samples": partial(mc_predict, model, samples=samples, generator=generator, task=own),
    }


def promise_stage(context: Context, opened: Opened, small: Small) -> None:
    """Find what the validation data let the model promise: keep it in the folder, and report what was asked for."""
    settings, data, model = context.recipe.calibrate, opened.data, small.model
    likelihood = own_likelihood(model, data.task, data.dim)
    asked = settings.coverage is not None or settings.answer_above is not None
    found: dict[str, Promises] = {}
    macs = _figures.macs_of(model, opened.inputs)
    with _figures.there(context.place.device, model), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop")
        fits = _fits(model, data, context.place.device)
        if fits < min(len(data.validation), EXAMPLES):
            context.note(f"{KEPT} is from {fits:,} of {len(data.validation):,} validation examples: more do not fit in memory")
        known = _known(context, some(data.validation, fits), macs, asked)
        for who, (examples, samples) in known.items():
            its = likelihood.of_mean() if who == "mean" else likelihood
            predict = predictors(model, data, context.recipe.seed, samples)[who]
            seen = promises_of(predict, _batches(examples, context, model), its)
            found[who] = seen if who == "mean" else replace(seen, samples=samples)
    if line := _uneven(found["mean"], data.preprocessing.get("target")):
        context.warn(line)
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
            drawn = {"samples": promises.samples} if promises.samples else {}
            results.setdefault(name, {})[who] = {**promise.to_dict(), **drawn}


def _uneven(promises: Promises, names: Any) -> str | None:
    """A warning if the predicted standard deviations fit some targets much worse than others. names: of the targets, if any."""
    scores = promises.scores
    if scores is None or scores.dim() != 2 or len(scores) < LEAST:
        return None
    times = scores.square().mean(0).sqrt()
    least, most = int(times.argmin()), int(times.argmax())
    if float(times[most]) <= UNEVEN * float(times[least]):
        return None
    of = [repr(names[k]) if isinstance(names, list) else str(k) for k in (most, least)]
    return (
        f"errors of target {of[0]} are {float(times[most]):.2g} times the standard deviation predicted for them, those of "
        f"target {of[1]} {float(times[least]):.2g} times: with several targets, deviations say little about each one. "
        "Intervals (--coverage) have a width for each; --loss gaussian-nll, or a model for each, learns the deviations"
    )


def _known(context: Context, validation: Examples, macs: int, asked: bool) -> dict[str, tuple[Examples, int]]:
    """The validation examples to predict by the mean and by draws, and how many draws of each. "samples" is left out if no
    promise was asked for and draws would take long. asked: whether the recipe asks for a promise."""
    found = {"mean": (some(validation, EXAMPLES), 1)}
    most = MOST_MACS if asked else LATER_MACS
    if not asked and FEWEST_SAMPLES * min(FEWEST, len(validation)) * macs > most:
        context.note(
            f"{KEPT} holds no data on draws: no promise was asked for, and draws take long. To use svdc predict --coverage or "
            "--answer-above with draws, set calibrate.coverage or calibrate.answer_above in the recipe"
        )
        return found
    examples, samples = bounded(validation, macs, most)
    if len(examples) < min(len(validation), EXAMPLES):
        more = "" if asked else " (more if the recipe sets calibrate.coverage or calibrate.answer_above)"
        context.note(
            f"{KEPT}: draws were made for {len(examples):,} of {len(validation):,} validation examples, {samples} for each, "
            f"to save time{more}"
        )
    return {**found, "samples": (examples, samples)}


def measure_promises(context: Context, opened: Opened, small: Small) -> None:
    """Measure on the test data how well the promises are kept, for the report."""
    results, data, model = context.results.promises, opened.data, small.model
    if not results:
        return
    likelihood = own_likelihood(model, data.task, data.dim)
    macs = _figures.macs_of(model, opened.inputs)
    with _figures.there(context.place.device, model):
        test = promised_on(model, data, context.place.device)
        for who in ("mean", "samples"):
            promises = [stored[who] for stored in results.values() if who in stored]
            if not promises:
                continue
            samples = promises[0].get("samples", SAMPLES)  # as for the promise: it holds for no other number
            examples = test if who == "mean" else within(test, samples, macs)
            its = likelihood.of_mean() if who == "mean" else likelihood
            predict = predictors(model, data, context.recipe.seed, samples)[who]
            # Predicted once: draws take long, and all promises need the same predictions.
            seen = [(predict(inputs), target) for inputs, target in _batches(examples, context, model)()]
            for promise in promises:
                promise["test"] = measured(lambda prediction: prediction, lambda seen=seen: seen, its, from_dict(promise))


def _batches(examples: Examples, context: Context, model: nn.Module) -> Any:
    device = context.place.device
    size = fitting(model, examples, CHUNK, device=device)
    return lambda: examples.batches(size, device=device)


def promised_on(model: nn.Module, data: Data, device: Any = "cpu") -> Examples:
    """The test examples that the mean model's promises are measured on. model: on this device."""
    return some(data.test, _fits(model, data, device))


def _fits(model: nn.Module, data: Data, device: Any = "cpu") -> int:
    """The most examples whose predictions fit in memory; EXAMPLES or fewer. model: on this device."""
    inputs, _ = next(iter(data.validation.subset(torch.arange(1)).batches(1, device=device)))
    own = own_likelihood(model, data.task, data.dim)
    return max(1, min(EXAMPLES, MOST_NUMBERS // mean_predict(model, inputs, task=own).mean.numel()))


def bounded(examples: Examples, macs: int, most: int = MOST_MACS) -> tuple[Examples, int]:
    """As many examples, and draws of each, as `most` multiply-accumulates allow (FEWEST and FEWEST_SAMPLES at least)."""
    allowed = most // max(macs, 1)
    samples = max(FEWEST_SAMPLES, min(SAMPLES, allowed // max(min(len(examples), 2000), 1)))
    return within(examples, samples, macs, most), samples


def within(examples: Examples, samples: int, macs: int, most: int = MOST_MACS) -> Examples:
    """As many examples as `most` multiply-accumulates allow with this many draws of each, FEWEST at least."""
    return some(examples, min(EXAMPLES, max(FEWEST, most // max(macs, 1) // samples)))
