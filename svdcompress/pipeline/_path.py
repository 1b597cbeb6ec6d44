"""The path of a search: one training under rising pressure that serves many sizes, with a posterior kept at each level."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from svdcompress import checkpoint, cost
from svdcompress.likelihoods import score
from svdcompress.objective import Constant, LinearWarmup, Schedule
from svdcompress.pipeline._begin import Dense, Opened, Variational
from svdcompress.pipeline._context import Context
from svdcompress.pipeline._convert import while_training
from svdcompress.pipeline._damaged import cured
from svdcompress.pipeline._levels import BELOW, LEVEL_EPOCHS, PRESSED, epochs_of
from svdcompress.prune import count_means
from svdcompress.recipe import LrSchedule, TrainSection
from svdcompress.relevance import Masks
from svdcompress.selection import look_at, rule
from svdcompress.sources import make_model
from svdcompress.train import Fit, shrink, steps_of

START = PRESSED - 0.5
"""The highest pressure to try first for cuts in steps; a higher one is seldom better (benchmarks/trials.py)."""

UNPRESSED = -7.0
"""The pressure of a trial that starts from the dense weights, not from the path: beta is a thousandth of the recipe's."""

PART = 0.1
"""A path that by itself covers less than this fraction of the way to a size (in logarithms) removes hardly any units for it."""

FEW = 100
"""Levels with fewer steps than this teach the variances little: if the path removes hardly any units in them, a search starts
without pressure. With 50 steps (DnCNN) such a trial was the better one, with 782 (ResNet-20) one under pressure
(docs/search.md)."""


@dataclass
class Climb:
    """The path of a search, as far as it was trained; its posteriors are kept in `folder`. unpressed: whether the converted
    model is kept there, too, for trials that start from it."""

    context: Context
    opened: Opened
    dense: Dense
    variational: Variational
    folder: Path
    total: int
    unpressed: bool = True
    rows: list[dict[str, float]] = field(default_factory=list)
    history: list[dict[str, Any]] = field(default_factory=list)

    def beta(self, pressure: float) -> float:
        """The weight of the KL at a pressure: a level, or a point between two."""
        return self.dense.beta * 2.0 ** (pressure - 1 - BELOW)

    def start(self) -> None:
        """Save the converted model, which trials without pressure start from."""
        if not self.known(0):
            checkpoint.save(self.variational.model, self._file(0))

    def climb(self, level: int) -> dict[str, float]:
        """Train a level, unless that is done already; returns its row: level, beta, sizes, and metrics before any recovery."""
        recipe = self.context.recipe
        model = self.variational.model if level == 1 else self.posterior(level - 1)
        if self.unpressed and level == 1 and not self.known(1):
            self.start()
        epochs = epochs_of(recipe.train, LEVEL_EPOCHS)
        beta = self.beta(level)
        schedule: Schedule = LinearWarmup(0, max(1, epochs // 2), beta) if level == 1 else Constant(beta)
        settings = recipe.train.model_copy(update={"epochs": epochs, "schedule": LrSchedule(name="constant"), "keep": "last"})
        state = self.folder / f"level-{level}.pt"
        fit = self._fit(model, f"level {level}", settings, schedule, state)
        self.history += fit.history
        masks = self.masks(model)
        metrics = look_at(model, masks, self.dense.trainer.validate)
        counts = {"error": score(metrics)[0], "nll": metrics["nll"], "nonzero": float(self._nonzero(model, masks))}
        file = self._file(level)
        if not file.exists():
            options = {name: getattr(recipe.prune, name) for name in ("round_to", "protect", "time_budget")}
            shrink(model, self.opened.inputs, masks=self.masks, **options)  # units that are dead here will not come back
            checkpoint.save(model, file)
        left = cost.measure(self.posterior(level), self.opened.inputs)  # without its dead units
        row = {"level": float(level), "beta": beta, **counts, "parameters": float(left.parameters), "macs": float(left.macs)}
        self.rows.append(row)
        return row

    @property
    def steps(self) -> int:
        """The number of optimizer steps in each level."""
        settings = self.context.recipe.train
        level = settings.model_copy(update={"epochs": epochs_of(settings, LEVEL_EPOCHS)})
        return steps_of(level, len(self.opened.data.train))

    def known(self, level: int) -> bool:
        """Whether a level is saved already (0: the converted model)."""
        return self._file(level).exists()

    def masks(self, model: nn.Module) -> Masks:
        """The masks by the recipe's threshold, or by each layer's own."""
        settings = self.context.recipe.relevance
        return rule(model, settings, self.opened.inputs)(settings.threshold)

    def begin(self, pressure: float) -> nn.Module:
        """The model that a trial with this pressure starts from: the level at or below it, or the converted model."""
        return self.posterior(0 if pressure <= UNPRESSED else min(max(1, int(pressure)), len(self.rows)))

    def recovery(self, pressure: float) -> float:
        """The beta that a trial's recovery is based on; without pressure, that of the first level, because that is when the
        variances learn."""
        return self.beta(1 if pressure <= UNPRESSED else pressure)

    def posterior(self, level: int) -> nn.Module:
        """The model after a level, or the converted model (0)."""
        file, model = self._file(level), make_model(self.context.recipe.model)
        # a search without the converted model, from which trials can start, is another search
        with cured(file, "remove it to make it again" if level else f"remove {self.folder} to search again"):
            return checkpoint.load(file, model).eval()

    def fit(self, model: nn.Module, stage: str, settings: TrainSection, beta: float, state: Path) -> Fit:
        """Train a posterior of the path further, in place, at a constant beta. state: the file for the training state."""
        return self._fit(model, stage, settings, Constant(beta), state)

    def _file(self, level: int) -> Path:
        return self.folder / f"level-{level}.safetensors"

    def _fit(self, model: nn.Module, stage: str, settings: TrainSection, schedule: Schedule, state: Path) -> Fit:
        return self.dense.trainer.fit(
            model,
            stage,
            settings,
            section="train",
            schedule=schedule,
            lr_log_sigma2=self.variational.rate,
            distill=settings.distill,
            masks=while_training(self.context.recipe, self.opened.inputs),
            total=self.total,
            state=state,
        )

    def _nonzero(self, model: nn.Module, masks: Masks) -> int:
        return count_means(model) - masks.total + masks.kept
