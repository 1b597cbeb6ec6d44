"""`mc_predict`, which sums draws of a model's output as they are made, and predictions without noise."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from operator import index
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from svdcompress.batch import call, to_device, unwrapped
from svdcompress.errors import ModelError, UsageError
from svdcompress.layers import Sampler, StochasticLayer, VariationalLayer, drawing, stochastic_layers
from svdcompress.likelihoods import Likelihood, Prediction, Sums, likelihood_for, resolve
from svdcompress.uncertainty._chain import once, rowwise, width
from svdcompress.uncertainty._inputs import batch_size, check_rows, device_of, take
from svdcompress.uncertainty._look import fitting, is_whole, look
from svdcompress.uncertainty._moments import moments_predict
from svdcompress.uncertainty._passes import DrawRunner, evaluating

BUDGET = {"cpu": 2**21}  # most numbers in a pass's widest activation: with fewer, overhead outweighs the gain from caches
OTHER_BUDGET = 2**25

MOST_SAMPLES = 10_000_000
"""Most draws allowed: their error is already below a thousandth of the spread, so more of them add nothing."""


class NotFiniteError(ModelError):
    """A model's predictions are NaN or infinite."""


def mc_predict(
    model: nn.Module,
    x: Any,
    samples: int = 100,
    *,
    task: str | Likelihood | None = None,
    generator: torch.Generator | None = None,
    members: bool = False,
    local: bool = False,
    antithetic: bool = False,
    chunk: int | None = None,
    method: str = "sampling",
    full: bool = False,
    tau: float | Tensor | None = None,
    dim: int | None = None,
) -> Prediction:
    """The predictive distribution of a converted model (or one with MC dropout) for a batch of inputs, and its decomposition.

    The model runs in `eval()` (irrelevant weights are 0, norms use running statistics) and is left in the mode it was in.
    Sums are kept in float64; memory does not grow with the number of samples.

    model: one with variational or MC-dropout layers.
    x: a tensor, a tuple of positional inputs or a dict of keyword inputs, with the batch as first dimension.
    samples: draws for each input, from 1 to 10 million.
    task: "classification" (logits), "binary" (one logit for each question), "regression" (values), or "gaussian" (means and
        log variances: two tensors, or one with the means in the first half), or a `Likelihood`. None: the likelihood that the
        model carries (`set_likelihood`; a run's models have one), else classification.
    generator: source of the noise; the same state gives the same result. None: seeded by torch's default generator.
    members: True draws one set of weights for all inputs, in all layers. False does so only in layers whose weight is used at
        several positions of a row (convolutions, Linear on tokens, modules called twice, tied weights); the others draw noise
        for each row, which gives each row by itself the same distribution. Two small passes without noise find out which
        layers are which.
    local: use local reparameterization, the training estimator, in all layers: independent noise at each position. Where
        weights are shared over positions, sums over positions then vary less than under the posterior.
    antithetic: draw in pairs of opposite noise: half the random numbers and a steadier mean, but the draws of a pair are not
        independent. Needs an even number of samples.
    chunk: the most inputs times draws in one pass; None: chosen from the width of the model. If rows affect each other, as in
        a mean over the batch, the batch is never split, and `chunk` must be at least its size.
    method: "sampling", or "moments" for one pass that propagates mean and variance, taking all units as independent and
        normal: fast, but inaccurate where they are not (measured in docs/uncertainty.md). It uses `samples` only for draws of
        the logits.
    full: covariance matrices (B, C, C) in place of variances (B, C).
    tau: for regression, the precision of the observations (1 / their noise variance), a number or one for each output; None:
        that of the likelihood; if it has none, observations are without noise.
    dim: the class dimension of the model's output, which is not the first; None: that of the likelihood, or 1.

    Raises UsageError, ModelError (no layer that draws; an output that does not fit the task, or whose number of rows is not
    that of the inputs) or DataError (an empty batch, values that are not finite, a shape that the model does not accept).
    """
    samples = _check(samples, antithetic, chunk, method)
    if members and local:
        raise UsageError("members, local: they exclude each other; a member is one set of weights")
    if method == "moments" and (members or local or antithetic):
        raise UsageError('members, local, antithetic: they choose how to draw, but method="moments" draws nothing')
    model = unwrapped(model)
    likelihood = resolve(model, task, dim, tau)
    layers = _layers_that_draw(model)
    if generator is not None and not isinstance(generator, torch.Generator):
        raise UsageError(f"generator: {generator!r}; a torch.Generator is needed, as in torch.Generator().manual_seed(0)")
    device = device_of(model)
    size = batch_size(x)
    x = to_device(x, device)
    generator = _generator(generator, device)
    sums = likelihood.sums(size, full)
    run = partial(_heads, model, likelihood)
    whole = partial(is_whole, model, run, x, size)
    if method == "moments":
        with evaluating(model), drawing(layers, None):
            inputs, _ = _plan(size, 1, look(model, run, x, size).widest, None, chunk, device, False, whole)
            slices = (
                (take(x, start, start + inputs, size), start, min(inputs, size - start)) for start in range(0, size, inputs)
            )
            return _finite(moments_predict(model, slices, sums, samples, generator))
    with evaluating(model):
        rows = not members and rowwise(model, x)
        if rows and (local or once(model, x)) and (known := width(model, x, size)):
            widest, shared = known, frozenset()
        else:
            widest, shared = look(model, run, x, size, layers if not (members or local) else ())
        sampler = Sampler(generator, members, shared, layers)
        draws = DrawRunner(run, layers, sampler, antithetic, rows and not shared)
        if device.type == "cpu":
            _keep_freed_memory()
        weights = _weights(layers if members else shared) if draws.weights else None
        inputs, at_once = _plan(size, samples, widest, weights, chunk, device, antithetic, whole)
        for start, count in _order(size, samples, inputs, at_once, draws.weights):
            if start == 0:
                draws.resample()
            some = min(inputs, size - start)
            with fitting(model):
                output = draws(take(x, start, start + some, size), some, count)
            check_rows(output, some, 1)
            sums.add(output, start)
    return _finite(sums.prediction(samples))


def _weights(layers: Iterable[StochasticLayer]) -> int:
    """How many numbers one draw of the layers' weights has."""
    return sum(layer.weight.numel() for layer in layers if isinstance(layer, VariationalLayer))


def mean_predict(
    model: nn.Module,
    x: Any,
    *,
    task: str | Likelihood | None = None,
    temperature: float = 1.0,
    dim: int | None = None,
) -> Prediction:
    """The prediction of a model, dense or variational, from one pass in `eval()` without any noise; its `samples` is 1.

    temperature: a number above 0 that logits are divided by, in addition to the temperature of the likelihood; 1 for values,
    which have no logits.

    The likelihood is that of the mean model (`Likelihood.of_mean`), which calibration fits separately. Otherwise as
    `mc_predict`.
    """
    likelihood = resolve(unwrapped(model), task, dim).of_mean()
    if not 0 < temperature < float("inf"):
        raise UsageError(f"temperature: {temperature}; a number above 0 is needed")
    if temperature != 1 and not likelihood.probabilities:
        raise UsageError(f"temperature: {temperature}; task {likelihood.name!r} has no logits to divide")
    size = batch_size(x)
    sums = likelihood.sums(size)
    _add_mean(model, x, likelihood, sums, size, temperature)
    return _finite(sums.prediction(1))


def ensemble_predict(models: Sequence[nn.Module], x: Any, *, task: str | Likelihood, dim: int | None = None) -> Prediction:
    """The prediction of a deep ensemble (Lakshminarayanan et al. 2017): the average of its members, each without noise.

    models: dense models, or variational ones, of which the means are used. The prediction's `samples` is their number, and its
    epistemic part their spread. x, task, dim: as in `mc_predict`.
    """
    if not models:
        raise UsageError("models: an ensemble needs at least one member")
    likelihood = likelihood_for(task, dim)
    size = batch_size(x)
    sums = likelihood.sums(size)
    for model in models:
        _add_mean(model, x, likelihood, sums, size)
    return _finite(sums.prediction(len(models)))


def _add_mean(model: nn.Module, x: Any, likelihood: Likelihood, sums: Sums, size: int, temperature: float = 1.0) -> None:
    """Add a model's output without noise to the sums, as one draw."""
    x = to_device(x, device_of(model))
    with evaluating(model), drawing(stochastic_layers(model), None):
        run = partial(_heads, model, likelihood)
        widest = look(model, run, x, size).widest
        inputs, _ = _plan(size, 1, widest, None, None, device_of(model), False, partial(is_whole, model, run, x, size))
        for start in range(0, size, inputs):
            heads = run(take(x, start, start + inputs, size))
            check_rows(heads, min(inputs, size - start))
            heads = heads / temperature if temperature != 1 else heads
            sums.add(tree_map(lambda tensor: tensor.unsqueeze(0), heads), start)


def _heads(model: nn.Module, likelihood: Likelihood, inputs: Any) -> Any:
    return likelihood.heads(call(model, inputs))


def _finite(prediction: Prediction) -> Prediction:
    if not bool(prediction.mean.isfinite().all() and prediction.variance.isfinite().all()):
        raise NotFiniteError("the model's outputs are not finite (NaN or infinite); has its training diverged?")
    return prediction


def _check(samples: Any, antithetic: bool, chunk: Any, method: str) -> int:
    count = _whole("samples", samples)
    if count > MOST_SAMPLES:
        raise UsageError(
            f"samples: more than {MOST_SAMPLES:,}; use at most {MOST_SAMPLES:,}, as more would not change the result"
        )
    if method not in ("sampling", "moments"):
        raise UsageError(f"method: {method!r} is unknown; one of sampling, moments")
    if antithetic and count % 2:
        raise UsageError(f"samples: {count}; antithetic draws come in pairs, so an even number is needed")
    if chunk is not None:
        _whole("chunk", chunk)
    return count


def _whole(name: str, value: Any) -> int:
    try:
        count = index(value)
    except TypeError:
        raise UsageError(f"{name}: {value!r} is not a whole number") from None
    if isinstance(value, bool) or count < 1:
        raise UsageError(f"{name}: {value!r}; at least 1 is needed")
    return count


def _layers_that_draw(model: nn.Module) -> list[StochasticLayer]:
    layers = stochastic_layers(model)
    if not any(getattr(layer, "p", 1) for layer in layers):
        raise ModelError(
            f"{type(model).__name__} has no variational layer and no MC dropout: there is no uncertainty to sample; "
            "call svdcompress.convert(model), or svdcompress.convert_dropout(model), first"
        )
    return layers


def _generator(generator: torch.Generator | None, device: torch.device) -> torch.Generator:
    """A generator on the model's device: the given one, or a new one seeded from it (or from torch's default)."""
    if generator is not None and generator.device.type == device.type:
        return generator
    source = torch.device("cpu") if generator is None else generator.device
    seed = int(torch.randint(2**62, (), device=source, generator=generator))
    return torch.Generator(device).manual_seed(seed)


@cache
def _keep_freed_memory() -> None:
    """Free one block as large as those of a pass, so that glibc keeps such blocks for reuse.

    glibc returns free memory to the system beyond twice the largest block that was freed, and getting it back, page by page,
    takes a fifth of the time of a small network's draws. The call costs microseconds, once, and at most 16 MB that are kept.
    """
    torch.empty(BUDGET["cpu"])


def _plan(
    size: int,
    samples: int,
    widest: int,
    weights: int | None,
    chunk: int | None,
    device: torch.device,
    antithetic: bool,
    whole: Callable[[], bool],
) -> tuple[int, int]:
    """How many inputs and draws go into one pass.

    The batch is split before the draws are, so that the noise-free part is computed once; where weights are drawn, it is the
    other way round. weights: numbers in one draw of them, or None. whole: tells whether the batch must not be split, and is
    called only if it would be.
    """
    budget = BUDGET.get(device.type, OTHER_BUDGET)
    rows = chunk or max(1, budget // widest)
    least = 2 if antithetic else 1
    if weights is None:
        at_once = min(samples, max(least, rows))
        inputs = min(size, max(1, rows // at_once))
    else:
        inputs = min(size, rows)
        at_once = max(least, min(samples, rows // inputs, budget // max(weights, 1)))
    if inputs < size and whole():
        if chunk is not None and chunk < size:
            raise UsageError(
                f"chunk: {chunk}; the rows of a batch interact in this model, as in a mean over the batch, so all {size} "
                f"inputs must be in one pass: at least {size} is needed, or None"
            )
        inputs, at_once = size, max(least, min(at_once, rows // size))
    return inputs, at_once - at_once % least


def _order(size: int, samples: int, inputs: int, at_once: int, weights: bool) -> list[tuple[int, int]]:
    """(first input, number of draws) of each pass; drawn weights are used for all inputs before the next ones are drawn."""
    starts = range(0, size, inputs)
    counts = [min(at_once, samples - done) for done in range(0, samples, at_once)]
    if weights:
        return [(start, count) for count in counts for start in starts]
    return [(start, count) for start in starts for count in counts]
