"""The final posterior of a network, and its temperature: chosen and fitted on validation data."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from svdcompress.calibrate._curvature import gauss_newton
from svdcompress.calibrate._draws import Draws, affordable, draws_of, most_targets
from svdcompress.calibrate._fit import Fitted, fit_scale, fit_setting, log_variances, with_scales
from svdcompress.calibrate._kept import held, kept_of
from svdcompress.calibrate._posterior import Joint, with_variances
from svdcompress.calibrate._refit import refit
from svdcompress.calibrate._tempering import FEWEST, Tempered, fit_tempering
from svdcompress.errors import ModelError, UsageError, counted
from svdcompress.layers import set_posterior
from svdcompress.likelihoods import TASKS, Likelihood, likelihood_for
from svdcompress.relevance import hold, relevance
from svdcompress.sources import Examples, InMemory

POSTERIORS = ("variational", "scaled", "refit", "laplace-diagonal")
"""Posteriors that any layer, checkpoint and file can hold, the simplest first; "auto" tries them all."""

PRIORS = tuple(float(step) for step in range(-2, 13))
"""Log prior precisions that are tried for a Laplace approximation."""

SAMPLES, EXAMPLES, CURVATURE = 50, 5000, 5000
"""The most draws, validation examples, and training examples for a curvature."""

EVEN = 1.1
"""If the predicted deviations of nine in ten examples differ by no more than this factor, they hardly depend on the input."""

ROUNDING = 1e-6
"""Nats by which two identical predictors may differ, as outputs are float32."""

LOOKS = {"variational": 1, "scaled": 16, "refit": 16, "laplace-diagonal": 20, "auto": 50}
"""About how many sets of draws (`looked_at`) each choice takes, including those for the variational posterior."""

MOST_MACS = 2 * 10**12
"""The most multiply-accumulates for one set of draws: a minute or two on a core. Draws are cut first, then examples."""


@dataclass(frozen=True)
class Tried:
    """A posterior that was tried. nll: on validation data that it was not fitted on, in nats per target; None if it could not
    be made, for the reason in `note`."""

    name: str
    nll: float | None
    seconds: float
    note: str = ""


@dataclass(frozen=True)
class Calibrated:
    """A model with the chosen posterior, and what was fitted for its draws (`samples`) and for its mean.

    likelihood: with the temperatures, or the noise. tried: all posteriors that were tried. notes: what the user should know.
    mean_on_same: the mean, fitted only on the examples of `samples`, which may be fewer than those of `mean`.
    """

    model: nn.Module
    likelihood: Likelihood
    posterior: str
    samples: Tempered
    mean: Tempered
    tried: tuple[Tried, ...]
    notes: tuple[str, ...] = field(default=())
    mean_on_same: Tempered | None = None

    @property
    def better(self) -> str:
        """ "samples" if draws have the lower NLL on the same validation data, both tempered; otherwise "mean": one pass."""
        mean, samples = (one.after if one.taken else one.before for one in (self.mean_on_same or self.mean, self.samples))
        return "samples" if samples < mean - ROUNDING else "mean"

    def to_dict(self) -> dict[str, Any]:
        """All but the model, JSON-able."""
        return {
            "better": self.better,
            "posterior": self.posterior,
            "likelihood": {"name": self.likelihood.name, **self.likelihood.settings()},
            "samples": asdict(self.samples),
            "mean": asdict(self.mean),
            **({"mean_on_same": asdict(self.mean_on_same)} if self.mean_on_same not in (None, self.mean) else {}),
            "tried": [asdict(one) for one in self.tried],
            "notes": list(self.notes),
        }


@dataclass(frozen=True)
class _Work:
    train: Examples
    validation: Examples
    likelihood: Likelihood
    samples: int
    temperature: bool
    epochs: int
    beta: float
    seed: int
    device: Any


def calibrate(
    model: nn.Module,
    train: Examples | tuple[Any, Tensor],
    validation: Examples | tuple[Any, Tensor],
    likelihood: str | Likelihood,
    *,
    posterior: str = "variational",
    temperature: bool = True,
    macs: int = 0,
    epochs: int = 10,
    beta: float = 1.0,
    seed: int = 0,
    device: Any = "cpu",
    fit: Callable[[nn.Module], Any] | None = None,
) -> Calibrated:
    """Choose a posterior and fit the temperatures (or the noise) on validation data that the model was not trained on.

    model: variational, pruned or not; it is not changed. train: data for refits and Laplace approximations; examples, or a pair
        (inputs, targets), like validation. likelihood: a likelihood, or the name of a task.
    posterior: one of POSTERIORS, or "auto" for the one with the lowest validation NLL under cross-validation; it is preferred
        to a simpler one only if it is better by more than the standard error of the difference.
    temperature: False leaves logits, and variances that the model gives, as they are. macs: of one example, to bound the work.
        Examples with many targets (pixels, tokens) keep a fixed random part of them, the same for all posteriors, so that about
        100,000 and 2e7 numbers over all draws stay in memory; `notes` says how many.
    epochs, beta: of a refit; beta = 1 is the ELBO itself. fit: a refit of the caller's own, in place.

    Raises UsageError for an unknown posterior or a likelihood of your own, DataError if no validation target counts.
    """
    if posterior != "auto" and posterior not in POSTERIORS:
        raise UsageError(f"posterior: {posterior!r} is unknown; one of auto, {', '.join(POSTERIORS)}")
    plain = likelihood_for(likelihood).plain()
    train, validation = (InMemory(*part) if isinstance(part, tuple) else part for part in (train, validation))
    if plain.name not in TASKS:
        raise UsageError(f"likelihood: {plain.name!r} cannot be calibrated; use one of {', '.join(TASKS)}")
    first = draws_of(model, validation, plain, 0, seed, device)
    validation, samples = _bounded(validation, first, macs)
    work = _Work(train, validation, plain, samples, temperature, epochs, beta, seed, device)
    notes: list[str] = []
    wanted = ["variational"] if posterior == "variational" else list(POSTERIORS) if posterior == "auto" else []
    wanted = wanted or ["variational", posterior]
    found: dict[str, tuple[nn.Module, Fitted]] = {}
    tried = []
    if len(wanted) > 1 and len(first.owner.unique()) < FEWEST:
        few = len(first.owner.unique())
        said = f"{counted(few, 'validation example')} {'is' if few == 1 else 'are'} too few to choose a posterior"
        notes.append(f"{said}; {FEWEST} are needed")
        wanted = ["variational"]
    for name in wanted if len(wanted) > 1 else ():
        started, note = time.monotonic(), ""
        try:
            found[name] = _MADE[name](model, work, fit)
        except ModelError as error:
            note = str(error)
            notes.append(f"posterior {name}: {note}")
        nll = found[name][1].judged if name in found else None
        tried.append(Tried(name, nll, time.monotonic() - started, note))
    chosen = _best(found) if found else "variational"
    if posterior not in ("auto", chosen) and posterior in found:
        notes.append(
            f"posterior {posterior}: not used, because it does not improve the NLL on validation data "
            f"({found[posterior][1].judged:.4f}, {found['variational'][1].judged:.4f} without)"
        )
    small = found[chosen][0] if found else model
    started = time.monotonic()
    draws = draws_of(small, validation, plain, samples, seed, device)
    drawn = fit_tempering(plain, draws)
    first = first if small is model else draws_of(small, validation, plain, 0, seed, device)
    alone = same = fit_tempering(plain, first)
    if (len(first), first.total) != (len(draws), draws.total):
        most = most_targets(samples, draws.classes)
        same = fit_tempering(plain, draws_of(small, validation, plain, 0, seed, device, most))
    notes += [f"{what}: fitted on {one.part}" for what, one in (("samples", draws), ("mean", first)) if one.left_out]
    applied = work.temperature or plain.constant_noise
    if not applied:  # a temperature that is not applied must not decide which predictor is better
        drawn, alone, same = (replace(one, value=1.0, after=one.before, taken=False) for one in (drawn, alone, same))
    if plain.constant_noise:
        notes += _evenness(draws, drawn.value)
    if not found:  # there was nothing to choose from
        tried.append(Tried(chosen, drawn.after if drawn.taken else drawn.before, time.monotonic() - started))
    if work.temperature:
        notes += [f"{what}: {one.note}" for what, one in (("samples", drawn), ("mean", alone)) if one.note]
    fitted = _with(plain, drawn, alone) if applied else plain
    return Calibrated(small, fitted, chosen, drawn, alone, tuple(tried), tuple(notes), same)


def _with(likelihood: Likelihood, drawn: Tempered, alone: Tempered) -> Likelihood:
    """The likelihood with the temperatures, or the noise, that were fitted."""
    if likelihood.constant_noise:
        return type(likelihood)(**{**likelihood.settings(), "tau": drawn.value, "mean_tau": alone.value})
    return type(likelihood)(**{**likelihood.settings(), "temperature": drawn.value, "mean_temperature": alone.value})


def _evenness(draws: Draws, tau: float) -> list[str]:
    """A note for the user if a regression is equally certain of all inputs."""
    deviation = (draws.outputs.double().var(0, correction=0) + 1 / tau).sqrt()
    low, high = (float(deviation.kthvalue(max(1, round(share * len(deviation)))).values) for share in (0.05, 0.95))
    if high > EVEN * low or len(draws.owner.unique()) < FEWEST:
        return []
    return [
        "samples: the predicted deviation hardly depends on the input (nine in ten of the validation data lie within "
        f"{100 * (high / low - 1):.1f}% of each other), so all intervals have nearly the same width. If some inputs are "
        "noisier than others, a model with two outputs for each target learns that with --loss gaussian-nll"
    ]


def _best(found: dict[str, tuple[nn.Module, Fitted]]) -> str:
    """The one with the lowest NLL, unless a simpler one is within a standard error of it (and no worse than those before)."""
    best = min(found, key=lambda name: found[name][1].judged)
    least = math.inf
    for name in found:
        if name == best:
            break
        if found[name][1].judged > least:
            continue
        least = found[name][1].judged
        difference = found[name][1].rows - found[best][1].rows
        if float(difference.mean()) <= _standard_error(difference, found[name][1].owner):
            return name
    return best


def _standard_error(rows: Tensor, owner: Tensor) -> float:
    """The standard error of the mean of `rows`, (R,), of which those with one owner may go up and down together, as pixels of
    an image do: sqrt(C / (C - 1) sum_c (sum_{r in c} d_r)^2) / R for C owners, with d the deviations from the mean (the
    cluster-robust variance of Liang & Zeger 1986, for a mean)."""
    _, where = owner.unique(return_inverse=True)
    sums = torch.zeros(int(where.max()) + 1, dtype=rows.dtype).index_add_(0, where, rows - rows.mean())
    return math.sqrt(float(sums.square().sum()) * len(sums) / max(len(sums) - 1, 1)) / len(rows)


def looked_at(validation: int, macs: int) -> tuple[int, int]:
    """The number of validation examples, and of draws for each, in one set of draws for a posterior. macs: of one example."""
    allowed = MOST_MACS // max(macs, 1)
    samples = max(10, min(SAMPLES, allowed // max(min(validation, EXAMPLES), 1)))
    return min(validation, EXAMPLES, max(100, allowed // samples)), samples


def _bounded(validation: Examples, draws: Draws, macs: int) -> tuple[Examples, int]:
    """Validation examples, and the number of draws of each, limited so that work and memory stay bounded."""
    count, samples = looked_at(len(validation), macs)
    samples = affordable(samples, count, draws.total / max(len(validation), 1), draws.classes)
    if count == len(validation):
        return validation, samples
    order = torch.randperm(len(validation), generator=torch.Generator().manual_seed(0))
    return validation.subset(order[:count].sort().values), samples


def _variational(model: nn.Module, work: _Work, fit: Any) -> tuple[nn.Module, Fitted]:
    def draw(_: float) -> Draws:
        return draws_of(model, work.validation, work.likelihood, work.samples, work.seed, work.device)

    return model, fit_setting(draw, work.likelihood, (0.0,), temperature=work.temperature)


def _scaled(model: nn.Module, work: _Work, fit: Any) -> tuple[nn.Module, Fitted]:
    small = copy.deepcopy(model)
    set_posterior(small, "independent")
    with held(small):
        scales, fitted = fit_scale(
            small,
            work.validation,
            work.likelihood,
            work.samples,
            temperature=work.temperature,
            seed=work.seed,
            device=work.device,
        )
    hold(small, relevance(model))
    return with_scales(small, log_variances(small), scales), fitted


def _refitted(model: nn.Module, work: _Work, fit: Any) -> tuple[nn.Module, Fitted]:
    likelihood = likelihood_for(work.likelihood, tau=_precision(model, work))
    small = refit(
        model, work.train, likelihood, epochs=work.epochs, beta=work.beta, seed=work.seed, device=work.device, fit=fit
    )
    return _scaled(small, work, fit)


def _precision(model: nn.Module, work: _Work) -> float | None:
    """The noise precision of a regression by the mean model, which weighs the data against the KL; None for other tasks."""
    if not work.likelihood.constant_noise:
        return None
    return fit_tempering(work.likelihood, draws_of(model, work.validation, work.likelihood, device=work.device)).value


def _laplace(model: nn.Module, work: _Work, fit: Any) -> tuple[nn.Module, Fitted]:
    small = copy.deepcopy(model)
    hold(small, relevance(model))
    kept = kept_of(small)
    tau = _precision(small, work)
    more = {} if tau is None else {"tau": tau}
    with held(small):
        curvature = gauss_newton(
            small, kept, work.train, work.likelihood, "diagonal", **more, most=CURVATURE, seed=work.seed, device=work.device
        )

    def baked(log_prior: float) -> nn.Module:
        variances: Tensor = Joint(kept, curvature, math.exp(log_prior)).variances()
        return with_variances(small, kept, variances)

    def draw(log_prior: float) -> Draws:
        return draws_of(baked(log_prior), work.validation, work.likelihood, work.samples, work.seed, work.device)

    fitted = fit_setting(draw, work.likelihood, PRIORS, start=PRIORS[-1], temperature=work.temperature)
    return baked(fitted.setting), fitted


_MADE: dict[str, Callable[[nn.Module, _Work, Any], tuple[nn.Module, Fitted]]] = {
    "variational": _variational,
    "scaled": _scaled,
    "refit": _refitted,
    "laplace-diagonal": _laplace,
}
