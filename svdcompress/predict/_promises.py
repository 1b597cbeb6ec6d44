"""What a run's validation data promise of its predictions: whom to answer, sets of classes, intervals."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from svdcompress.calibrate import ConformalSets, Promises, load_promises
from svdcompress.errors import CheckpointError, UsageError, shortened
from svdcompress.likelihoods import likelihood_for
from svdcompress.pipeline import KEPT, OpenRun


def add_promises(
    opened: OpenRun,
    arrays: Mapping[str, np.ndarray],
    answer_above: float | None,
    coverage: float | None,
    samples: int,
    told: dict[str, Any],
) -> dict[str, np.ndarray]:
    """Further arrays of predictions: `answered` (bool), `set` (0 and 1, as the mean), `lower` and `upper`.

    answer_above, coverage: None is what the run's recipe asked for. samples: draws that the arrays come from, where draws
        predicted: with fewer than of the validation data nothing is promised. told: gets what was promised, or under
        "not_promised" why what the recipe asked for is not; its "by" says what predicted ("samples" or "mean").
    Raises CheckpointError for a run that kept nothing of its validation data, UsageError and DataError for what cannot be
    promised.
    """
    settings = opened.recipe.calibrate
    answer_above, asked = settings.answer_above if answer_above is None else answer_above, answer_above is not None
    coverage, asked = settings.coverage if coverage is None else coverage, asked or coverage is not None
    path = opened.folder / KEPT
    if (answer_above is None and coverage is None) or (not asked and not path.is_file()):
        return {}
    mean, likelihood = torch.from_numpy(arrays["mean"]), likelihood_for(opened.recipe.task, opened.dim)
    promises = _promises(path, opened, told.get("by", "samples"), mean.shape[opened.dim] if likelihood.classes else None)
    found: dict[str, np.ndarray] = {}
    if samples < promises.samples:
        problem = (
            f"samples: {samples:,}; what validation data promise is of {promises.samples:,} draws, and fewer do not keep it: "
            f"--samples {promises.samples} or more"
        )
        if asked:
            raise UsageError(problem)
        told["not_promised"] = problem
        return {}
    drawn = {"samples": promises.samples} if promises.samples else {}
    if answer_above is not None:
        answers = promises.answer_above(answer_above)
        found["answered"] = (likelihood.confidence(mean.double()) >= answers.threshold).numpy()
        told["answer_above"] = {**answers.to_dict(), **drawn, "share": float(found["answered"].mean())}
    if coverage is not None:
        promise = promises.coverage(coverage)
        told["coverage"] = {**promise.to_dict(), **drawn}
        if isinstance(promise, ConformalSets):
            held = promise.sets(mean, opened.dim)
            found["set"] = held.numpy()
            told["coverage"]["mean_size"] = float(held.sum(opened.dim).double().mean())
        else:
            lower, upper = promise.intervals(mean, torch.from_numpy(arrays["variance"]).sqrt())
            found |= {"lower": lower.numpy(), "upper": upper.numpy()}
    return found


def _promises(path: Path, opened: OpenRun, by: str, classes: int | None) -> Promises:
    """What the run kept. Raises CheckpointError where it is not of this run, or holds what no run writes.

    by: "samples" or "mean", what predicts. classes: how many the model has, if it has any.
    """
    try:
        found = load_promises(path, by)
    except (OverflowError, RecursionError) as error:
        raise CheckpointError(f"{path}: not readable ({error})") from error
    problem = ""
    if found.scores is not None and (found.labels is None) != (classes is None):
        problem = f"of the task {shortened(found.task, 60)}, the run of {opened.recipe.task}"
    elif found.labels is not None and found.classes != classes:
        problem = f"of {shortened(str(found.classes), 20)} classes, the run of {classes}"
    for name, tensor in found.tensors().items():
        right = {"right": tensor.dtype == torch.bool, "labels": tensor.dtype == torch.int64}
        if not right.get(name, tensor.is_floating_point()) or tensor.dim() != 1:
            problem = problem or f"{name} is {tensor.dtype} of the shape {tuple(tensor.shape)}, which no run writes"
        elif not bool(tensor.isfinite().all()):
            problem = problem or f"{name} holds values that are not finite"
        elif name == "labels" and len(tensor) and not 0 <= int(tensor.min()) <= int(tensor.max()) < found.classes:
            problem = problem or "there are labels that are no class"
    if problem:
        raise CheckpointError(f"{path}: {problem}")
    return found
