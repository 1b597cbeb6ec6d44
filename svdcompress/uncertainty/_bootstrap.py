"""Figures of resampled test sets: how much of the difference between two models could be due to the choice of examples."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from svdcompress.errors import UsageError
from svdcompress.uncertainty._quality import BINS, Z95, as_rows, bin_of

REPLICATES = 1000
"""Number of test sets that are drawn."""

PROBABILITIES = ("error", "nll", "brier", "ece")
VALUES = ("rmse", "nll", "coverage")
TINY = torch.finfo(torch.float64).tiny


@dataclass(frozen=True)
class Totals:
    """The sums from which the figures of a set of inputs are computed.

    sums: (N, K), over each input's labels or numbers. count: (N,), how many of these each input has. Inputs are drawn whole,
    because an image's pixels, or a text's words, are not independent examples.
    """

    sums: Tensor
    count: Tensor
    probabilities: bool

    def figures(self, weights: Tensor | None = None) -> dict[str, Tensor]:
        """Figures, (R,) each, with each input counted as often as its weight says; weights: (R, N), None: (1, N) of ones.

        The figures are those of `quality` or `regression_quality`.
        """
        weights = torch.ones(1, len(self.count), dtype=torch.float64) if weights is None else weights
        means = weights @ self.sums / (weights @ self.count).clamp_min(TINY)[:, None]
        if self.probabilities:
            found = [100 * means[:, 0], means[:, 1], means[:, 2], means[:, 3:].abs().sum(1)]
            return dict(zip(PROBABILITIES, found, strict=True))
        return dict(zip(VALUES, [means[:, 0].clamp_min(0).sqrt(), means[:, 1], means[:, 2]], strict=True))


def totals_of_probabilities(probabilities: Tensor, labels: Tensor, owner: Tensor, inputs: int) -> Totals:
    """Totals of predicted probabilities (R, C), or (R,) of yes. labels: (R,). owner: (R,), the input that each row is of."""
    p, labels = as_rows(probabilities, labels)
    chosen = p.gather(1, labels[:, None]).squeeze(1)
    confidence, guess = p.max(1)
    right = (guess == labels).double()
    bins = torch.zeros(len(p), BINS, dtype=torch.float64)
    bins.scatter_(1, bin_of(confidence)[:, None], (confidence - right)[:, None])
    nll, brier = -chosen.clamp_min(TINY).log(), p.square().sum(1) - 2 * chosen + 1
    right = right.masked_fill(p.isnan().any(1), math.nan)  # as in `quality`
    return _summed(torch.cat([torch.stack([1 - right, nll, brier], 1), bins], 1), owner, inputs, True)


def totals_of_values(mean: Tensor, variance: Tensor, target: Tensor, owner: Tensor, inputs: int) -> Totals:
    """Totals of predicted normal distributions, (R,) each. owner: (R,), the input that each row is of."""
    mean, variance, target = (each.double().flatten() for each in (mean, variance.clamp_min(0), target))
    squares, variance = (target - mean).square(), variance.clamp_min(TINY)
    nll = 0.5 * (math.log(2 * math.pi) + variance.log() + squares / variance)
    inside = (squares <= Z95**2 * variance).double()
    return _summed(torch.stack([squares, nll, inside], 1), owner, inputs, False)


def _summed(rows: Tensor, owner: Tensor, inputs: int, probabilities: bool) -> Totals:
    sums = torch.zeros(inputs, rows.shape[1], dtype=torch.float64).index_add_(0, owner, rows)
    return Totals(sums, owner.bincount(minlength=inputs).double(), probabilities)


def paired_bootstrap(
    contenders: Mapping[str, Sequence[Totals]], reference: str, replicates: int = REPLICATES, seed: int = 0
) -> dict[str, dict[str, dict[str, float]]]:
    """Each contender's figures minus the reference's, with 95% intervals, on the same draws of the same inputs.

    contenders: the totals of one or several sets of the same inputs (a test set and its corruptions), whose figures are
        averaged. The interval is the percentile interval of Efron & Tibshirani 1993, ch. 13.
    Returns {name: {figure: {"value", "low", "high"}}}. Raises UsageError for sets of different sizes, and for fewer than 40
    replicates, with which the two extremes would be the interval.
    """
    if replicates < 40:
        raise UsageError(f"replicates: {replicates}; a 95% interval needs at least 40, preferably 1000")
    sizes = {len(totals.count) for sets in contenders.values() for totals in sets}
    if len(sizes) != 1:
        raise UsageError(f"the contenders' sets have {', '.join(map(str, sorted(sizes)))} inputs; they must be the same inputs")
    size = sizes.pop()
    generator = torch.Generator().manual_seed(seed)
    drawn: dict[str, list[dict[str, Tensor]]] = {name: [] for name in contenders}
    step = max(1, min(replicates, 2_000_000 // size))
    for start in range(0, replicates, step):
        weights = _weights(min(step, replicates - start), size, generator)
        for name, sets in contenders.items():
            drawn[name].append(_averaged(totals.figures(weights) for totals in sets))
    base = _averaged(totals.figures() for totals in contenders[reference])
    spread = {name: {key: torch.cat([part[key] for part in parts]) for key in parts[0]} for name, parts in drawn.items()}
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name, sets in contenders.items():
        value = _averaged(totals.figures() for totals in sets)
        found[name] = {}
        for key in value:
            low, high = torch.quantile(spread[name][key] - spread[reference][key], torch.tensor([0.025, 0.975]).double())
            found[name][key] = {"value": float(value[key] - base[key]), "low": float(low), "high": float(high)}
    return found


def _weights(count: int, size: int, generator: torch.Generator) -> Tensor:
    """How often each input is among `size` draws with replacement: (count, size)."""
    index = torch.randint(size, (count, size), generator=generator)
    return torch.zeros(count, size, dtype=torch.float64).scatter_add_(1, index, torch.ones(count, size, dtype=torch.float64))


def _averaged(figures: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
    every = list(figures)
    return {key: torch.stack([one[key] for one in every]).mean(0) for key in every[0]}


def significant(difference: Mapping[str, float]) -> int:
    """-1 or 1 if the whole interval lies below or above 0, else 0: the sign is unknown."""
    return -1 if difference["high"] < 0 else 1 if difference["low"] > 0 else 0
