"""What a run's validation data promise of its predictions: whom to answer, sets of classes, intervals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from svdcompress.calibrate import ConformalSets, load_promises
from svdcompress.likelihoods import likelihood_for
from svdcompress.pipeline import KEPT, OpenRun


def add_promises(
    opened: OpenRun,
    arrays: Mapping[str, np.ndarray],
    answer_above: float | None,
    coverage: float | None,
    told: dict[str, Any],
) -> dict[str, np.ndarray]:
    """Further arrays of predictions: `answered` (bool), `set` (0 and 1, as the mean), `lower` and `upper`.

    answer_above, coverage: None is what the run's recipe asked for. told: gets what was promised; its "by" says what predicted
        ("samples" or "mean").
    Raises CheckpointError for a run that kept nothing of its validation data, UsageError and DataError for what cannot be
    promised.
    """
    settings = opened.recipe.calibrate
    answer_above, asked = settings.answer_above if answer_above is None else answer_above, answer_above is not None
    coverage, asked = settings.coverage if coverage is None else coverage, asked or coverage is not None
    path = opened.folder / KEPT
    if (answer_above is None and coverage is None) or (not asked and not path.is_file()):
        return {}
    promises, likelihood = load_promises(path, told.get("by", "samples")), likelihood_for(opened.recipe.task, opened.dim)
    mean = torch.from_numpy(arrays["mean"])
    found: dict[str, np.ndarray] = {}
    if answer_above is not None:
        answers = promises.answer_above(answer_above)
        found["answered"] = (likelihood.confidence(mean.double()) >= answers.threshold).numpy()
        told["answer_above"] = {**answers.to_dict(), "share": float(found["answered"].mean())}
    if coverage is not None:
        promise = promises.coverage(coverage)
        told["coverage"] = promise.to_dict()
        if isinstance(promise, ConformalSets):
            held = promise.sets(mean, opened.dim)
            found["set"] = held.numpy()
            told["coverage"]["mean_size"] = float(held.sum(opened.dim).double().mean())
        else:
            lower, upper = promise.intervals(mean, torch.from_numpy(arrays["variance"]).sqrt())
            found |= {"lower": lower.numpy(), "upper": upper.numpy()}
    return found
