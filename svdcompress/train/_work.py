"""What a fit works with, settled before its first step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from svdcompress.layers import arranged_convolutions
from svdcompress.likelihoods import Loss
from svdcompress.objective import ELBO
from svdcompress.recipe import Training
from svdcompress.relevance import Masks
from svdcompress.sources import Examples, InMemory
from svdcompress.train._distill import Teacher
from svdcompress.train._progress import Bars
from svdcompress.train._state import StateFile, mix


@dataclass(frozen=True)
class Work:
    """The arguments of a fit, as `fit` explains them; `last` is the epoch that it ends with."""

    model: nn.Module
    examples: Examples
    loss: Loss
    settings: Training
    accelerator: Any
    _: KW_ONLY
    stage: str
    section: str
    last: int
    elbo: ELBO | None
    teacher: Teacher | None
    held: dict[Any, InMemory | None] | None
    lr_log_sigma2: float | None
    noise: bool
    masks: Callable[[nn.Module], Masks] | None
    total: int | None
    seed: int
    compiled: bool
    bars: Bars | None
    stop: Callable[[], bool]
    file: StateFile
    validate: Callable[[nn.Module], dict[str, float]] | None
    shrink_from: float
    shrink: Callable[[nn.Module], bool] | None
    on_epoch: Callable[[dict[str, Any]], None] | None
    on_note: Callable[[str, bool], None] | None

    @property
    def device(self) -> torch.device:
        """Where the model is trained."""
        return self.accelerator.device

    @property
    def rank(self) -> int:
        """This process's number among those of the launch."""
        return self.accelerator.process_index

    @property
    def world(self) -> int:
        """The number of processes."""
        return self.accelerator.num_processes

    @property
    def kept(self) -> str:
        """A sentence on what is left of a training that fails."""
        return f"The state before it is kept in {self.file.path}." if self.file.path else "The model has its last good weights."

    def first_batch(self, purpose: str) -> tuple[Any, Tensor]:
        """Inputs and targets of a batch of the first examples, to try something with. purpose: their order and augmentation
        are drawn by it."""
        size = self.settings.batch_size
        first = self.examples.subset(torch.arange(min(size, len(self.examples))))
        return next(iter(first.batches(size, shuffle=mix(self.seed, purpose), device=self.device)))

    def autocast(self) -> AbstractContextManager[Any]:
        """Within it the model computes in the precision that was asked for."""
        return self.accelerator.autocast() if self.accelerator.native_amp else nullcontext()

    @cached_property
    def right(self) -> AbstractContextManager[Any]:
        """Within it convolutions that a CPU gets wrong in that precision are right, and such as it is slow at faster."""
        if not self.accelerator.native_amp or self.device.type != "cpu":
            return nullcontext()
        return arranged_convolutions([self.model, *([self.teacher.model] if self.teacher is not None else [])])
