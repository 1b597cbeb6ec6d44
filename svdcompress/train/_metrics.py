"""Metrics of a model on examples: error in percent, or RMSE and R2, and the mean negative log likelihood in nats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from svdcompress.batch import call, in_eval
from svdcompress.errors import DataError
from svdcompress.likelihoods import Likelihood, likelihood_for
from svdcompress.sources import Examples, fitting, like
from svdcompress.uncertainty import Explained

EVALUATION_BATCH = 1000
"""Examples in a pass, or fewer if their activations would take too much memory (`sources.fitting`)."""


@torch.no_grad()
def evaluate(
    model: nn.Module,
    examples: Examples,
    task: str | Likelihood,
    *,
    device: torch.device | str = "cpu",
    batch_size: int | None = None,
    tau: float | None = None,
    scale: tuple[float, float] | None = None,
    dim: int = 1,
) -> dict[str, Any]:
    """Metrics of the deterministic model (`eval()`) on all examples.

    classification, binary: {"error": percent, "nll"}. regression, gaussian: {"rmse", "nll", "r2"} in the target's own units;
    r2: None where no target varies (see `svdcompress.uncertainty.Explained`).
    batch_size: examples in a pass; None: 1000, or as many as fit (see `losses`).
    tau: 1 / noise variance of a regression, in the units of the loss (None: the one that fits these examples best).
    scale: the mean and standard deviation by which the targets were standardized.
    dim: the dimension of the output that holds the classes; positions of the class -100 do not count.
    """
    likelihood = likelihood_for(task, None if isinstance(task, Likelihood) else dim)
    if likelihood.constant_noise:  # a run passes on the noise that it found, whatever its task
        likelihood = likelihood_for(likelihood, tau=tau)
    explained = None if likelihood.probabilities else Explained()
    each = losses(model, examples, likelihood, device=device, batch_size=batch_size, explained=explained)
    return metrics_of(each, likelihood, scale=scale, explained=explained)


def metrics_of(
    each: tuple[Tensor, Tensor, Tensor],
    likelihood: Likelihood,
    *,
    scale: tuple[float, float] | None = None,
    explained: Explained | None = None,
) -> dict[str, Any]:
    """The metrics of `evaluate` from the result of `losses`. Raises DataError if no position counts."""
    first, second, count = (part.sum() for part in each)
    if not count:
        raise DataError("data.target: every position has the class -100, which does not count, so there is nothing to evaluate")
    found = likelihood.metrics(float(first), float(second), float(count), 1.0 if scale is None else scale[1])
    return found if explained is None else {**found, "r2": explained.r2}


@torch.no_grad()
def losses(
    model: nn.Module,
    examples: Examples,
    task: str | Likelihood,
    *,
    device: torch.device | str = "cpu",
    batch_size: int | None = None,
    dim: int = 1,
    explained: Explained | None = None,
    seen: Callable[[Tensor, tuple[Tensor, Tensor, Tensor]], None] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """What each example adds to the metrics of the deterministic model, (N,) each, on the CPU: wrong predictions or squared
    errors, negative log likelihoods (for a regression squared errors again, as its noise is not known here), and how many
    numbers these are sums of.

    batch_size: examples in a pass; None: 1000, or as many as fit: fewer of large images, whose activations would take
        gigabytes, judged by a trial pass of the first example (`svdcompress.sources.fitting`).
    dim: as for `evaluate`; an example whose positions all have the class -100 has 0 numbers. explained: also receives the
    values of each batch. seen: is called with each batch's targets and the `figures` of its likelihood, on the device.
    """
    likelihood = task if isinstance(task, Likelihood) else likelihood_for(task, dim)
    size = fitting(model, examples, EVALUATION_BATCH, device=device) if batch_size is None else batch_size
    parts = []
    with in_eval(model):
        for inputs, targets in examples.batches(size, device=device):
            output = call(model, inputs)
            each = likelihood.figures(output, targets)
            if explained is not None:
                mean = likelihood.answers(output)
                explained.add(mean, like(targets, mean), each[2])
            if seen is not None:
                seen(targets, each)
            parts.append([part.reshape(len(part), -1).sum(1, dtype=torch.float64).cpu() for part in each])
    first, second, count = (torch.cat(column) for column in zip(*parts, strict=True))
    return first, second, count
