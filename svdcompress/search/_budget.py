"""What error may be lost, and whether validation data can tell that no more was."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from svdcompress.uncertainty import paired_means, paired_rmse, paired_shares

PER_NAT = 0.45
"""Errors that come with a nat of NLL as a network loses: 0.31 to 0.34 of the LeNets on MNIST in benchmarks/results/evaluate.md,
about 0.45 of the digits' trials of seeds 4 and 5, which no stored result uses; the more careful one."""

LEAST = 1e-12
"""The RMSE of a model without error, as one that is held against its own answers."""

TOLD = 0.5
"""Points of error, or per cent of RMSE, that must be told from chance where no budget says which."""


@dataclass(frozen=True)
class Losses:
    """What each validation example adds to a model's error, (N,) each: wrong answers (a share of its positions, where it has
    several) or squares, and how many numbers it has; probabilities: whether the former. nll: (M,) mean negative
    log likelihoods in nats of the examples that a model is compared on where errors are too few, those of validation first and
    training examples after them, of probabilities with their best temperature; None where it was not looked at."""

    parts: Tensor
    numbers: Tensor
    probabilities: bool
    nll: Tensor | None = None

    @property
    def graded(self) -> bool:
        """Whether an example is more than right or wrong: where any has several positions, a share of them is wrong."""
        return bool((self.numbers != 1).any())

    @property
    def error(self) -> float:
        """Per cent of wrong answers, or the RMSE in the units of the squares (LEAST at least: what is lost is told in shares of
        it)."""
        mean = float(self.parts.sum() / self.numbers.sum())
        return 100 * mean if self.probabilities else max(math.sqrt(mean), LEAST)

    def held_out(self, before: Losses) -> Losses:
        """The same, with the NLL of training examples as it was before: where one model only trained on, that they fit better
        is no evidence."""
        if self.nll is None or before.nll is None:
            return self
        return replace(self, nll=torch.cat([self.nll[: len(self.parts)], before.nll[len(before.parts) :]]))


@dataclass(frozen=True)
class Verdict:
    """How a model stands against a budget.

    error: per cent, or RMSE. drop: what was lost, in points of error, or per cent of the dense RMSE; upper: what is not
    exceeded at the budget's confidence, by the paired differences of the validation examples (None: a single example bounds
    nothing). met: within the budget.
    estimate: the drop that the NLL speaks for, where the examples are too few for their errors to tell; else None. at_most:
    what that does not exceed at the same confidence.
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

    max_drop: points of error, or per cent of the dense model's RMSE. max_error: the same as a bound on the error (per cent) or
    RMSE itself. None: not bounded. confidence: of the upper bound on the drop that has to keep it, one-sided. Where the
    validation data are too few for that (see `needed`), the bound on what `estimated` makes of the NLL has to, and the errors
    may not surely say otherwise; without an NLL, the drop itself has to, in whole examples (at least one), or, where examples
    have several positions, the upper bound all the same: it is wide, but there is one.

    >>> Budget(max_drop=0.5).allowed(2.0)
    0.5
    """

    max_drop: float | None = None
    max_error: float | None = None
    confidence: float = 0.9

    @property
    def given(self) -> bool:
        """Whether anything is bounded."""
        return self.max_drop is not None or self.max_error is not None

    def allowed(self, dense_error: float, probabilities: bool = True) -> float:
        """The drop that is allowed for a dense model of this error: the smaller of the two bounds; infinite without one."""
        bounds = [] if self.max_drop is None else [self.max_drop]
        if self.max_error is not None:
            over = self.max_error - dense_error
            bounds.append(over if probabilities else 100 * over / max(dense_error, LEAST))
        return min(bounds, default=math.inf)

    def needed(self, dense: Losses) -> int:
        """Validation examples from which on the allowed drop can be told from chance.

        An estimate: a compressed model that is no worse answers about as many examples otherwise as the dense one gets wrong,
        so that the mean of the differences has a variance of that share over N; for squares, of theirs.
        """
        allowed = self.allowed(dense.error, dense.probabilities)
        if not math.isfinite(allowed):
            return 2
        if allowed <= 0:
            return 10**9  # no number of examples shows that nothing at all is lost
        z = NormalDist().inv_cdf(self.confidence)
        if dense.probabilities and dense.graded and len(dense.parts) > 1:
            spread = (dense.parts - dense.error / 100 * dense.numbers) / dense.numbers.double().mean()
            return max(2, math.ceil((float(spread.std()) * 100 * z / allowed) ** 2))
        if dense.probabilities:
            share = max(dense.error / 100, 1 / len(dense.parts))
            return math.ceil(share * (100 * z / allowed) ** 2)
        each = dense.parts.double() / dense.numbers
        relative = float(each.std() / each.mean().clamp_min(1e-300)) if len(each) > 1 else 1.0
        return math.ceil((0.5 * relative * 100 * z / allowed) ** 2)  # RMSE: half the relative change of the mean square

    def few(self, dense: Losses) -> bool:
        """Whether the examples are too few for errors to tell models apart: by the drop allowed, or TOLD without one."""
        asked = self if math.isfinite(self.allowed(dense.error, dense.probabilities)) else Budget(max_drop=TOLD)
        return len(dense.parts) < asked.needed(dense)

    def judge(self, dense: Losses, small: Losses) -> Verdict:
        """A small model against the dense one, on the same examples in the same order."""
        allowed = self.allowed(dense.error, dense.probabilities)
        z = NormalDist().inv_cdf(self.confidence)
        if dense.probabilities:
            drop = small.error - dense.error
            upper = 100 * _share_edges(dense, small, z)[1]
        else:
            drop = 100 * (small.error / dense.error - 1)
            upper = 100 * _rmse_edges(dense, small, z)[1] / dense.error
        estimate, at_most = estimated(dense, small, z) if self.few(dense) else (None, None)
        lost = drop  # that is held against what is allowed
        if len(dense.parts) >= self.needed(dense):
            lost = upper
        elif at_most is not None:
            lost = max(at_most, 100 * _share_edges(dense, small, z)[0])  # what is lost at least
        elif dense.probabilities and dense.graded:
            lost = upper
        elif dense.probabilities:  # less than one example is nothing that could be seen
            each = 100 / float(dense.numbers.sum())
            allowed = each * max(1, math.ceil(allowed / each - 1e-9))
        bound = upper if math.isfinite(upper) else None
        return Verdict(small.error, drop, bound, lost <= allowed + 1e-9, estimate, at_most)


def surely_worse(before: Losses, after: Losses, confidence: float = 0.9) -> bool:
    """Whether a model has more errors than another one by more than chance explains: paired, on the same examples.

    >>> import torch
    >>> one = torch.ones(1000)
    >>> before = Losses(torch.arange(1000) < 60, one, True)
    >>> surely_worse(before, Losses(torch.arange(1000) < 110, one, True)), surely_worse(before, before)
    (True, False)
    """
    z = NormalDist().inv_cdf(confidence)
    edges = _share_edges if before.probabilities else _rmse_edges
    return edges(before, after, z)[0] > 0


def estimated(dense: Losses, small: Losses, z: float = 0.0) -> tuple[float | None, float | None]:
    """Points of error that a rise of the NLL speaks for, PER_NAT of them, and the upper edge of its interval by the paired
    differences of the examples (z: the normal quantile of the edge).

    A count of errors on N examples moves in steps of 1/N and hangs on the few that are close; the NLL moves with each example,
    and both rise alike as a network is compressed, on training examples too: what it loses is capacity (docs/search.md). None
    twice for values, whose squares are smooth, and
    where the NLL was not looked at.

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
    """What the share of errors rose by at least, and at most."""
    if not dense.graded:
        return paired_shares(dense.parts, small.parts, z)
    difference = (small.parts - dense.parts) / dense.numbers.double().mean()
    return paired_means(difference, z)


def _rmse_edges(dense: Losses, small: Losses, z: float) -> tuple[float, float]:
    """What the RMSE rose by at least, and at most."""
    weight = dense.numbers / dense.numbers.mean()
    return paired_rmse(dense.parts / dense.numbers * weight, small.parts / small.numbers * weight, z)
