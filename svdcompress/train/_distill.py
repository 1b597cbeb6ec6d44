"""Learning from another model's outputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from svdcompress.recipe import Distillation
from svdcompress.sources import Loss, call, classes_second, main_output


class Teacher:
    """The outputs of a model as targets beside the true ones (Hinton et al. 2015, arXiv 1503.02531).

    classification: its soft targets at a temperature, times the temperature's square, so that gradients keep their size.
    Other tasks: its outputs in place of the targets, in the same loss.
    dim: the dimension of the outputs that holds the classes; the divergence is the mean over all positions.
    """

    def __init__(self, model: nn.Module, settings: Distillation, task: str, loss: Loss, dim: int = 1) -> None:
        self.model, self.settings, self.task, self.loss, self.dim = model, settings, task, loss, dim

    def mix(self, loss: Tensor, output: object, inputs: Any) -> Tensor:
        """`(1 - weight) * loss + weight * (loss against the teacher's outputs)`; output: the student's, for `inputs`."""
        with torch.no_grad():
            soft = main_output(call(self.model, inputs))
        weight, temperature = self.settings.weight, self.settings.temperature
        if self.task != "classification":
            return (1 - weight) * loss + weight * self.loss(output, soft)
        own, soft = (F.log_softmax(self._rows(logits) / temperature, 1) for logits in (main_output(output), soft))
        divergence = F.kl_div(own, soft, reduction="batchmean", log_target=True)
        return (1 - weight) * loss + weight * temperature**2 * divergence

    def _rows(self, logits: Tensor) -> Tensor:
        return classes_second(logits, self.dim).movedim(1, -1).flatten(0, -2)
