"""Compares dense and sparse models on the same data, with each kind of uncertainty that they can give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from svdcompress.batch import unwrapped
from svdcompress.likelihoods import Likelihood, resolve
from svdcompress.uncertainty._bootstrap import REPLICATES, Totals, paired_bootstrap, totals_of_probabilities, totals_of_values
from svdcompress.uncertainty._calibrate import fit_tau
from svdcompress.uncertainty._contenders import Contender, dense_contenders, mean_contender, sampled_contender
from svdcompress.uncertainty._explained import r2
from svdcompress.uncertainty._gather import Batches, Gathered, gather
from svdcompress.uncertainty._quality import auroc, quality, regression_quality, rejection, reliability, selective

ACCURACIES = (0.95, 0.99, 0.999)
"""Accuracies for which the share of inputs that can be answered is reported."""

KEPT = 80
"""Percentage of inputs, the surest first, on which the selective error under shift is measured."""


@dataclass(frozen=True)
class Judge:
    """How predictions of a task are judged. scale: for regression, the factor from a model's units to the target's own."""

    likelihood: Likelihood
    scale: float
    validation: Batches

    def gathered(self, contender: Contender, batches: Batches) -> Gathered:
        """A contender's predictions for those inputs of a set that have a target."""
        return gather(contender.predict, batches, self.likelihood, more=contender.scores).with_targets()

    def observation_variance(self, contender: Contender) -> float:
        """The variance of a regression's constant noise, fitted on the validation data; 0 for other tasks."""
        if not self.likelihood.constant_noise:
            return 0.0
        fitted = self.gathered(contender, self.validation)
        return 1 / fit_tau(fitted.mean, fitted.variance, fitted.targets)

    def metrics(self, found: Gathered, observed: float) -> dict[str, Any]:
        """Figures of a set. For values, `r2` is None if no target varies, or if inputs have different numbers of targets."""
        if self.likelihood.probabilities:
            return quality(found.mean, found.targets)
        numbers = found.owner.bincount(minlength=found.inputs)
        alike = bool((numbers == numbers[0]).all())  # R2 is per output, so all inputs need equally many
        r2_ = r2(found.mean.view(found.inputs, -1), found.targets.view(found.inputs, -1)) if alike else None
        return {**regression_quality(*self._in_units(found, observed)), "r2": r2_}

    def totals(self, found: Gathered, observed: float) -> Totals:
        """Totals of the same figures by input, for the bootstrap."""
        if self.likelihood.probabilities:
            return totals_of_probabilities(found.mean, found.targets, found.owner, found.inputs)
        return totals_of_values(*self._in_units(found, observed), found.owner, found.inputs)

    def losses(self, found: Gathered) -> Tensor:
        """The loss of each input, (N,): the share of its labels that are wrong, or its mean squared error in target units."""
        if not self.likelihood.probabilities:
            return _by_input((found.mean - found.targets).double().square() * self.scale**2, found)
        guess = found.mean.argmax(1) if found.mean.dim() == 2 else (found.mean > 0.5).long()
        return _by_input((guess != found.targets).double(), found)

    @property
    def score(self) -> str:
        """The score that decides which inputs are answered."""
        return "softmax" if self.likelihood.probabilities else "variance"

    def knows(self, found: Gathered) -> bool:
        """Whether the contender's doubt differs between inputs at all; with constant noise alone it does not."""
        return self.likelihood.probabilities or bool((found.scores["variance"] > 0).any())

    def _in_units(self, found: Gathered, observed: float) -> tuple[Tensor, Tensor, Tensor]:
        return found.mean * self.scale, (found.variance + observed) * self.scale**2, found.targets * self.scale


def compare(
    dense: nn.Module | None,
    sparse: nn.Module,
    test: Batches,
    validation: Batches,
    *,
    task: str | Likelihood | None = None,
    ood: Mapping[str, Batches] | None = None,
    shifts: Mapping[str, Sequence[Batches]] | None = None,
    more: Sequence[Contender] = (),
    samples: int = 100,
    seed: int = 0,
    scale: float = 1.0,
    dim: int | None = None,
    replicates: int = REPLICATES,
) -> dict[str, Any]:
    """Compare on the same test data: the dense model as it is, with a temperature, and with MC dropout; any further
    contenders; and the sparse model by its mean and with Monte-Carlo samples.

    dense: the model before compression; None leaves its rows out. sparse: a variational model, pruned or not.
    test, validation: functions that give batches of (inputs, targets). What has to be fitted (temperature, dropout rate, the
        noise of a regression) is fitted on `validation`.
    task, dim: as in `mc_predict`; labels of -100 do not count, and inputs without other labels are left out.
    ood: out-of-distribution batches by name; their targets are ignored, except for -100.
    shifts: for each kind of corruption, the same inputs at rising levels, the first uncorrupted (see `shifts`).
    more: further contenders, listed between the dense and the sparse ones.
    scale: for regression, the factor from a model's units to the target's own.
    replicates: number of test sets drawn for the intervals.

    MC dropout uses the dense model's own dropout; if it has none, dropout is inserted at the rate with the lowest validation
    NLL.

    Returns a JSON-able dict: "task", "samples", "seed", "temperature", "dropout", "reference", "replicates", and "contenders",
    a list of {"name", "about", "metrics", "difference", "reliability", "rejection", "selective", "ood"}; None for what does
    not apply. "difference" has each figure minus that of the reference (dense with its temperature, else the first contender),
    with its 95% interval by the paired bootstrap. With shifts also "shift": {"inputs", "kept", "curves": {kind: {contender:
    figures of each level}}, "mean": {contender: figures averaged over kinds and levels, "difference" as above}}. Raises what
    `mc_predict` raises.
    """
    likelihood = resolve(unwrapped(sparse), task, dim)
    judge = Judge(likelihood, scale, validation)
    temperature, dropout, contenders = None, None, []
    if dense is not None:
        plain = likelihood.plain()  # calibration was fitted for the sparse model alone
        contenders, temperature, dropout = dense_contenders(dense, validation, plain, samples, seed)
    contenders += [
        *more,
        mean_contender("sparse, mean", sparse, likelihood),
        sampled_contender("sparse, samples", sparse, likelihood, samples, seed),
    ]
    reference = next((c.name for c in contenders if c.name == "dense, temperature"), contenders[0].name)
    rows, totals, observed = [], {}, {}
    for contender in contenders:
        observed[contender.name] = judge.observation_variance(contender)
        found = judge.gathered(contender, test)
        totals[contender.name] = [judge.totals(found, observed[contender.name])]
        rows.append(_row(contender, found, observed[contender.name], judge, ood or {}))
    differences = paired_bootstrap(totals, reference, replicates, seed)
    result = {
        "task": likelihood.name,
        "samples": samples,
        "seed": seed,
        "temperature": temperature,
        "dropout": dropout,
        "reference": reference,
        "replicates": replicates,
        "contenders": [{**row, "difference": differences[row["name"]]} for row in rows],
    }
    if shifts:
        result["shift"] = _shifted(contenders, shifts, judge, observed, reference, replicates, seed)
    return result


def _row(contender: Contender, found: Gathered, observed: float, judge: Judge, ood: Mapping[str, Batches]) -> dict[str, Any]:
    losses, knows = judge.losses(found), judge.knows(found)
    percent = judge.likelihood.probabilities
    doubt = "entropy" if percent else "variance"
    outside = {name: judge.gathered(contender, batches).scores for name, batches in ood.items()} if knows else {}
    targets = [1 - accuracy for accuracy in ACCURACIES] if percent else []
    return {
        "name": contender.name,
        "about": contender.about,
        "metrics": judge.metrics(found, observed),
        "reliability": reliability(found.mean, found.targets) if percent else None,
        "rejection": {"score": doubt, **rejection(found.scores[doubt], losses)} if knows else None,
        "selective": {"score": judge.score, **selective(found.scores[judge.score], losses, targets)} if knows else None,
        "ood": {
            name: {score: auroc(found.scores[score], scores[score]) for score in scores} for name, scores in outside.items()
        },
    }


def _shifted(
    contenders: Sequence[Contender],
    shifts: Mapping[str, Sequence[Batches]],
    judge: Judge,
    observed: Mapping[str, float],
    reference: str,
    replicates: int,
    seed: int,
) -> dict[str, Any]:
    """Figures of each contender on each kind of corruption at each level, and their average over all but the first level."""
    curves: dict[str, dict[str, list[dict[str, float]]]] = {kind: {} for kind in shifts}
    totals: dict[str, list[Totals]] = {contender.name: [] for contender in contenders}
    inputs = 0
    for contender in contenders:
        as_they_are: dict[int, dict[str, float]] = {}
        for kind, levels in shifts.items():
            points = []
            for level, batches in enumerate(levels):
                if not level and (known := as_they_are.get(id(batches))) is not None:
                    points.append(known)
                    continue
                found = judge.gathered(contender, batches)
                inputs = found.inputs
                point = judge.metrics(found, observed[contender.name])
                if judge.knows(found):
                    point["selective"] = _selective_error(found, judge)
                points.append(point)
                if level:
                    totals[contender.name].append(judge.totals(found, observed[contender.name]))
                else:
                    as_they_are[id(batches)] = point
            curves[kind][contender.name] = points
    differences = paired_bootstrap(totals, reference, replicates, seed)
    mean = {name: {key: float(value) for key, value in _mean_figures(sets).items()} for name, sets in totals.items()}
    means = {name: {**figures, "difference": differences[name]} for name, figures in mean.items()}
    return {"inputs": inputs, "kept": KEPT, "curves": curves, "mean": means}


def _mean_figures(sets: Sequence[Totals]) -> dict[str, Tensor]:
    every = [totals.figures() for totals in sets]
    return {key: torch.stack([one[key] for one in every]).mean() for key in every[0]}


def _selective_error(found: Gathered, judge: Judge) -> float:
    """Error in percent, or RMSE, of the surest `KEPT` percent of the inputs."""
    curve = selective(found.scores[judge.score], judge.losses(found), steps=100)
    loss = curve["loss"][KEPT - 1]
    return 100 * loss if judge.likelihood.probabilities else loss**0.5


def _by_input(values: Tensor, found: Gathered) -> Tensor:
    """Means over each input's rows."""
    total = torch.zeros(found.inputs, dtype=torch.float64).index_add(0, found.owner, values.double())
    return total / found.owner.bincount(minlength=found.inputs).clamp_min(1)
