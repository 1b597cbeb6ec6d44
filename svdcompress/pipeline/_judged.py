"""What a model gets wrong, example by example, so that two models can be compared."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from svdcompress.calibrate import draws_of, fit_knob, nll_rows
from svdcompress.likelihoods import TASKS, Likelihood, likelihood_for
from svdcompress.pipeline._context import Context
from svdcompress.pipeline._figures import there
from svdcompress.pipeline._listening import listening
from svdcompress.search import Losses
from svdcompress.train import losses

TEMPERED = 20_000
"""The most targets for which the NLL of each trial is computed with a temperature, and on training examples. With more, errors
alone tell enough, unless several are of one example: then its mean NLL is taken as it is."""

TRAINED = 5000
"""Training examples that the NLL is computed on, in addition to the validation examples; fewer with several targets each, so
that these have TEMPERED targets in all."""


def judged(model: nn.Module, examples: Any, data: Any, device: Any, *, errors_alone: bool = False) -> Losses:
    """What a model, on `device`, gets wrong on examples. errors_alone: without the NLL, which takes training examples, too."""
    likelihood = likelihood_for(data.task, data.dim)
    first, second, numbers = losses(model, examples, likelihood, device=device)
    some = numbers > 0
    scale = 1.0 if likelihood.probabilities or data.target_scale is None else data.target_scale[1] ** 2
    nll = None
    positions = bool((numbers[some] != 1).any())  # however many there are, examples may be too few
    if likelihood.probabilities and (positions or float(numbers.sum()) <= TEMPERED) and not errors_alone:
        tempering = likelihood.name in TASKS and float(numbers.sum()) <= TEMPERED
        nll = _tempered(model, examples, data.train, likelihood, device) if tempering else second[some] / numbers[some]
    finite = bool(first.isfinite().all() and second.isfinite().all())
    return Losses(first[some] * scale, numbers[some], likelihood.probabilities, nll, finite)


def on_validation(context: Context, data: Any, model: nn.Module, *, errors_alone: bool = False) -> Losses:
    """What a model gets wrong on the validation data, on the run's device; the model is back on the CPU afterwards. Raises
    Interrupted between two batches if the run is asked to stop."""
    device, data = context.place.device, listening(data, partial(context.check, "while judging a model"))
    with there(device, model):
        return judged(model, data.validation, data, device, errors_alone=errors_alone)


def _tempered(model: nn.Module, examples: Any, train: Any, likelihood: Likelihood, device: Any) -> Tensor:
    """(M,) mean NLL of each of the examples and of training examples, with the temperature that fits the former best: a run
    fits one in the end, and both kinds show what compression loses."""
    plain = likelihood.plain()
    held = draws_of(model, examples, likelihood, device=device)
    knob = fit_knob(plain, held)[0]
    count = min(TRAINED, max(1, TEMPERED * len(examples) // held.total))
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))[:count]
    rows = []
    for draws in (held, draws_of(model, train.subset(order.sort().values), likelihood, device=device)):
        each, count = nll_rows(plain, draws, knob), draws.owner.bincount()
        total = torch.zeros(len(count), dtype=each.dtype).index_add_(0, draws.owner, each)
        rows.append((total / count)[count > 0])
    return torch.cat(rows)
