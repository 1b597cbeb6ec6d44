"""The one number that tempers a likelihood, fitted by NLL: a temperature (of logits or of variances) or a noise variance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from svdcompress.calibrate._draws import Draws
from svdcompress.calibrate._search import least, widened
from svdcompress.errors import counted
from svdcompress.likelihoods import Likelihood

SPREAD = 1.0
"""Prior standard deviation of the log temperature: the prior weighs about as much as one example, so that a network without a
mistake on the validation data is not made certain of everything."""

GRID = tuple(0.1 * step for step in range(-20, 21))
"""Log temperatures that are tried first, and from which cross-validation chooses. Where the best one is at an end, further ones
are tried: a network that has memorized its training data can predict variances that are far too small."""

COARSE, FINE = 0.4, 0.2
"""Steps of log temperatures beyond `GRID`: in a search, and for cross-validation."""

FARTHEST = 40.0
"""The log temperature at which a search ends in any case."""

NOISE_GRID = tuple(0.25 * step for step in range(-32, 5))
"""Log noise variances that are tried, minus the log of the mean squared error, which the noise cannot exceed."""

FOLDS = 5

FEWEST = 30
"""With fewer validation examples no temperature is fitted, and a regression's noise is doubtful."""


@dataclass(frozen=True)
class Tempered:
    """What tempering does to one predictive distribution, on validation data.

    value: the temperature, or the precision tau of a regression; 1 if it is not `taken`.
    before, after: NLL in nats per target without it and, by cross-validation, with it. taken: whether it is used, because the
    NLL got better or a regression needs it. examples: the number of validation examples that it was fitted on. note: why it was
    left out, or is doubtful; otherwise "".
    """

    value: float
    before: float
    after: float
    taken: bool
    examples: int
    note: str = ""


def nll_rows(likelihood: Likelihood, draws: Draws, log_knob: float) -> Tensor:
    """(R,) negative log likelihoods of the predictive distribution, float64, in nats.

    log_knob: log temperature of logits or of the model's own variances, log noise variance of values.
    classification, binary: -log 1/S sum_s p_s(target), each p_s tempered (Guo et al. 2017 within each draw).
    regression: the normal distribution of mean 1/S sum_s f_s and variance Var_s f + noise (Gal & Ghahramani 2016, eq. 8).
    gaussian: -log 1/S sum_s N(target; mean_s, temperature variance_s).
    """
    outputs, targets = draws.outputs, draws.targets
    if likelihood.constant_noise:
        values = outputs.double()
        variance = values.var(0, correction=0) + math.exp(log_knob)
        square = (targets.double() - values.mean(0)).square()
        return 0.5 * (square / variance + variance.log() + math.log(2 * math.pi))
    if likelihood.classes:
        z = outputs * math.exp(-log_knob)
        chosen = targets.long().view(1, -1, 1).expand(len(z), -1, 1)
        logs = z.gather(2, chosen).squeeze(2) - z.logsumexp(2)
    elif likelihood.name == "binary":
        z = outputs * math.exp(-log_knob)
        logs = F.logsigmoid(torch.where(targets > 0.5, z, -z))
    else:
        mean, log_variance = outputs.double().unbind(-1)
        log_variance = log_variance + log_knob
        square = (targets.double() - mean).square()
        logs = -0.5 * (log_variance + square * torch.exp(-log_variance) + math.log(2 * math.pi))
    return math.log(len(logs)) - logs.double().logsumexp(0)


def centre(likelihood: Likelihood, draws: Draws) -> float:
    """The center of the grid of log knobs: 0 (temperature 1), or the log of the mean squared error."""
    if not likelihood.constant_noise:
        return 0.0
    square = (draws.targets.double() - draws.outputs.double().mean(0)).square().mean()
    return math.log(max(float(square), 1e-300))


def grid_of(likelihood: Likelihood) -> tuple[float, ...]:
    """The log knobs that are tried, minus their center."""
    return NOISE_GRID if likelihood.constant_noise else GRID


def penalty(likelihood: Likelihood, log_knob: float) -> float:
    """What the knob's own prior adds to the sum of the NLL, in nats."""
    return 0.0 if likelihood.constant_noise else 0.5 * (log_knob / SPREAD) ** 2


def fit_knob(likelihood: Likelihood, draws: Draws) -> tuple[float, float]:
    """(log knob, mean NLL with it): the knob with the lowest NLL on all draws, its prior included."""
    start = centre(likelihood, draws)

    @cache
    def loss(knob: float) -> float:
        return float(nll_rows(likelihood, draws, knob).sum()) + penalty(likelihood, knob)

    grid = [start + step for step in grid_of(likelihood)[::4]]
    if not likelihood.constant_noise:
        grid = widened(loss, grid, COARSE, FARTHEST)
    knob, _ = least(loss, grid)
    return knob, float(nll_rows(likelihood, draws, knob).sum()) / len(draws)


@dataclass(frozen=True)
class Table:
    """What cross-validation chooses from. rows: (knobs, R) NLL of each target for each knob; extra: (knobs,) what the knob's
    prior adds to a sum of NLL."""

    rows: Tensor
    extra: Tensor


def table(likelihood: Likelihood, draws: Draws) -> Table:
    """The knobs of the grid around its center, and further ones while the sum over all targets gets better."""
    about = centre(likelihood, draws)

    @cache
    def rows(step: float) -> Tensor:
        return nll_rows(likelihood, draws, about + step)

    def loss(step: float) -> float:
        return float(rows(step).sum()) + penalty(likelihood, about + step)

    steps: Sequence[float] = grid_of(likelihood)
    if not likelihood.constant_noise:
        steps = widened(loss, steps, FINE, FARTHEST)
    extra = [penalty(likelihood, about + step) for step in steps]
    return Table(torch.stack([rows(step) for step in steps]), torch.tensor(extra, dtype=torch.float64))


def folds_of(draws: Draws, folds: int = FOLDS, seed: int = 0) -> Tensor:
    """(R,) the fold of each target: targets of one example share a fold, and folds are drawn with a seed."""
    examples, where = draws.owner.unique(return_inverse=True)
    order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(seed))
    return (order % folds)[where]


def cross_validated(tables: Tensor, extra: Tensor, folds: Tensor) -> Tensor:
    """(R,) NLL of each target with the setting that was chosen on the other folds.

    tables: (settings, R). extra: (settings,) what each setting's prior adds to a sum of NLL.
    """
    found = torch.empty(tables.shape[1], dtype=tables.dtype)
    for fold in range(int(folds.max()) + 1):
        out = folds == fold
        best = (tables[:, ~out].sum(1) + extra).argmin()
        found[out] = tables[best, out]
    return found


def fit_tempering(likelihood: Likelihood, draws: Draws) -> Tempered:
    """Fit the temperature of logits (Guo et al. 2017, sec. 4.2) or of the variances that a model gives (sigma scaling,
    Laves et al. 2020, MIDL), or the noise precision of values, to validation draws.

    draws: with one sample for the mean model; with many, the NLL is that of the Monte-Carlo predictive distribution.
    A temperature is taken only if it makes the NLL better under 5-fold cross-validation; a regression has no other noise, so
    its precision is always taken.
    """
    about = centre(likelihood, draws)
    examples = len(draws.owner.unique())
    few = counted(examples, "validation example")
    plain = nll_rows(likelihood, draws, about)
    before = float(plain.mean())
    if examples < FEWEST and not likelihood.constant_noise:
        note = f"{few} {'is' if examples == 1 else 'are'} too few to fit a temperature; {FEWEST} are needed"
        return Tempered(1.0, before, before, False, examples, note)
    knob, fitted = fit_knob(likelihood, draws)
    if examples < 2:
        note = "one validation example says nothing about the noise"
        return Tempered(math.exp(-knob), before, fitted, True, examples, note)
    tried = table(likelihood, draws)
    after = float(cross_validated(tried.rows, tried.extra, folds_of(draws)).mean())
    if likelihood.constant_noise:
        note = f"{few} say little about the noise; {FEWEST} are needed" if examples < FEWEST else ""
        return Tempered(math.exp(-knob), before, after, True, examples, note)
    if after < before:
        return Tempered(math.exp(knob), before, after, True, examples)
    note = f"a temperature of {math.exp(knob):.3g} does not improve the NLL on held-out data"
    return Tempered(1.0, before, after, False, examples, f"{note} ({after:.4f}, {before:.4f} without)")
