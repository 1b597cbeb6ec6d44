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
    """The distillation settings of a stage after the dense one: weight 1 if unlabeled data leave nothing else to learn from."""
    alone = recipe.data.unlabelled and not distill.weight
    return distill.model_copy(update={"weight": 1.0}) if alone else distill


@dataclass(frozen=True)
class Trainer:
    """Trains and validates models for all stages of a run.

    teacher: the dense model, for distillation. tau: 1 / noise variance of a regression, in the units of the loss. held: the
    teacher's answers, once a training has asked for them.
    """

    context: Context
    data: Data
    teacher: nn.Module
    class_weights: Tensor | None
    tau: float = 1.0
    held: dict[Any, Any] = field(default_factory=dict)

    def with_tau(self, found: float | None) -> Trainer:
        """A copy with the noise precision `found` for the dense model, unless the recipe sets `loss.tau`.

        The recipe's value is in the targets' own units.
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
        quiet: bool = False,
        **more: Any,
    ) -> Fit:
        """Train a model in place, and leave it on the CPU in `eval()`; more: passed on to `train.fit`.

        quiet: its notes are not passed on.
        state: the file to resume from (None: named after the stage).
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
            reference=self.teacher if stage != "dense" else None,
            held=self.held,
            distill=distill,
            task=recipe.task,
            dim=data.dim,
            validate=self.metrics,
            seed=recipe.seed,
            device=recipe.device,
            compiled=settings.compile,
            state=state or context.state.folder / f"{stage}.pt",
            owner=context.state.facts.get("run"),
            bars=context.bars,
            stop=context.stop,
            on_epoch=self._log,
            on_note=self._heard if stage != "dense" and self.context.place.first and not quiet else None,
            **more,
        )
        broadcast_weights(model)
        model.cpu().eval()
        return result

    def metrics(self, model: nn.Module) -> dict[str, float]:
        """Metrics on the validation data, computed on the model's device."""
        return Passes(model, self.data).validation_metrics()

    def validate(self, model: nn.Module) -> dict[str, float]:
        """Metrics on the validation data, computed on the run's device; the model is on the CPU afterwards."""
        with there(self.context.place.device, model):
            return self.metrics(model)

    def _heard(self, line: str, settled: bool) -> None:
        """Pass on a fit's note, once per section because the trials of a search are alike. settled: it is a note, not a
        warning, as the user need not do anything."""
        section, results = line.partition(":")[0], self.context.results
        if not any(known.startswith(f"{section}:") for known in (results.notes if settled else results.warnings)):
            (self.context.note if settled else self.context.warn)(line)

    def _log(self, row: dict[str, Any]) -> None:
        self.context.beat()
        if self.context.recipe.report.tensorboard and self.context.place.first:
            log_row(self.context.out, row)
