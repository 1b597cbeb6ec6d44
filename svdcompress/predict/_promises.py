"""What a run's validation data promise about its predictions: which inputs to answer, sets of classes, intervals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from svdcompress.calibrate import AnswerAbove, ConformalIntervals, ConformalSets, Promises, load_promises
from svdcompress.errors import CheckpointError, DataError, UsageError, shortened
from svdcompress.likelihoods import likelihood_for
from svdcompress.pipeline import KEPT, OpenRun

MOST_CLASSES = 10_000_000
"""More classes than any run has: a number above it is damaged."""


@dataclass(frozen=True)
class Wanted:
    """The promises to make about predictions, settled before anything is predicted."""

    path: Path
    promises: Promises
    answers: AnswerAbove | None
    coverage: ConformalSets | ConformalIntervals | None

    def add(self, opened: OpenRun, arrays: Mapping[str, np.ndarray], told: dict[str, Any]) -> dict[str, np.ndarray]:
        """Further arrays of predictions: `answered` (bool), `set` (bool, in the mean's shape), `lower` and `upper`.

        told: receives what was promised. Raises CheckpointError if the promises are for other classes or targets.
        """
        mean, likelihood = torch.from_numpy(arrays["mean"]), likelihood_for(opened.recipe.task, opened.dim)
        if self.promises.labels is not None and self.promises.classes != (classes := mean.shape[opened.dim]):
            raise CheckpointError(
                f"{self.path}: made for {shortened(str(self.promises.classes), 20)} classes, but the run has {classes}"
            )
        found: dict[str, np.ndarray] = {}
        drawn = {"samples": self.promises.samples} if self.promises.samples else {}
        if self.answers is not None:
            found["answered"] = (likelihood.confidence(mean.double()) >= self.answers.threshold).numpy()
            told["answer_above"] = {**self.answers.to_dict(), **drawn, "share": float(found["answered"].mean())}
        if self.coverage is not None:
            told["coverage"] = {**self.coverage.to_dict(), **drawn}
            if isinstance(self.coverage, ConformalSets):
                held = self.coverage.sets(mean, opened.dim)
                found["set"] = held.numpy()
                told["coverage"]["mean_size"] = float(held.sum(opened.dim).double().mean())
            else:
                widths = len(self.coverage.widths)
                if widths > 1 and (mean.dim() != 2 or mean.shape[1] != widths):
                    raise CheckpointError(f"{self.path}: made for {widths} targets, but the run has another number")
                lower, upper = self.coverage.intervals(mean, torch.from_numpy(arrays["variance"]).sqrt())
                found |= {"lower": lower.numpy(), "upper": upper.numpy()}
        return found


def wanted(
    opened: OpenRun, answer_above: float | None, coverage: float | None, samples: int, told: dict[str, Any]
) -> Wanted | None:
    """The promises to make; None if there are none.

    answer_above, coverage: if None, what the run's recipe asks for. samples: draws for each input, if draws predict; with
        fewer than were made for the validation data, nothing is promised. told: its "by" says what predicts ("samples" or
        "mean"); receives, under "not_promised", why something that the recipe asks for is not promised.
    Raises CheckpointError for a run that kept nothing of its validation data, UsageError and DataError for what is asked for
    here and cannot be promised.
    """
    asked = {"answer_above": answer_above, "coverage": coverage}
    levels = {name: getattr(opened.recipe.calibrate, name) if level is None else level for name, level in asked.items()}
    here = {name for name, level in asked.items() if level is not None}
    path = opened.folder / KEPT
    if not any(level is not None for level in levels.values()) or (not here and not path.is_file()):
        return None
    promises = _promises(path, opened, told["by"])
    if samples < promises.samples:
        problem = (
            f"samples: {samples:,}; the promises were made with {promises.samples:,} draws, and do not hold for fewer: use "
            f"--samples {promises.samples} or more"
        )
        if here:
            raise UsageError(problem)
        told["not_promised"] = problem
        return None
    made: dict[str, Any] = dict.fromkeys(levels)
    problems = []
    for name, level in levels.items():
        try:
            made[name] = None if level is None else getattr(promises, name)(level)
        except (DataError, UsageError) as error:
            if name in here:
                raise
            problems.append(str(error))  # the run went on without it, too
    if problems:
        told["not_promised"] = "; ".join(problems)
    return Wanted(path, promises, made["answer_above"], made["coverage"])


def _promises(path: Path, opened: OpenRun, by: str) -> Promises:
    """Load what the run kept. Raises CheckpointError if it belongs to another run, or holds what no run writes.

    by: what predicts, "samples" or "mean".
    """
    try:
        found = load_promises(opened.file(KEPT, own=True), by)
    except (OverflowError, RecursionError) as error:
        raise CheckpointError(f"{path}: not readable ({error})") from error
    problem = ""
    if found.scores is not None and (found.labels is not None) != likelihood_for(opened.recipe.task, opened.dim).classes:
        problem = f"its scores do not fit the run's task {opened.recipe.task} (the file says {shortened(found.task, 60)})"
    elif found.labels is not None and not 0 < found.classes <= MOST_CLASSES:
        problem = f"made for {shortened(str(found.classes), 20)} classes, which no run writes"
    for name, tensor in found.tensors().items():
        right = {"right": tensor.dtype == torch.bool, "labels": tensor.dtype == torch.int64}
        several = name == "scores" and found.labels is None and tensor.dim() == 2  # targets, a column for each
        if not right.get(name, tensor.is_floating_point()) or (tensor.dim() != 1 and not several):
            problem = problem or f"{name} is {tensor.dtype} of the shape {tuple(tensor.shape)}, which no run writes"
        elif not bool(tensor.isfinite().all()):
            problem = problem or f"{name} holds values that are not finite"
        elif name == "labels" and len(tensor) and not 0 <= int(tensor.min()) <= int(tensor.max()) < found.classes:
            problem = problem or "some labels are not classes"
    if problem:
        raise CheckpointError(f"{path}: {problem}")
    return found
