"""A Laplace approximation of the dense model's last layer, by laplace-torch if it is installed."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from svdcompress.errors import DependencyError, ModelError
from svdcompress.likelihoods import Likelihood, Prediction
from svdcompress.sources import Examples
from svdcompress.uncertainty import Contender

NAME = "dense, Laplace on the last layer"
TASKS = ("classification", "regression")
ABOUT = (
    "laplace-torch: Kronecker-factored GGN of the last layer, prior precision by marginal likelihood (Daxberger et al. 2021)"
)


class Batches:
    """The training data as laplace-torch expects them: batches, and a `dataset` whose length is N."""

    def __init__(self, examples: Examples, batch_size: int, device: torch.device) -> None:
        self.dataset, self.batch_size, self.device = examples, batch_size, device

    def __iter__(self) -> Iterator[tuple[Any, Tensor]]:
        yield from self.dataset.batches(self.batch_size, device=self.device)

    def __len__(self) -> int:
        return math.ceil(len(self.dataset) / self.batch_size)


class Columns(Batches):
    """The same with the targets of a regression as (B, outputs)."""

    def __iter__(self) -> Iterator[tuple[Any, Tensor]]:
        for inputs, targets in super().__iter__():
            yield inputs, targets.float().view(len(targets), -1)


def last_layer_laplace(
    dense: nn.Module, train: Examples, likelihood: Likelihood, *, samples: int = 100, seed: int = 0, batch_size: int = 500
) -> Contender:
    """The dense model with a Gaussian posterior over its last layer's weights, fitted on the training data after training.

    Its predictions are averages over samples of the linearized network's outputs (for a regression, their exact mean and
    variances).

    Raises DependencyError if laplace-torch is not installed, ModelError for a model or task that it does not support.
    """
    try:
        from laplace import Laplace  # type: ignore[import-not-found]
    except ImportError as error:
        raise DependencyError(f"{NAME}: laplace-torch is not installed (pip install laplace-torch)") from error
    if likelihood.name not in TASKS or likelihood.dim != 1:
        raise ModelError(f"{NAME}: laplace-torch takes {' and '.join(TASKS)} with one answer per input, not {likelihood.name}")
    device = next(dense.parameters()).device
    try:
        values = likelihood.name == "regression"
        batches = Columns(train, batch_size, device) if values else Batches(train, batch_size, device)
        options: dict[str, Any] = {"sigma_noise": _rmse(dense, batches)} if values else {}
        options |= {"subset_of_weights": "last_layer", "hessian_structure": "kron"}
        model = Laplace(copy.deepcopy(dense).eval(), likelihood.name, **options)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about defaults that a marginal likelihood does not use
            model.fit(batches)
            model.optimize_prior_precision(method="marglik")
    except Exception as error:  # whatever it raises for a model that it does not know
        reason = str(error).strip().partition("\n")[0]
        raise ModelError(f"{NAME}: laplace-torch cannot handle the model ({type(error).__name__}: {reason})") from error
    if values:
        return Contender(NAME, lambda inputs: _values(model, inputs, device), about=ABOUT)
    generator = torch.Generator(device).manual_seed(seed)
    return Contender(NAME, lambda inputs: _labels(model, inputs, likelihood, samples, generator, device), about=ABOUT)


@torch.no_grad()
def _rmse(dense: nn.Module, batches: Batches) -> float:
    """The RMSE on the training data: the noise that the curvature is scaled by."""
    squares = [(dense(x).view(len(y), -1) - y).square().flatten() for x, y in batches]
    return max(float(torch.cat(squares).mean().sqrt()), 1e-6)


def _labels(
    model: Any, inputs: Any, likelihood: Likelihood, samples: int, generator: torch.Generator, device: torch.device
) -> Prediction:
    drawn = model.predictive_samples(inputs.to(device), n_samples=samples, generator=generator).double()  # (S, B, C)
    sums = likelihood.sums(drawn.shape[1])
    sums.add(drawn.clamp_min(1e-300).log(), 0)  # logits of these probabilities
    return sums.prediction(samples)


def _values(model: Any, inputs: Any, device: torch.device) -> Prediction:
    mean, variance = model(inputs.to(device))  # (B, D), (B, D, D): of the function, without noise
    mean, epistemic = mean.detach().double(), variance.detach().double().diagonal(dim1=-2, dim2=-1)
    noise = torch.zeros_like(mean)  # it is fitted on the validation data, as for the other contenders
    return Prediction("regression", 1, mean, epistemic, noise, epistemic)
