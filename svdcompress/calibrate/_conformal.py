"""Split-conformal sets and intervals, which hold the truth at a chosen rate however good the model is."""

from __future__ import annotations

import math
import warnings
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from svdcompress.errors import DataError, UsageError, counted
from svdcompress.uncertainty import as_rows, shaped_like

ROUNDING = 1e-5
"""How far a score may lie above the limit and still count as equal to it. The limit is the score of a validation example. If
inputs repeat, copies of that example get a score with other last digits in float32, in onnxruntime or in another batch, and all
of them would drop out of their sets at once. This can only make sets larger."""


@dataclass(frozen=True)
class ConformalSets:
    """Adaptive prediction sets. coverage: the share of targets that they hold, at least, on average over inputs like the
    validation data. limit: the largest score of a class in a set. penalty, free: of RAPS, see `scores`. examples: number of
    calibration targets that the limit comes from. missing: classes that none of these have.
    """

    coverage: float
    limit: float
    examples: int
    penalty: float = 0.0
    free: int = 1
    missing: tuple[int, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """All fields, JSON-able."""
        return {"kind": "sets", **asdict(self), "missing": list(self.missing)}

    def sets(self, probabilities: Tensor, dim: int = 1) -> Tensor:
        """Which classes each set holds: bool, of the shape of the probabilities, (N, C) or with the classes along `dim`.

        A set always holds the likeliest class.
        """
        p = probabilities.double().movedim(dim, -1)
        return self.holds(scores(p, self.penalty, self.free)).movedim(-1, dim)

    def holds(self, found: Tensor) -> Tensor:
        """Whether classes with these `scores` are in their sets; bool, of the same shape. Classes with a score of NaN are."""
        return ~(found > self.limit + ROUNDING)


@dataclass(frozen=True)
class ConformalIntervals:
    """Prediction intervals mean +- width * deviation. coverage, examples: as in `ConformalSets`.

    width: in predictive standard deviations; 1.96 for 95% if the predictive distribution is normal and correct. With several
    targets one for each, so that the coverage holds for each.
    """

    coverage: float
    width: float | tuple[float, ...]
    examples: int

    def to_dict(self) -> dict[str, Any]:
        """All fields, JSON-able."""
        return {"kind": "intervals", **asdict(self), "width": list(self.width) if isinstance(self.width, tuple) else self.width}

    @property
    def widths(self) -> tuple[float, ...]:
        """The widths: one for each target, or one for all."""
        return self.width if isinstance(self.width, tuple) else (self.width,)

    def intervals(self, mean: Tensor, deviation: Tensor) -> tuple[Tensor, Tensor]:
        """Lower and upper ends, of the shape of the mean, (N,) or (N, targets). Raises UsageError if the shapes don't fit."""
        if isinstance(self.width, tuple) and (mean.dim() < 2 or mean.shape[-1] != len(self.width)):
            raise UsageError(f"mean: of shape {tuple(mean.shape)}; there are {len(self.width)} targets, each with a width")
        deviation = shaped_like(mean, deviation, "deviation")
        width = self.width if isinstance(self.width, float) else torch.tensor(self.width, dtype=mean.dtype, device=mean.device)
        return mean - width * deviation, mean + width * deviation


def check_coverage(coverage: Any) -> float:
    """The coverage as a float. Raises UsageError unless it lies strictly between 0 and 1."""
    if isinstance(coverage, bool) or not isinstance(coverage, int | float) or not 0 < coverage < 1:
        more = " (a set that always contains the truth contains everything)" if coverage == 1 else ""
        raise UsageError(f"coverage: {coverage!r}; a share above 0 and below 1 is needed, as in 0.9{more}")
    return float(coverage)


def least_examples(coverage: float) -> int:
    """The number of calibration targets needed to promise a coverage: ceil((n + 1) coverage) has to be at most n."""
    count = max(1, math.floor(coverage / (1 - coverage)) - 1)
    while _rank(count, coverage) > count:
        count += 1
    return count


def _rank(count: int, coverage: float) -> int:
    """The rank, counted from 1, of the ordered score that is the quantile; rounding of the product must not add one."""
    return math.ceil((count + 1) * coverage - 1e-9)


def quantile(values: Tensor, coverage: float) -> float:
    """The finite-sample quantile: the ceil((n + 1) coverage)-th smallest of n scores (Vovk et al. 2005; Angelopoulos & Bates
    2023, arXiv 2107.07511, sec. 1.1). Raises DataError if there are too few, or too many of them are NaN."""
    count = values.numel()
    rank = _rank(count, coverage)
    if rank > count:
        raise DataError(
            f"coverage: {coverage:g} cannot be promised from {counted(count, 'validation example')}; it takes "
            f"{least_examples(coverage)} (data.validation makes the split larger), or a smaller coverage"
        )
    found = float(values.flatten().double().kthvalue(rank).values)  # NaN counts as larger than all other scores
    if math.isnan(found):
        missing = int(values.isnan().sum())
        raise DataError(f"coverage: {coverage:g} cannot be promised: {missing} of {count} validation scores are NaN")
    return found


def scores(probabilities: Tensor, penalty: float = 0.0, free: int = 1) -> Tensor:
    """(..., C) score of each class: the probability of all classes that are likelier, plus `penalty` for each rank beyond the
    first `free` ones.

    APS (Romano et al. 2020, arXiv 2006.02544, eq. 5) and RAPS (Angelopoulos et al. 2021, arXiv 2009.14193, eq. 4) with their
    uniform number u fixed at 0 in place of a random one: the sets are the same in each call, never empty, and cover as much or
    more. Of two equal probabilities either may count as likelier.
    """
    ordered, order = probabilities.topk(probabilities.shape[-1], -1)  # ONNX has this, but no stable sort
    before = torch.cat([torch.zeros_like(ordered[..., :1]), ordered.cumsum(-1)[..., :-1]], -1)
    rank = torch.arange(probabilities.shape[-1], device=probabilities.device)
    before = before + penalty * (rank + 1 - free).clamp_min(0).to(before)
    return torch.empty_like(before).scatter_(-1, order, before)


def conformal_sets(
    probabilities: Tensor, labels: Tensor, coverage: float, *, penalty: float = 0.0, free: int = 1
) -> ConformalSets:
    """Adaptive prediction sets from validation data that the model was not trained on.

    probabilities: (N, C), of the model that the sets will be made with. labels: (N,). coverage: strictly between 0 and 1.
    Raises UsageError, DataError (too few examples; it says how many are needed; labels that don't fit); warns of classes that
    no example has, for which nothing can be promised.

    Example: conformal_sets(p, y, 0.9).sets(mc_predict(model, x).mean)
    """
    coverage = check_coverage(coverage)
    labels = _fitting(labels, probabilities)
    truths = scores(probabilities.double(), penalty, free).gather(1, labels.view(-1, 1)).squeeze(1)
    truths = truths.masked_fill(probabilities.isnan().any(1), math.nan)
    return sets_from(truths, labels, probabilities.shape[1], coverage, penalty=penalty, free=free)


def _fitting(labels: Tensor, probabilities: Tensor) -> Tensor:
    """Labels as (N,) whole numbers; raises as `conformal_sets` does."""
    shape = tuple(probabilities.shape)
    if len(shape) != 2 or shape[1] < 2:
        raise UsageError(
            f"probabilities: of shape {shape}, where (N, classes) is needed. If a model gives those of yes alone, stack 1 - p "
            "and p; if it gives a map, move its classes last and flatten the rest"
        )
    return as_rows(probabilities, labels)[1]


def sets_from(
    truths: Tensor, labels: Tensor, classes: int, coverage: float, *, penalty: float = 0.0, free: int = 1
) -> ConformalSets:
    """`conformal_sets` from the scores of the true classes, (N,)."""
    limit = quantile(truths, check_coverage(coverage))
    there = labels.long().bincount(minlength=classes)
    missing = tuple(int(index) for index in (there == 0).nonzero().flatten())
    if missing:
        warnings.warn(
            f"validation data have no example of {_named(missing)}: the sets promise nothing for "
            f"{'this class' if len(missing) == 1 else 'these classes'} alone",
            stacklevel=3,
        )
    return ConformalSets(float(coverage), limit, len(labels), penalty, free, missing)


def _named(classes: tuple[int, ...]) -> str:
    shown = ", ".join(str(index) for index in classes[:8])
    return f"class {shown}" if len(classes) == 1 else f"classes {shown}{', ...' if len(classes) > 8 else ''}"


def conformal_intervals(mean: Tensor, deviation: Tensor, targets: Tensor, coverage: float) -> ConformalIntervals:
    """Intervals around a regression's mean, in proportion to its own predictive standard deviation (Lei et al. 2018, sec. 5.2;
    Papadopoulos et al. 2008), from validation data; all arguments (N,), or (N, targets) for a width of each target. Raises as
    `conformal_sets` does, and for shapes that don't fit.
    """
    coverage = check_coverage(coverage)
    distance = (shaped_like(mean, targets, "targets", spread=False).double() - mean.double()).abs()
    ratio = distance / shaped_like(mean, deviation, "deviation").double().clamp_min(torch.finfo(torch.float64).tiny)
    return intervals_from(ratio, coverage)


def intervals_from(ratios: Tensor, coverage: float) -> ConformalIntervals:
    """`conformal_intervals` from the distances of the truths, in predictive standard deviations."""
    coverage = check_coverage(coverage)
    if ratios.dim() == 2 and ratios.shape[1] > 1:  # an example's targets depend on each other: they count as one example
        return ConformalIntervals(coverage, tuple(quantile(each, coverage) for each in ratios.unbind(1)), len(ratios))
    return ConformalIntervals(coverage, quantile(ratios, coverage), ratios.numel())
