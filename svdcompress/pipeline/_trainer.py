"""How every stage of a run trains and validates: the same data, loss, teacher and device each time."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from svdcompress.likelihoods import make_loss
from svdcompress.pipeline._context import Context
from svdcompress.pipeline._figures import there
from svdcompress.pipeline._log import log_row
from svdcompress.pipeline._passes import Passes
from svdcompress.recipe import Distillation, Recipe, Training
from svdcompress.sources import Data
from svdcompress.train import Fit, broadcast_weights, fit


def taught(recipe: Recipe, distill: Distillation) -> Distillation:
    """What a stage after the dense one learns of the dense model's answers: all, where there is nothing else to learn from."""
    alone = recipe.data.unlabelled and not distill.weight
    return distill.model_copy(update={"weight": 1.0}) if alone else distill


@dataclass(frozen=True)
class Trainer:
    """teacher: the dense model, from which a student may learn. tau: 1 / noise variance of a regression, of targets as the
    loss has them. held: the teacher's answers, once one of the trainings has asked for them."""

    context: Context
    data: Data
    teacher: nn.Module
    class_weights: Tensor | None
    tau: float = 1.0
    held: dict[Any, Any] = field(default_factory=dict)

    def with_tau(self, found: float | None) -> Trainer:
        """The same with the noise that the dense model was found to have, where the recipe does not set one.

        What the recipe sets is of targets in their own units.
        """
        wanted, scale = self.context.recipe.loss.tau, self.data.target_scale
        return replace(self, tau=(found or 1.0) if wanted == "auto" else wanted * (1.0 if scale is None else scale[1] ** 2))

    def fit(
        self,
        model: nn.Module,
        stage: str,
        settings: Training,
        *,
        distill: Distillation | None = None,
        state: Path | None = None,
        **more: Any,
    ) -> Fit:
        """Train a model in place, and leave it on the CPU in `eval()`; more: as `train.fit` takes it.

        state: the file to go on from (None: of the stage's name).
        """
        context, data, recipe = self.context, self.data, self.context.recipe
        if stage != "dense":
            distill = taught(recipe, distill or Distillation())
        result = fit(
            model,
            data.train,
            make_loss(recipe.loss, tau=self.tau, class_weights=self.class_weights, dim=data.dim),
            settings,
            stage=stage,
            teacher=copy.deepcopy(self.teacher) if distill is not None and distill.wanted else None,
            held=self.held,
            distill=distill,
            task=recipe.task,
            dim=data.dim,
            validate=self.metrics,
            seed=recipe.seed,
            device=recipe.device,
            compiled=settings.compile,
            state=state or context.state.folder / f"{stage}.pt",
            bars=context.bars,
            stop=context.stop,
            on_epoch=self._log,
            on_note=self._heard if stage != "dense" and self.context.place.first else None,
            **more,
        )
        broadcast_weights(model)
        model.cpu().eval()
        return result

    def metrics(self, model: nn.Module) -> dict[str, float]:
        """On the validation data, where the model is."""
        return Passes(model, self.data).validation_metrics()

    def validate(self, model: nn.Module) -> dict[str, float]:
        """On the validation data, on the run's device; the model is back on the CPU afterwards."""
        with there(self.context.place.device, model):
            return self.metrics(model)

    def _heard(self, line: str, settled: bool) -> None:
        """Once of a section: the trials of a search are alike. settled: nothing is asked of the user."""
        section, results = line.partition(":")[0], self.context.results
        if not any(known.startswith(f"{section}:") for known in (results.notes if settled else results.warnings)):
            (self.context.note if settled else self.context.warn)(line)

    def _log(self, row: dict[str, Any]) -> None:
        self.context.beat()
        if self.context.recipe.report.tensorboard and self.context.place.first:
            log_row(self.context.out, row)
