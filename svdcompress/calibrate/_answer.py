"""The confidence from which to answer, so that answers are right at a wanted rate."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from svdcompress.errors import DataError, UsageError, counted

CONFIDENCE = 0.95
"""The probability, over random validation data, that the promise holds."""

STARTS = 5
"""The most sequences of thresholds that are tested."""

STEPS = 100
"""The most thresholds that are tested from each start."""


DOUBT, ULPS = 1e-5, 2.4e-7
"""Confidences p count as equal if they differ by no more than DOUBT (1 - p) + ULPS: so far apart may be what another batch
size, onnxruntime, or the float32 outputs of a file make of one input."""


@dataclass(frozen=True)
class AnswerAbove:
    """A promise of accuracy: answer inputs whose confidence is at least `threshold`, which equals no example's.

    accuracy: the wanted one. measured: the accuracy on those validation examples that are answered; answered: their share;
    bound: the accuracy that holds with probability `confidence`; examples: the number of validation examples.
    """

    accuracy: float
    threshold: float
    measured: float
    answered: float
    bound: float
    confidence: float
    examples: int

    def to_dict(self) -> dict[str, Any]:
        """All fields, JSON-able."""
        return {"kind": "answers", **asdict(self)}


def tail(errors: int, count: int, rate: float) -> float:
    """P(Binomial(count, rate) <= errors), the p-value of `errors` at an error rate of `rate`: the test of Clopper & Pearson."""
    if errors >= count:
        return 1.0
    k = torch.arange(errors + 1, dtype=torch.float64)
    ways = math.lgamma(count + 1) - torch.lgamma(k + 1) - torch.lgamma(count - k + 1)
    return min(1.0, math.exp(float((ways + k * math.log(rate) + (count - k) * math.log1p(-rate)).logsumexp(0))))


def lower_bound(errors: int, count: int, delta: float) -> float:
    """The accuracy below which so few errors have a probability of less than `delta` (Clopper & Pearson 1934, one-sided)."""
    if errors >= count:
        return 0.0
    low, high = errors / count if errors else 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if 0 < middle < 1 and tail(errors, count, middle) > delta else (low, middle)
    return 1 - high


def least_answered(accuracy: float, delta: float) -> int:
    """The number of examples without an error that are needed to show that the accuracy is above the wanted one."""
    return max(1, math.ceil(math.log(delta) / math.log(accuracy) - 1e-9))


def answer_above(confidence: Tensor, right: Tensor, accuracy: float, *, sure: float = CONFIDENCE) -> AnswerAbove:
    """The threshold on confidence that answers the most inputs while the accuracy on these is at least the wanted one.

    confidence: (N,) of validation examples that the model was not trained on; right: (N,) whether the model is right; accuracy:
    the wanted one, between 0 and 1; sure: the probability, over random validation data, that the promise holds.

    Thresholds are tested one after the other by exact binomial tests, towards more answers, until one fails: learn then test
    with fixed sequences (Angelopoulos et al. 2021, arXiv 2110.01052, sec. 2.3), from several starts that do not depend on the
    labels and share the probability of an error. The largest share of answers that passed is taken. The promise is about inputs
    like the validation data; it does not hold under shift.

    Raises UsageError for an accuracy or a `sure` that is not between 0 and 1, DataError for NaN, or if no threshold reaches
    the accuracy: it says which accuracy is possible, or how many examples are needed.
    """
    for name, value in (("accuracy", accuracy), ("sure", sure)):
        if not 0 < value < 1:
            raise UsageError(f"{name}: {value!r}; a share above 0 and below 1 is needed, as in 0.99")
    count = len(confidence)
    if len(right) != count or not count:
        raise DataError(f"right: {len(right)} values for {count} confidences")
    if missing := int(confidence.isnan().sum()):
        raise DataError(f"confidence: {missing} of {count} values are NaN, which no threshold compares with")
    ordered, order = confidence.detach().double().flatten().sort(descending=True)
    wrong = (~right.detach().bool().flatten().to(order.device)[order]).long().cumsum(0)
    starts = _starts(count, accuracy, 1 - sure)
    delta = (1 - sure) / len(starts)
    least = starts[0]
    if least > count:
        raise DataError(
            f"answer_above: {accuracy:g} cannot be promised from {counted(count, 'validation example')}: it takes {least} "
            "without an error (data.validation makes the split larger), or a smaller accuracy"
        )
    best = 0
    for start in starts:
        for answered in _shares(ordered, start):
            if tail(int(wrong[answered - 1]), answered, 1 - accuracy) > delta:
                break
            best = max(best, answered)
    if not best:
        reached = max(lower_bound(int(wrong[number - 1]), number, delta) for number in _shares(ordered, least))
        raise DataError(
            f"answer_above: no confidence reaches an accuracy of {accuracy:g} with the {counted(count, 'validation example')}; "
            f"{math.floor(1000 * reached) / 1000:g} is the most that they can promise"
        )
    errors = int(wrong[best - 1])
    return AnswerAbove(
        accuracy=float(accuracy),
        threshold=_below(ordered, best),
        measured=1 - errors / best,
        answered=best / count,
        bound=lower_bound(errors, best, delta),
        confidence=float(sure),
        examples=count,
    )


def _starts(count: int, accuracy: float, delta: float) -> list[int]:
    """Numbers of answers that sequences start from: the smallest with which a test can pass, doubled again and again."""
    number = max(1, min(STARTS, 1 + int(math.log2(max(count / least_answered(accuracy, delta), 1)))))
    least = least_answered(accuracy, delta / number)
    return [least] + [least * 2**k for k in range(1, number) if least * 2**k <= count]


def _shares(ordered: Tensor, start: int) -> list[int]:
    """Numbers of answers to test from a start on, at most STEPS; (nearly) equal confidences are answered together."""
    count = len(ordered)
    numbers = torch.linspace(start, count, STEPS, dtype=torch.float64).round().long().unique()
    apart = (ordered[:-1] - ordered[1:]) > _equal(ordered[:-1])
    ends = torch.cat([apart.nonzero().flatten() + 1, torch.tensor([count], device=apart.device)])
    return ends[torch.searchsorted(ends, numbers.to(ends.device))].unique().tolist()


def _below(ordered: Tensor, answered: int) -> float:
    """The threshold that answers this many: so far below the last example, and above the next, that rounding moves neither
    across it."""
    last = ordered[answered - 1]
    below = _equal(last)
    if answered < len(ordered):
        below = torch.minimum(below, (last - ordered[answered]) / 2)
    return float(last - below)


def _equal(confidence: Tensor) -> Tensor:
    return DOUBT * (1 - confidence) + ULPS
