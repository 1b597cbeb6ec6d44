"""What a run's models get wrong on validation and test data: each sees them once, and all figures are made of that."""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from svdcompress.likelihoods import likelihood_for, own_likelihood
from svdcompress.sources import Data, Examples
from svdcompress.train import losses, metrics_of
from svdcompress.uncertainty import Explained


class Pass(NamedTuple):
    """each: as `train.losses` gives it. explained: of a model of numbers."""

    each: tuple[Tensor, Tensor, Tensor]
    explained: Explained | None


class Passes:
    """One model's, where it is. A pass is made where a figure asks for it first: a large model takes minutes for one."""

    def __init__(self, model: nn.Module, data: Data) -> None:
        self._model, self._data = model, data
        self.likelihood = own_likelihood(model, data.task, data.dim).of_mean()

    @cached_property
    def validation(self) -> Pass:
        """Over the validation data."""
        return self._over(self._data.validation)

    @cached_property
    def test(self) -> Pass:
        """Over the test data."""
        return self._over(self._data.test)

    @cached_property
    def noise_precision(self) -> float | None:
        """1 / noise variance of a regression that fits the validation data best, in the units of the loss; None for other
        tasks."""
        if not self.likelihood.constant_noise:
            return None
        rmse = metrics_of(self.validation.each, likelihood_for(self._data.task, self._data.dim))["rmse"]
        return 1 / max(rmse**2, 1e-12)

    def validation_metrics(self) -> dict[str, Any]:
        """As `train.evaluate`, by the model's own likelihood."""
        return metrics_of(
            self.validation.each, self.likelihood, scale=self._data.target_scale, explained=self.validation.explained
        )

    def test_metrics(self) -> dict[str, Any]:
        """The same on the test data; the noise of a regression is that of the validation data."""
        likelihood = likelihood_for(self.likelihood, tau=self.noise_precision)
        return metrics_of(self.test.each, likelihood, scale=self._data.target_scale, explained=self.test.explained)

    def _over(self, examples: Examples) -> Pass:
        explained = None if self.likelihood.probabilities else Explained()
        device: torch.device = next(self._model.parameters()).device
        return Pass(losses(self._model, examples, self.likelihood, device=device, explained=explained), explained)
