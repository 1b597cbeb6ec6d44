"""Learning from another model's outputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from svdcompress.batch import call
from svdcompress.likelihoods import Likelihood, Loss
from svdcompress.recipe import Distillation
from svdcompress.train._layerwise import Layerwise


class Teacher:
    """A model whose outputs are targets in addition to the true ones (Hinton et al. 2015, arXiv 1503.02531).

    classification: its soft targets at a temperature. Other tasks: the means of its predictions in place of the targets, in
    the same loss.
    """

    def __init__(self, model: nn.Module, settings: Distillation, likelihood: Likelihood, loss: Loss) -> None:
        self.model, self.settings, self.likelihood, self.loss = model, settings, likelihood, loss
        self.layers: Layerwise | None = None
        self._left = 1.0
        self._called: Any = model

    def ready(self, device: torch.device, compiled: bool) -> None:
        """Move the teacher to the student's device, and compile it if the student is compiled."""
        self.model.to(device).eval()
        self._called = torch.compile(self.model) if compiled else self.model

    def begin(self, share: float) -> None:
        """Prepare for the student's pass over a batch, after which `mix` is called. share: of the training that is done.

        The weight of the layers' error falls as (1 - share)^2: it leads the student near the teacher, but in the end what fits
        into fewer units is not what the teacher's layers give.
        """
        self._left = (1 - share) ** 2
        if self.layers is not None:
            self.layers.clear()

    @torch.no_grad()
    def answer(self, inputs: Any) -> Any:
        """The teacher's output."""
        return call(self._called, inputs)

    def mix(self, loss: Tensor, output: object, inputs: Any, known: Any = None) -> Tensor:
        """`(1 - weight) * loss + weight * (loss against the teacher's outputs)`, plus the weighted error of the layers if they
        are compared. output: the student's, for `inputs`; known: the teacher's output (None: it is computed)."""
        teacher = self.answer(inputs) if known is None else known
        weight, temperature = self.settings.weight, self.settings.temperature
        if weight:
            loss = (1 - weight) * loss + weight * self.likelihood.soft_loss(self.loss, output, teacher, temperature)
        error = None if self.layers is None else self.layers.error()
        return loss if error is None else loss + self.settings.layers * self._left * error
