"""Checks of how sure a run's ONNX files are: promises and calibration, computed again from their outputs; see `_verify.py`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from svdcompress.calibrate import from_dict, measured
from svdcompress.export import read_metadata
from svdcompress.likelihoods import Likelihood, Prediction, own_likelihood
from svdcompress.pipeline._calibrate import SAMPLES, promised_on, within
from svdcompress.pipeline._checks import BATCH, MC_ONNX, ONNX, ROUNDED, Check, Material, Skip, rounded
from svdcompress.pipeline._figures import macs_of
from svdcompress.pipeline._onnx_model import OnnxModel, open_session, run
from svdcompress.pipeline._promised import NAMES, sets_of
from svdcompress.pipeline._some import some
from svdcompress.pipeline._uncertainty import row
from svdcompress.sources import Examples, example_inputs, fitting
from svdcompress.uncertainty import mean_predict

MOST_MACS = 10**11
"""The most multiply-accumulates of draws in one check: half a minute on one core."""

SIGMAS = 4.0
"""Standard errors by which a figure of other draws, and of a part of the examples, may differ."""

FEWEST = 30
"""The fewest answers that an accuracy is compared on."""

FILES = {"mean": ONNX, "samples": MC_ONNX}

ROW = "sparse, mean"


def promises(material: Material) -> Iterator[Check]:
    """What the files promise in their metadata, against the report."""
    for name, by in (material.results.get("promises") or {}).items():
        for who, stored in by.items():
            file = FILES[who]
            if not (material.opened.folder / file).is_file():
                continue  # an export that was not asked for; a file deleted since fails the check of digests
            told = read_metadata(material.path(file)).get(name)
            wanted = {key: value for key, value in stored.items() if key not in ("kind", "test")}
            found = {key: told.get(key) for key in wanted} if isinstance(told, Mapping) else None
            yield Check(f"promise: {name}", file, _brief(wanted), _brief(found), found == wanted)


def kept_by_mean(material: Material) -> Iterator[Check]:
    """Coverage and answers of the deterministic file on the test data."""
    made = _made(material, "mean")
    if not made:
        return
    path, opened = material.path(ONNX), material.opened
    test = promised_on(opened.model, opened.data)
    own = _of_file(opened.model, material)
    predict = partial(mean_predict, OnnxModel(path, material.units), task=own)
    one = max(1, material.loose * ROUNDED * len(test)) / len(test)
    for name, stored, found in _measured(made, predict, test, material, own):
        count = f"of {len(test):,} test examples"
        for figure, value in stored.items():
            if isinstance(value, int | float):
                allowed = one / max(stored.get("answered", 1.0), one) if figure == "accuracy" else one
                if figure == "size":  # rounding can add or remove a class or two of an example's set
                    allowed = 2 * one + 1e-6 * abs(value)
                yield _near(f"{name}: {figure} {count}", ONNX, value, found.get(figure), allowed)


def kept_by_samples(material: Material) -> Iterator[Check]:
    """The same of the Monte-Carlo file, with other draws than the run's and, if they take long, on a part of the examples."""
    made = _made(material, "samples")
    if not made:
        return
    path, opened = material.path(MC_ONNX), material.opened
    drawn = next(iter(made.values())).get("samples", SAMPLES)
    macs = macs_of(opened.model, example_inputs(opened.data.test, 1))
    test = within(promised_on(opened.model, opened.data), drawn, macs, MOST_MACS)
    own = own_likelihood(opened.model, opened.data.task, opened.data.dim)
    others: list[float] = []  # the share of numbers in each batch of sets or intervals that are not as promised
    for name, stored, found in _measured(made, _drawn(path, material, drawn, own, others), test, material, own):
        for figure in ("coverage", "answered", "accuracy"):
            value, count = stored.get(figure), float(len(test))
            if figure == "accuracy":
                count *= stored.get("answered") or 0.0
            if value is None or found.get(figure) is None or count < FEWEST:
                continue  # too few tell nothing
            rare = min(max(value, 1 / count), 1 - 1 / count)
            allowed = SIGMAS * math.sqrt(rare * (1 - rare) / count) + 1 / count
            yield _near(f"{name}: {figure} of {len(test):,} test examples", MC_ONNX, value, found[figure], allowed, told=True)
    if others:
        worst = max(others)
        yield Check("sets or intervals, not as promised", MC_ONNX, 0.0, worst, worst <= ROUNDED)


def calibration(material: Material) -> Iterator[Check]:
    """Calibration and other figures of the predictive distribution that the deterministic file gives."""
    stored = (material.results.get("uncertainty") or {}).get(ROW)
    count = (material.results.get("uncertainty_of") or {}).get("examples")
    if not stored or not count:
        return
    path, data = material.path(ONNX), material.opened.data
    test, known = some(data.test, count), some(data.validation, count)
    own = _of_file(material.opened.model, material)
    predict = partial(mean_predict, OnnxModel(path, material.units), task=own)
    size = fitting(material.opened.model, test, BATCH)
    found, _ = row(predict, test, known, data, size)
    one = max(1 / len(test), material.loose * ROUNDED)
    known_already = ("error", "nll", "rmse") if own.probabilities else ("rmse",)  # `_checks.errors` compares these
    for name, value in found.items():
        both = isinstance(stored.get(name), int | float) and isinstance(value, int | float)
        if both and name not in known_already:
            share = {"coverage": one, "ece": 2 * one}.get(name, 0.0)
            allowed = share + material.loose * rounded(name, stored[name], data)
            yield _near(f"calibration: {name} of {len(test):,} test examples", ONNX, stored[name], value, allowed)


def _made(material: Material, who: str) -> dict[str, Mapping[str, Any]]:
    """The promises of one predictor that were measured on test data, by their name."""
    found = {name: by[who] for name, by in (material.results.get("promises") or {}).items() if who in by}
    return {name: stored for name, stored in found.items() if stored.get("test")}


def _measured(
    made: Mapping[str, Mapping[str, Any]], predict: Callable[[Any], Any], test: Examples, material: Material, own: Likelihood
) -> Iterator[tuple[str, Mapping[str, Any], dict[str, Any]]]:
    """The name, the stored and the measured figures of each promise."""
    size = fitting(material.opened.model, test, BATCH)
    seen = [(predict(inputs), target) for inputs, target in test.batches(size)]
    for name, stored in made.items():
        yield name, stored["test"], measured(lambda prediction: prediction, lambda: seen, own, from_dict(stored))


def _of_file(model: nn.Module, material: Material) -> Likelihood:
    """The mean model's likelihood as it reads the file's outputs, which include temperatures."""
    own = own_likelihood(model, material.opened.data.task, material.opened.data.dim).of_mean()
    return own if own.constant_noise else own.plain()


def _drawn(path: Any, material: Material, samples: int, own: Likelihood, others: list[float]) -> Callable[[Any], Prediction]:
    """Predicts with the Monte-Carlo file, in the units of the model's outputs. others: receives, for each batch, the share of
    the file's own sets or intervals that differ from what the report promises for its mean and variance."""
    session = open_session(path)
    names = [value.name for value in session.get_outputs()]
    if "mean" not in names:
        raise Skip("the file has no output 'mean'")
    target = material.units.target
    shift, scale = (0.0, 1.0) if target is None else target
    promised = sets_of(material.results, "samples", own) if set(NAMES) & set(names) else None

    def predict(inputs: Any) -> Prediction:
        arrays = run(session, material.units.inputs(inputs), path, samples=np.array(samples, np.int64))
        outputs = dict(zip(names, map(torch.from_numpy, arrays), strict=True))
        if promised is not None:
            # The file's ends are computed from its mean before that was rounded.
            allowed = 1e-6 * (1 + outputs["mean"].abs()) + 1e-4 * outputs["variance"].clamp_min(0).sqrt()
            gaps = [(value.float() - outputs[name]).abs() for name, value in promised(outputs).items()]
            others.append(max(float((~(gap <= allowed)).float().mean()) for gap in gaps))
        mean: Tensor = (outputs["mean"].double() - shift) / scale
        spread = {name: outputs[name].double() / scale**2 for name in ("variance", "epistemic") if name in outputs}
        variance = spread["variance"]
        epistemic = spread.get("epistemic", variance)  # read only where noise is constant: those files have it
        return Prediction(material.opened.recipe.task, samples, mean, variance, variance - epistemic, epistemic)

    return predict


def _near(name: str, file: str, stored: float, found: Any, allowed: float, told: bool = False) -> Check:
    passed = found is not None and abs(found - stored) <= allowed + 1e-9
    return Check(name, file, stored, found, passed, f"other draws; allowed: {allowed:.2g}" if told else "")


def _brief(promise: Mapping[str, Any] | None) -> Any:
    """The first numbers of a promise."""
    return None if promise is None else {key: value for key, value in promise.items() if isinstance(value, int | float)}
