"""How much error a compressed model may add, and whether validation data can show that it added no more."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from svdcompress.uncertainty import paired_means, paired_parts, paired_rmse, paired_shares

PER_NAT = 0.45
"""The rise in error for each nat that the NLL rises as a network is compressed: 0.31 to 0.34 for the LeNets on MNIST in
benchmarks/results/evaluate.md, about 0.45 for the digits' trials of seeds 4 and 5, which no stored result uses. This is the
more cautious of the two."""

LEAST = 1e-12
"""The RMSE that stands for zero, as of a model that is compared with its own answers."""

TOLD = 0.5
"""The drop, in points of error or percent of RMSE, that must be distinguishable from chance where no budget sets one."""


@dataclass(frozen=True)
class Losses:
    """What each validation example adds to a model's error.

    parts: (N,) wrong answers (wrong positions, where an example has several) or squared errors. numbers: (N,) how many values
    or positions each example has. probabilities: True for wrong answers, False for squared errors. nll: (M,) mean negative
    log likelihood in nats of each validation example, then of training examples, with the best temperature for probabilities;
    it compares models where errors are too few. None where it was not computed. finite: whether all outputs were, as far as
    errors and NLL tell.
    """

    parts: Tensor
    numbers: Tensor
    probabilities: bool
    nll: Tensor | None = None
    finite: bool = True

    @property
    def graded(self) -> bool:
        """Whether examples can be partly wrong: where any has several positions, some share of them is wrong."""
        return bool((self.numbers != 1).any())

    @property
    def far(self) -> float:
        """What an example with the most positions adds to the share of wrong ones if it goes wrong as a whole, in examples of
        average length."""
        return float(self.numbers.max() / self.numbers.double().mean())

    @property
    def error(self) -> float:
        """Percent of wrong answers, or the RMSE in the units of the squares (LEAST at least, because drops are relative to
        it)."""
        mean = float(self.parts.sum() / self.numbers.sum())
        return 100 * mean if self.probabilities else max(math.sqrt(mean), LEAST)

    def held_out(self, before: Losses) -> Losses:
        """A copy with the training examples' NLL taken from `before`: for a model that only trained further, a better fit to
        them is no evidence."""
        if self.nll is None or before.nll is None:
            return self
        return replace(self, nll=torch.cat([self.nll[: len(self.parts)], before.nll[len(before.parts) :]]))


@dataclass(frozen=True)
class Verdict:
    """How a model stands against a budget.

    error: percent, or RMSE. drop: the error lost, in points, or in percent of the dense RMSE. upper: the upper bound on the
    drop at the budget's confidence, from the paired differences of the validation examples (None: a single example gives no
    bound). met: whether the model is within the budget.
    estimate: the drop estimated from the NLL, where there are too few examples to judge by their errors; else None. at_most:
    the upper bound on the estimate at the same confidence.
    """

    error: float
    drop: float
    upper: float | None
    met: bool
    estimate: float | None = None
    at_most: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)


@dataclass(frozen=True)
class Budget:
    """The error that may be lost on validation data.

    max_drop: points of error, or percent of the dense model's RMSE. max_error: a bound on the error (percent) or RMSE itself.
    None: no bound. confidence: of the one-sided upper bound on the drop, which must be within the budget.

    With too few validation examples for that (see `needed`), the bound on the drop that `estimated` derives from the NLL must
    be within the budget, and so must the lower bound by the errors. Without an NLL, the measured drop must be, with the
    allowed drop rounded up to whole examples (at least one); where examples have several positions, the upper bound decides
    after all, even if it is wide.

    >>> Budget(max_drop=0.5).allowed(2.0)
    0.5
    """

    max_drop: float | None = None
    max_error: float | None = None
    confidence: float = 0.9

    @property
    def given(self) -> bool:
        """Whether any bound is set."""
        return self.max_drop is not None or self.max_error is not None

    def allowed(self, dense_error: float, probabilities: bool = True) -> float:
        """The allowed drop for a dense model with this error: the smaller of the two bounds, infinite without any."""
        bounds = [] if self.max_drop is None else [self.max_drop]
        if self.max_error is not None:
            over = self.max_error - dense_error
            bounds.append(over if probabilities else 100 * over / max(dense_error, LEAST))
        return min(bounds, default=math.inf)

    def needed(self, dense: Losses) -> int:
        """The number of validation examples that it takes to tell the allowed drop from chance.

        An estimate: a compressed model that is no worse changes about as many answers as the dense model gets wrong, so the
        mean difference has a variance of that share over N. With squared errors, or several positions, their spread takes its
        place; with several positions, an example of a rare kind might also go wrong as a whole, and N must be large enough
        for that to be seen (`paired_parts`).
        """
        allowed = self.allowed(dense.error, dense.probabilities)
        if not math.isfinite(allowed):
            return 2
        if allowed <= 0:
            return 10**9  # no number of examples shows that nothing at all is lost
        z = NormalDist().inv_cdf(self.confidence)
        if dense.probabilities and dense.graded and len(dense.parts) > 1:
            spread = (dense.parts - dense.error / 100 * dense.numbers) / dense.numbers.double().mean()
            return _needed_of_parts(float(spread.std()), z, allowed / 100, dense.far)
        if dense.probabilities:
            share = max(dense.error / 100, 1 / len(dense.parts))
            return math.ceil(share * (100 * z / allowed) ** 2)
        each = dense.parts.double() / dense.numbers
        relative = float(each.std() / each.mean().clamp_min(1e-300)) if len(each) > 1 else 1.0
        return math.ceil((0.5 * relative * 100 * z / allowed) ** 2)  # RMSE: half the relative change of the mean square

    def few(self, dense: Losses) -> bool:
        """Whether there are too few examples for errors to tell models apart, at the allowed drop, or at TOLD without one."""
        asked = self if math.isfinite(self.allowed(dense.error, dense.probabilities)) else Budget(max_drop=TOLD)
        return len(dense.parts) < asked.needed(dense)

    def judge(self, dense: Losses, small: Losses) -> Verdict:
        """Judge a small model against the dense one, on the same examples in the same order."""
        allowed = self.allowed(dense.error, dense.probabilities)
        z = NormalDist().inv_cdf(self.confidence)
        if dense.probabilities:
            drop = small.error - dense.error
            upper = 100 * _share_edges(dense, small, z)[1]
        else:
            drop = 100 * (small.error / dense.error - 1)
            upper = 100 * _rmse_edges(dense, small, z)[1] / dense.error
        estimate, at_most = estimated(dense, small, z) if self.few(dense) else (None, None)
        lost = drop  # compared with what is allowed
        if len(dense.parts) >= self.needed(dense):
            lost = upper
        elif at_most is not None:
            lost = max(at_most, 100 * _share_edges(dense, small, z)[0])  # the lower bound by errors
        elif dense.probabilities and dense.graded:
            lost = upper
        elif dense.probabilities:  # less than one example cannot be measured
            each = 100 / float(dense.numbers.sum())
            allowed = each * max(1, math.ceil(allowed / each - 1e-9))
        bound = upper if math.isfinite(upper) else None
        return Verdict(small.error, drop, bound, lost <= allowed + 1e-9, estimate, at_most)


def _needed_of_parts(spread: float, z: float, allowed: float, far: float) -> int:
    """The least N at which the bound of `paired_parts` on differences of mean 0 and this spread is `allowed`: there is one more
    difference, of `far`. By the normal approximation, but no less than it takes where there is no difference at all."""
    if allowed >= far:
        return 2

    def bound(count: int) -> float:
        return far / count + z * math.sqrt((spread**2 + far**2 / count) / count)

    low, high = 1, 2
    while bound(high) > allowed:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if bound(middle) <= allowed else (middle, high)
    none = math.log(1 - NormalDist().cdf(z)) / math.log1p(-allowed / far)
    return max(high, math.ceil(none))


def surely_worse(before: Losses, after: Losses, confidence: float = 0.9) -> bool:
    """Whether a model has more errors than another one by more than chance explains, paired on the same examples, or outputs
    that are not finite.

    >>> import torch
    >>> one = torch.ones(1000)
    >>> before = Losses(torch.arange(1000) < 60, one, True)
    >>> surely_worse(before, Losses(torch.arange(1000) < 110, one, True)), surely_worse(before, before)
    (True, False)
    """
    if before.finite and not after.finite:
        return True
    z = NormalDist().inv_cdf(confidence)
    edges = _share_edges if before.probabilities else _rmse_edges
    return edges(before, after, z)[0] > 0


def estimated(dense: Losses, small: Losses, z: float = 0.0) -> tuple[float | None, float | None]:
    """The drop in points of error estimated from the rise of the NLL, at PER_NAT errors per nat, and the upper bound of its
    interval from the paired differences of the examples (z: the normal quantile of the bound).

    A count of errors on N examples moves in steps of 1/N and depends on the few examples near the decision boundary, while
    every example moves the NLL. Both rise together as a network is compressed, on training examples too, because what it
    loses is capacity (docs/search.md). Returns (None, None) for regressions, whose squared errors are smooth already, and
    where the NLL was not computed.

    >>> import torch
    >>> one = torch.ones(100)
    >>> dense = Losses(torch.arange(100) < 2, one, True, nll=0.06 * one)
    >>> round(estimated(dense, Losses(torch.arange(100) < 3, one, True, nll=0.08 * one))[0], 2)
    0.9
    """
    if not dense.probabilities or dense.nll is None or small.nll is None:
        return None, None
    rises = 100 * PER_NAT * (small.nll - dense.nll).double()
    return float(rises.mean()), paired_means(rises, z)[1]


def _share_edges(dense: Losses, small: Losses, z: float) -> tuple[float, float]:
    """The lower and upper bound of the rise in the share of errors."""
    if not dense.graded:
        return paired_shares(dense.parts, small.parts, z)
    difference = (small.parts - dense.parts) / dense.numbers.double().mean()
    return paired_parts(difference, z, dense.far)


def _rmse_edges(dense: Losses, small: Losses, z: float) -> tuple[float, float]:
    """The lower and upper bound of the rise in the RMSE."""
    weight = dense.numbers / dense.numbers.mean()
    return paired_rmse(dense.parts / dense.numbers * weight, small.parts / small.numbers * weight, z)
