"""Predicts what a run's deterministic file will hold besides weights, so that its size can be measured before the run's end."""

from __future__ import annotations

from typing import Any

from svdcompress.calibrate import AnswerAbove, ConformalIntervals, ConformalSets, targets_of
from svdcompress.likelihoods import Binary, Classification, Gaussian, Likelihood, likelihood_for
from svdcompress.pipeline._baked import Baked
from svdcompress.pipeline._export import file_metadata
from svdcompress.pipeline._promised import promised, sets_of
from svdcompress.recipe import Recipe
from svdcompress.sources import Data

SOME = 0.1234567890123456
"""A number with as many digits as those that calibration finds."""

SHORT = 0.1234
"""A number as `file_metadata` rounds them."""

MANY = 10_000


def foreseen(recipe: Recipe, data: Data, units: Baked) -> dict[str, Any]:
    """Options of `export_onnx` for a small model as the files hold it: metadata, a temperature and further outputs as long as
    the run's own will be. The numbers are placeholders, as the real ones are not known yet."""
    plain: Any = likelihood_for(data.task, data.dim)
    counts = dict.fromkeys(("parameters", "nonzero", "weights_nonzero", "macs"), MANY)
    some = plain.metrics(SHORT * MANY, SHORT * MANY, MANY)
    results = {
        "dense": {name: count * (1 + SHORT) for name, count in counts.items()},
        "sparse": {**counts, "metrics": dict.fromkeys(some, SHORT)},
        "promises": _promises(recipe, data, plain),
    }
    metadata = file_metadata(results, units.preprocessing, data.classes, data.task)
    tempered = recipe.calibrate.temperature and isinstance(plain, Classification | Binary | Gaussian)
    own = type(plain)(plain.dim, 1 + SOME) if tempered else likelihood_for(data.task, data.dim, SOME)
    further = sets_of(results, "mean", own) if recipe.export.sets else None
    return {"metadata": {**metadata, **promised(results, "mean")}, "task": own, "further": further}


def _promises(recipe: Recipe, data: Data, likelihood: Likelihood) -> dict[str, Any]:
    settings = recipe.calibrate
    promises: dict[str, Any] = {}
    if settings.coverage is not None and (likelihood.classes or not likelihood.probabilities):
        if likelihood.classes:
            some: ConformalSets | ConformalIntervals = ConformalSets(settings.coverage, SOME, MANY)
        else:
            each = targets_of(next(iter(data.validation.batches(1)))[1])
            some = ConformalIntervals(settings.coverage, SOME if each == 1 else (SOME,) * each, MANY)
        promises["coverage"] = {"mean": some.to_dict()}
    if settings.answer_above is not None:
        found = AnswerAbove(settings.answer_above, SOME, SOME, SOME, SOME, SHORT, MANY)
        promises["answer_above"] = {"mean": found.to_dict()}
    return promises
