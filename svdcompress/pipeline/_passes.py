"""The losses of a run's models on validation and test data: one pass over each, from which all figures are computed."""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from svdcompress.likelihoods import Binary, Classification, likelihood_for, own_likelihood
from svdcompress.pipeline._found import Found
from svdcompress.sources import Data, Examples
from svdcompress.train import losses, metrics_of
from svdcompress.uncertainty import Explained


class Pass(NamedTuple):
    """One pass over a data set. each: the result of `train.losses`. explained: for the R2 of a regression; else None. found: of
    the test data, for classes and yes-or-no questions; else None."""

    each: tuple[Tensor, Tensor, Tensor]
    explained: Explained | None
    found: Found | None = None


class Passes:
    """The passes of one model, on its device. A pass is made when a figure first needs it: it takes minutes for a large
    model."""

    def __init__(self, model: nn.Module, data: Data) -> None:
        self._model, self._data = model, data
        self.likelihood = own_likelihood(model, data.task, data.dim).of_mean()

    @cached_property
    def validation(self) -> Pass:
        """The pass over the validation data."""
        return self._over(self._data.validation)

    @cached_property
    def test(self) -> Pass:
        """The pass over the test data."""
        counted = type(self.likelihood) in (Classification, Binary)  # targets of others may be anything
        return self._over(self._data.test, Found(self.likelihood.classes) if counted else None)

    @cached_property
    def noise_precision(self) -> float | None:
        """1 / noise variance that fits the validation data best, in the units of the loss; None unless the model is a
        regression with constant noise."""
        if not self.likelihood.constant_noise:
            return None
        rmse = metrics_of(self.validation.each, likelihood_for(self._data.task, self._data.dim))["rmse"]
        return 1 / max(rmse**2, 1e-12)

    def validation_metrics(self) -> dict[str, Any]:
        """The metrics of `train.evaluate` on the validation data, by the model's own likelihood."""
        return metrics_of(
            self.validation.each, self.likelihood, scale=self._data.target_scale, explained=self.validation.explained
        )

    def test_metrics(self) -> dict[str, Any]:
        """The same on the test data; a regression's constant noise is the one fitted to the validation data."""
        likelihood = likelihood_for(self.likelihood, tau=self.noise_precision)
        return metrics_of(self.test.each, likelihood, scale=self._data.target_scale, explained=self.test.explained)

    def _over(self, examples: Examples, found: Found | None = None) -> Pass:
        explained = None if self.likelihood.probabilities else Explained()
        device: torch.device = next(self._model.parameters()).device
        each = losses(self._model, examples, self.likelihood, device=device, explained=explained, seen=found)
        return Pass(each, explained, found)
