"""From which confidence on to answer, so that what is answered is right at a wanted rate."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from svdcompress.errors import DataError, UsageError

CONFIDENCE = 0.95
"""Of the promise: the chance, over validation data, that it holds."""

STARTS = 5
"""Sequences of thresholds at most."""

STEPS = 100
"""Thresholds that are tried from each start."""


@dataclass(frozen=True)
class AnswerAbove:
    """Answer where the confidence is at least `threshold`.

    accuracy: what was wanted. measured: accuracy on what is answered of the validation data; answered: share of these; bound:
    the accuracy that holds with `confidence`; examples: of the validation data.
    """

    accuracy: float
    threshold: float
    measured: float
    answered: float
    bound: float
    confidence: float
    examples: int

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {"kind": "answers", **asdict(self)}


def tail(errors: int, count: int, rate: float) -> float:
    """P(Binomial(count, rate) <= errors), the p-value of `errors` were the error rate `rate`: the test of Clopper & Pearson."""
    if errors >= count:
        return 1.0
    k = torch.arange(errors + 1, dtype=torch.float64)
    ways = math.lgamma(count + 1) - torch.lgamma(k + 1) - torch.lgamma(count - k + 1)
    return min(1.0, math.exp(float((ways + k * math.log(rate) + (count - k) * math.log1p(-rate)).logsumexp(0))))


def lower_bound(errors: int, count: int, delta: float) -> float:
    """The accuracy below which so few errors would have a chance of less than `delta` (Clopper & Pearson 1934, one side)."""
    if errors >= count:
        return 0.0
    low, high = errors / count if errors else 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if 0 < middle < 1 and tail(errors, count, middle) > delta else (low, middle)
    return 1 - high


def least_answered(accuracy: float, delta: float) -> int:
    """Examples without an error that it takes to say that the accuracy is above the wanted one."""
    return max(1, math.ceil(math.log(delta) / math.log(accuracy) - 1e-9))


def answer_above(confidence: Tensor, right: Tensor, accuracy: float, *, sure: float = CONFIDENCE) -> AnswerAbove:
    """The threshold on confidence that answers most, such that accuracy on what is answered is at least the wanted one.

    confidence: (N,) of validation examples that the model was not trained on; right: (N,) of yes or no; accuracy: wanted,
    between 0 and 1; sure: the chance, over validation data, that the promise holds.

    Thresholds are tested one after the other by exact binomial tests, towards more answers, until one fails: learn then test
    with fixed sequences (Angelopoulos et al. 2021, arXiv 2110.01052, sec. 2.3), from several starts that do not depend on the
    labels, which share the chance of an error. The highest share that passed is taken. The promise is about inputs like the
    validation data; it does not hold under shift.

    Raises UsageError for an accuracy or chance that is not between 0 and 1, DataError where no threshold reaches the accuracy:
    it says which accuracy could be had, or how many examples it takes.
    """
    for name, value in (("accuracy", accuracy), ("sure", sure)):
        if not 0 < value < 1:
            raise UsageError(f"{name}: {value!r}; a share above 0 and below 1 is needed, as in 0.99")
    count = len(confidence)
    if len(right) != count or not count:
        raise DataError(f"right: {len(right)} of them for {count} confidences")
    ordered, order = confidence.detach().double().flatten().sort(descending=True)
    wrong = (~right.detach().bool().flatten().to(order.device)[order]).long().cumsum(0)
    starts = _starts(count, accuracy, 1 - sure)
    delta = (1 - sure) / len(starts)
    least = starts[0]
    if least > count:
        raise DataError(
            f"answer_above: {accuracy:g} cannot be promised from {count} validation examples: it takes {least} without an error"
            " (data.validation makes the split larger), or a smaller accuracy"
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
            f"answer_above: no confidence reaches an accuracy of {accuracy:g} with the {count} validation examples; "
            f"{math.floor(1000 * reached) / 1000:g} is the most that they could promise"
        )
    errors = int(wrong[best - 1])
    return AnswerAbove(
        accuracy=float(accuracy),
        threshold=float(ordered[best - 1]),
        measured=1 - errors / best,
        answered=best / count,
        bound=lower_bound(errors, best, delta),
        confidence=float(sure),
        examples=count,
    )


def _starts(count: int, accuracy: float, delta: float) -> list[int]:
    """Numbers of answers that sequences start from: the least with which a test can pass, and doubles of it."""
    number = max(1, min(STARTS, 1 + int(math.log2(max(count / least_answered(accuracy, delta), 1)))))
    least = least_answered(accuracy, delta / number)
    return [least] + [least * 2**k for k in range(1, number) if least * 2**k <= count]


def _shares(ordered: Tensor, start: int) -> list[int]:
    """Numbers of answers from a start on, at most STEPS; equal confidences are answered together."""
    count = len(ordered)
    numbers = torch.linspace(start, count, STEPS).round().long().unique()
    return sorted({int((ordered >= ordered[number - 1]).sum()) for number in numbers.tolist()})
