"""The progress of a fit: what is done, what it reports, and the best epoch so far."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from svdcompress.batch import to_device
from svdcompress.likelihoods import score
from svdcompress.relevance import Masks

Row = dict[str, Any]
"""The figures of an epoch, as the history holds them."""


@dataclass
class Fit:
    """The result of a fit: a dict per epoch, which epoch's weights the model now has, and the learning rate that it had.

    lr_instead: a lower rate that should have been used, if recovery made the network worse: that of a second attempt, or less.
    """

    history: list[Row] = field(default_factory=list)
    kept_epoch: int = 0
    seconds: float = 0.0
    lr: float = 0.0
    lr_instead: float | None = None


@dataclass
class Best:
    """The best epoch so far; `weights` is None if there is none yet."""

    score: tuple[float, float] = (math.inf, math.inf)
    epoch: int = 0
    weights: dict[str, Tensor] | None = None

    def offer(self, model: nn.Module, metrics: dict[str, float], epoch: int) -> None:
        """Keep a model's weights if its metrics are better than the best so far."""
        if score(metrics) < self.score:
            self.score, self.epoch = score(metrics), epoch
            self.weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}

    def forget(self) -> None:
        """Drop the weights, which do not fit a shrunk model, and the score that later epochs would be compared with."""
        self.score, self.weights = (math.inf, math.inf), None


@dataclass
class Standing:
    """The progress of a fit.

    epoch: epochs done. steps: batches trained on. total: the number of weights that the history's sparsity is relative to
    (None: the model's own). history: the figures of each epoch. keeps_norms: whether running statistics stay as they are,
    settled before the first epoch, as is dropout: "on", "off" or "rising". said: what `on_note` was called with then.
    """

    total: int | None = None
    epoch: int = 0
    steps: int = 0
    history: list[Row] = field(default_factory=list)
    best: Best = field(default_factory=Best)
    keeps_norms: bool = False
    dropout: str = "on"
    said: list[list[Any]] = field(default_factory=list)

    def sparsity(self, masks: Masks) -> float:
        """The share of weights that are outside the masks or were removed."""
        return 1 - masks.kept / (self.total or masks.total)

    def state(self) -> dict[str, Any]:
        """What a later fit needs to resume."""
        best = {"score": list(self.best.score), "epoch": self.best.epoch, "weights": self.best.weights}
        done = {"epoch": self.epoch, "steps": self.steps, "total": self.total, "history": self.history, "best": best}
        return done | {"keeps_norms": self.keeps_norms, "dropout": self.dropout, "said": self.said}

    def take(self, saved: dict[str, Any], device: torch.device) -> None:
        """Restore the progress of a saved fit."""
        self.epoch, self.steps = saved["epoch"], saved["steps"]
        self.total = saved.get("total") or self.total  # states of earlier versions have none
        self.history[:] = saved["history"]
        if self.epoch:  # it is not settled before the first epoch
            self.keeps_norms = saved.get("keeps_norms", self.keeps_norms)
            self.dropout = saved.get("dropout", self.dropout)
            # Still true of the resumed network, even if a check would no longer show it. Earlier versions said one thing.
            said = saved.get("said") or []
            self.said = [said] if said and isinstance(said[0], str) else said
        best = saved["best"]
        weights = None if best["weights"] is None else to_device(best["weights"], device)
        self.best = Best(tuple(best["score"]), best["epoch"], weights)
