"""How good a predictive distribution is: proper scores, calibration, and what its uncertainties are worth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from svdcompress.errors import DataError
from svdcompress.uncertainty._shapes import shaped_like

BINS = 15
"""Bins of the calibration error and the reliability diagram, of equal width in confidence."""

Z95 = 1.959964
"""Half the width of a normal distribution's central 95%, in standard deviations."""


def quality(probabilities: Tensor, labels: Tensor) -> dict[str, float]:
    """Scores of predicted probabilities; computed in float64.

    probabilities: (N, C), rows that sum to 1; or (N,), the probability of yes. labels: (N,) whole numbers.

    Returns `error` in percent, `nll` in nats, `brier` (squared distance from the one-hot label, 0 to 2; Brier 1950) and
    `ece` (expected calibration error, 15 bins, in [0, 1]; Naeini et al. 2015).
    All of them are NaN if any probability is. Raises DataError for labels that do not fit the probabilities.
    """
    p, labels = as_rows(probabilities, labels)
    if bool(p.isnan().any()):  # the largest of a row with NaN is no guess
        return dict.fromkeys(("error", "nll", "brier", "ece"), math.nan)
    chosen = p.gather(1, labels[:, None]).squeeze(1)
    brier = p.square().sum(1) - 2 * chosen + 1
    return {
        "error": 100 * float((p.argmax(1) != labels).double().mean()),
        "nll": float(-chosen.clamp_min(torch.finfo(torch.float64).tiny).log().mean()),
        "brier": float(brier.mean()),
        "ece": _calibration_error(p, labels),
    }


def reliability(probabilities: Tensor, labels: Tensor, bins: int = BINS) -> dict[str, list[Any]]:
    """The reliability diagram: the number of examples, mean confidence and accuracy in each bin of confidence.

    Returns `edges` (bins + 1), `count`, `confidence` and `accuracy` (None where a bin is empty).
    """
    p, labels = as_rows(probabilities, labels)
    confidence, guess = p.max(1)
    edges = torch.linspace(0, 1, bins + 1, dtype=torch.float64)
    where = (torch.bucketize(confidence, edges.to(confidence.device), right=True) - 1).clamp(0, bins - 1)
    count = torch.bincount(where, minlength=bins)
    sure = torch.zeros(bins, dtype=torch.float64, device=p.device).index_add_(0, where, confidence)
    right = torch.zeros_like(sure).index_add_(0, where, (guess == labels).double().masked_fill(confidence.isnan(), math.nan))

    def mean(total: Tensor) -> list[float | None]:
        return [float(t / n) if n else None for t, n in zip(total, count, strict=True)]

    return {"edges": edges.tolist(), "count": count.tolist(), "confidence": mean(sure), "accuracy": mean(right)}


def rejection(score: Tensor, loss: Tensor, steps: int = 20) -> dict[str, list[float]]:
    """The mean loss of the inputs that are left when the least certain ones are rejected, by rejected fraction.

    score: (N,) uncertainty; the highest are rejected first. loss: (N,), 0 or 1 (a wrong label), or squared errors.
    Returns `rejected` (fractions 0, 1/steps, ...) and `loss` (means over the inputs kept). Raises UsageError for shapes that
    differ by more than dimensions of 1.
    """
    score, loss = _rows(score, loss)
    order = torch.argsort(score, stable=True)  # most certain first
    running = loss.double()[order].cumsum(0)
    fractions = [step / steps for step in range(steps)]
    kept = [max(1, round(len(score) * (1 - fraction))) for fraction in fractions]
    return {"rejected": fractions, "loss": [float(running[n - 1] / n) for n in kept]}


def selective(score: Tensor, loss: Tensor, targets: Sequence[float] = (), steps: int = 100) -> dict[str, Any]:
    """Risk and coverage (Geifman & El-Yaniv 2017): the mean loss of the inputs that are answered, by the share answered.

    Inputs are answered if their doubt is at most some threshold, so those of equal doubt are answered together. Between two
    thresholds the curve is the expected loss if some of the inputs of equal doubt are answered at random.

    score: (N,) doubt; the lowest is answered first. loss: (N,), a share of wrong labels, or squared errors. targets: mean
        losses not to exceed, such as 0.01 for 99% accuracy.
    Returns `share` (1 / steps, ..., 1), `loss`, `area` (the mean loss over all shares), and `answered`: for each target the
    largest share that meets it, and the threshold on the score (None: no share does).
    Raises DataError without inputs, and UsageError for shapes that differ by more than dimensions of 1.
    """
    score, loss = (part.cpu() for part in _rows(score, loss))
    if not len(score):
        raise DataError("there are no inputs to answer")
    order = torch.argsort(score.double(), stable=True)
    ranked, losses = score.double()[order], loss.double()[order]
    last = torch.cat([ranked[1:] != ranked[:-1], torch.ones(1, dtype=torch.bool)]).nonzero().flatten()  # of each threshold
    kept = torch.cat([torch.zeros(1), last + 1]).double()
    total = torch.cat([torch.zeros(1).double(), losses.cumsum(0)[last]])

    def risk(count: Tensor) -> Tensor:
        """Mean loss of the `count` least doubtful inputs; count: (M,), numbers between 1 and N."""
        right = torch.searchsorted(kept, count).clamp(1, len(kept) - 1)
        part = (count - kept[right - 1]) / (kept[right] - kept[right - 1])
        return (total[right - 1] + part * (total[right] - total[right - 1])) / count

    share = torch.arange(1, steps + 1).double() / steps
    answered = []
    for target in targets:
        fitting = (total[1:] / kept[1:] <= target + 1e-12).nonzero().flatten()
        at = int(fitting[-1]) if len(fitting) else None
        found = (0.0, None) if at is None else (float(kept[at + 1]) / len(score), float(ranked[last[at]]))
        answered.append({"loss": target, "share": found[0], "threshold": found[1]})
    return {
        "share": share.tolist(),
        "loss": risk((share * len(score)).clamp_min(1)).tolist(),
        "area": float(risk(torch.arange(1, len(score) + 1).double()).mean()),
        "answered": answered,
    }


def auroc(inside: Tensor, outside: Tensor) -> float:
    """How well a score separates inputs outside the training distribution (positive) from those inside, in [0, 1].

    inside, outside: (N,) and (M,) scores of uncertainty. Ties count half. Raises DataError for NaN, which has no rank.
    """
    for name, values in (("inside", inside), ("outside", outside)):
        if missing := int(values.isnan().sum()):
            raise DataError(f"{name}: {missing} of {values.numel()} scores are NaN")
    from torchmetrics.functional.classification import binary_auroc

    # Ranks in place of the scores: torchmetrics applies a sigmoid to scores outside [0, 1], which makes ties.
    scores = torch.cat([inside.double().flatten(), outside.double().flatten()]).cpu()
    ranks = torch.unique(scores, return_inverse=True)[1].double()
    target = torch.cat([torch.zeros(inside.numel()), torch.ones(outside.numel())]).long()
    return float(binary_auroc(ranks / max(float(ranks.max()), 1.0), target))


def regression_quality(mean: Tensor, variance: Tensor, target: Tensor) -> dict[str, float]:
    """Scores of predicted normal distributions, all (N, ...): `rmse`, `nll` in nats per number, and `coverage`, the share
    of observations within the central 95% of the prediction (0.95 when the variance is right).

    Raises UsageError for shapes that differ by more than dimensions of 1; a variance may also be one for several means.
    """
    mean, variance = mean.double(), shaped_like(mean, variance, "variance").double()
    target = shaped_like(mean, target, "target", spread=False).double()
    squares = (target - mean).square()
    variance = variance.clamp_min(torch.finfo(torch.float64).tiny)
    nll = 0.5 * (math.log(2 * math.pi) + variance.log() + squares / variance)
    inside = squares <= Z95**2 * variance
    return {
        "rmse": float(squares.mean().sqrt()),
        "nll": float(nll.mean()),
        "coverage": float(inside.double().mean()),
    }


def _rows(score: Tensor, loss: Tensor) -> tuple[Tensor, Tensor]:
    """Both as (N,)."""
    return score.flatten(), shaped_like(score, loss, "loss", of="the score", spread=False).flatten()


def _calibration_error(p: Tensor, labels: Tensor) -> float:
    from torchmetrics.functional.classification import multiclass_calibration_error

    # torchmetrics works in float32 and has a separate bin for a confidence of exactly 1: the last number below 1 avoids it.
    p = p.clamp(0, 1 - 2**-24).float()
    return float(multiclass_calibration_error(p, labels, num_classes=p.shape[1], n_bins=BINS, norm="l1"))


def bin_of(confidence: Tensor) -> Tensor:
    """The bin of the calibration error that each confidence falls in, as in torchmetrics: (N,), 0 to 14."""
    edges = torch.linspace(0, 1, BINS + 1)
    where = torch.bucketize(confidence.clamp(0, 1 - 2**-24).float().cpu(), edges, right=True) - 1
    return where.clamp(0, BINS - 1).to(confidence.device)


def as_rows(probabilities: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities (N, C) in float64 (of no and yes, if only those of yes are given) and labels (N,). Raises DataError as
    `quality` does."""
    p = probabilities.detach().double()
    if p.dim() == 2 and p.shape[1] == 1:
        p = p[:, 0]
    if p.dim() == 1:
        p = torch.stack([1 - p, p], 1)
    labels = labels.detach().to(p.device).long().flatten()
    if p.dim() != 2 or len(p) != len(labels):
        raise DataError(f"labels: {len(labels)} labels for probabilities of shape {tuple(probabilities.shape)}")
    if not len(labels):
        raise DataError("labels: there are none")
    if int(labels.min()) < 0 or int(labels.max()) >= p.shape[1]:
        raise DataError(f"labels: {int(labels.min())} to {int(labels.max())} for {p.shape[1]} classes")
    return p, labels
