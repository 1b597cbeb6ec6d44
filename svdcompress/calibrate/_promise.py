"""What a run keeps of its validation data, so that it can promise a coverage or an accuracy later, whichever is requested."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from svdcompress.calibrate._answer import AnswerAbove, answer_above
from svdcompress.calibrate._conformal import (
    ConformalIntervals,
    ConformalSets,
    check_coverage,
    intervals_from,
    least_examples,
    scores,
    sets_from,
)
from svdcompress.errors import CheckpointError, DataError, UsageError
from svdcompress.files import parse_json, write_atomically
from svdcompress.likelihoods import Likelihood, Prediction
from svdcompress.uncertainty import Batches, gather

MOST = 20_000
"""The most validation examples that are kept, drawn with a fixed seed; with MOST_TARGETS each, these take 10 MB. Positions of
one thing count as examples."""

MOST_TARGETS = 64
"""The most targets of an example that each get their own interval width; more are positions of one thing, and share one."""


@dataclass(frozen=True)
class Promises:
    """The results of one predictor (the mean, or draws) on validation data; (N,) each, scores of several targets (N, targets).

    task: the name of the likelihood. classes: how many. labels: the true classes, if there are classes.
    confidence, right: of each prediction, if it can be right or wrong. scores: conformal scores of the truths.
    samples: draws of each example if draws predict; predictions from fewer keep no promise. 0: none, or not known.
    """

    task: str
    classes: int
    confidence: Tensor | None = None
    right: Tensor | None = None
    scores: Tensor | None = None
    labels: Tensor | None = None
    samples: int = 0

    def coverage(self, coverage: float) -> ConformalSets | ConformalIntervals:
        """Sets or intervals with this coverage. Raises UsageError, DataError (too few examples) as `conformal_sets` does."""
        if self.scores is None:
            raise UsageError(f"coverage: task {self.task!r} has neither prediction sets nor intervals")
        if line := out_of_reach(coverage):
            raise DataError(f"coverage: {line}")
        if self.labels is None:
            return intervals_from(self.scores, coverage)
        return sets_from(self.scores, self.labels, self.classes, coverage)

    def answer_above(self, accuracy: float) -> AnswerAbove:
        """The function `answer_above` on these data. Raises UsageError for tasks without right and wrong answers."""
        if self.confidence is None or self.right is None:
            raise UsageError(f"answer_above: task {self.task!r} has no right and wrong answers")
        return answer_above(self.confidence, self.right, accuracy)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are not None, by name."""
        found = {name: getattr(self, name) for name in ("confidence", "right", "scores", "labels")}
        return {name: value.contiguous() for name, value in found.items() if value is not None}


def out_of_reach(coverage: float) -> str:
    """Why a coverage cannot be promised however many validation examples there are, and what to do; "" if it can."""
    if (needed := least_examples(check_coverage(coverage))) <= MOST:
        return ""
    return (
        f"{coverage:g} cannot be promised: it takes {needed:,} validation examples, and the results of at most {MOST:,} are "
        f"kept; ask for a coverage of {MOST / (MOST + 1):.5f} or less"
    )


def promises_of(predict: Callable[[Any], Prediction], batches: Batches, likelihood: Likelihood) -> Promises:
    """Collect a predictor's results on validation data. likelihood: that of `predict`; a regression uses its noise.

    predict: from inputs to a prediction, as `mc_predict` makes it.
    """
    found = gather(predict, batches, likelihood)
    each = targets_of(next(iter(batches()))[1])
    if likelihood.probabilities or len(found.targets) != each * found.inputs:
        each = 1
    order = _drawn(len(found.targets) // each, each)
    mean, targets, variance = found.mean[order].double(), found.targets[order], found.variance[order].double()
    name = likelihood.name
    if likelihood.classes:
        truth = scores(mean).gather(1, targets.long().view(-1, 1)).squeeze(1)
        confidence, answer = mean.max(1)
        return Promises(name, mean.shape[1], confidence, answer == targets, truth, targets.long())
    if likelihood.probabilities:
        return Promises(name, 2, torch.maximum(mean, 1 - mean), (mean > 0.5) == (targets > 0.5))
    if likelihood.constant_noise:
        tau = getattr(likelihood, "tau", None)
        variance = variance + (0.0 if tau is None else 1 / float(tau))
    spread = variance.sqrt().clamp_min(torch.finfo(torch.float64).tiny)
    scored = (targets.double() - mean).abs() / spread
    return Promises(name, 0, scores=scored if each == 1 else scored.view(-1, each))


def targets_of(targets: Tensor) -> int:
    """How many targets each example of a regression has; 1 if they are not told apart. targets: of a batch, (N, ...)."""
    return targets.shape[1] if targets.dim() == 2 and targets.shape[1] <= MOST_TARGETS else 1


def _drawn(count: int, each: int) -> Tensor:
    """Which of `count` examples with `each` targets are kept: the positions of their targets, example by example."""
    examples = torch.randperm(count, generator=torch.Generator().manual_seed(0))[:MOST].sort().values
    return (examples[:, None] * each + torch.arange(each)).flatten()


def from_dict(stored: Mapping[str, Any]) -> ConformalSets | ConformalIntervals | AnswerAbove:
    """The promise from its `to_dict`; other keys are ignored."""
    kinds: dict[str, Any] = {"sets": ConformalSets, "intervals": ConformalIntervals, "answers": AnswerAbove}
    kind = kinds[stored["kind"]]
    settings = {field.name: stored[field.name] for field in fields(kind) if field.name in stored}
    for name in ("missing", "width"):
        if isinstance(settings.get(name), list):
            settings[name] = tuple(settings[name])
    return kind(**settings)


def save_promises(path: Path, promises: Mapping[str, Promises]) -> None:
    """Write promises, by the name of their predictor, to one safetensors file."""
    tensors = {f"{who}.{name}": t for who, one in promises.items() for name, t in one.tensors().items()}
    some = next(iter(promises.values()))
    # One entry: safetensors writes several in any order, but a repeated run must give the same bytes.
    known: dict[str, Any] = {"task": some.task, "classes": some.classes}
    samples = max(one.samples for one in promises.values())
    about = {"svdcompress-validation": json.dumps(known | ({"samples": samples} if samples else {}))}
    write_atomically(path, lambda place: save_file(tensors, str(place), about))


def load_promises(path: Path, who: str) -> Promises:
    """The results of one predictor. Raises CheckpointError for a file that is missing or of another kind."""
    try:
        with safe_open(str(path), "pt") as file:
            text = (file.metadata() or {}).get("svdcompress-validation")
            names = [name for name in file.keys() if name.startswith(f"{who}.")]  # noqa: SIM118
            tensors = {name.removeprefix(f"{who}."): file.get_tensor(name) for name in names}
        if text is None:
            raise ValueError("it does not hold a run's validation results")
        if not tensors:
            raise ValueError(
                f"it holds no results of {who!r}: to predict by draws, a run of a model this large needs calibrate.coverage or "
                "calibrate.answer_above in its recipe"
            )
        about = parse_json(text.encode())
        found = Promises(str(about["task"]), int(about["classes"]), **tensors)
        if who == "samples":
            found = replace(found, samples=int(about.get("samples", 0)))
        if len({len(tensor) for tensor in tensors.values()}) != 1:
            raise ValueError("its tensors differ in length")
        return found
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file; runs made with this version or later have one") from error
    except (OSError, SafetensorError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{path}: not readable ({error})") from error


def measured(
    predict: Callable[[Any], Prediction],
    batches: Batches,
    likelihood: Likelihood,
    promise: ConformalSets | ConformalIntervals | AnswerAbove,
) -> dict[str, Any]:
    """How a promise holds on other data. For sets and intervals `coverage` (with several targets also that of `each`) and
    `size` (classes in a set, standard deviations in `width`, on average); for answers `accuracy` (None if nothing is answered)
    and `answered`.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        seen = promises_of(predict, batches, likelihood)
    if isinstance(promise, AnswerAbove):
        if seen.confidence is None or seen.right is None:
            raise DataError("there are no answers")
        answered = seen.confidence >= promise.threshold
        right = float(seen.right[answered].double().mean()) if bool(answered.any()) else None
        return {"accuracy": right, "answered": float(answered.double().mean())}
    assert seen.scores is not None  # of a task that has promises of coverage
    if isinstance(promise, ConformalIntervals):
        held = (seen.scores <= torch.tensor(promise.widths, dtype=torch.float64)).double()
        found: dict[str, Any] = {"coverage": float(held.mean()), "size": sum(promise.widths) / len(promise.widths)}
        return found if held.dim() == 1 else {**found, "each": held.mean(0).tolist()}
    sizes = gather(predict, batches, likelihood).mean
    return {
        "coverage": float(promise.holds(seen.scores).double().mean()),
        "size": float(promise.sets(sizes).sum(1).double().mean()),
    }
