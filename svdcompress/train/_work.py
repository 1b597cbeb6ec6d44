"""Everything that a fit works with, settled before its first step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
from svdcompress.sources import Examples
from svdcompress.train._distill import Teacher
from svdcompress.train._progress import Bars
from svdcompress.train._state import StateFile, mix


@dataclass(frozen=True)
class Work:
    """The arguments of a fit, explained in `fit`; `last` is the epoch that it ends with."""

    model: nn.Module
    examples: Examples
    loss: Loss
    settings: Training
    accelerator: Any
    _: KW_ONLY
    stage: str
    section: str
    last: int
    steady: Training | None
    elbo: ELBO | None
    teacher: Teacher | None
    reference: nn.Module | None
    held: dict[Any, Any] | None
    shared: bool
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
        """The device that the model is trained on."""
        return self.accelerator.device

    @property
    def rank(self) -> int:
        """The rank of this process among those of the launch."""
        return self.accelerator.process_index

    @property
    def world(self) -> int:
        """The number of processes."""
        return self.accelerator.num_processes

    @property
    def kept(self) -> str:
        """A sentence on what is left if training fails."""
        return (
            f"The state before that is kept in {self.file.path}." if self.file.path else "The model has its last good weights."
        )

    def first_batch(self, purpose: str) -> tuple[Any, Tensor]:
        """Inputs and targets of a batch of the first examples, for a trial pass. purpose: seeds their order and
        augmentation."""
        size = self.settings.batch_size
        first = self.examples.subset(torch.arange(min(size, len(self.examples))))
        return next(iter(first.batches(size, shuffle=mix(self.seed, purpose), device=self.device)))

    def autocast(self) -> AbstractContextManager[Any]:
        """A context in which the model computes in the requested precision."""
        return self.accelerator.autocast() if self.accelerator.native_amp else nullcontext()

    @cached_property
    def right(self) -> AbstractContextManager[Any]:
        """A context in which convolutions that a CPU computes wrongly in that precision are right, and slow ones faster."""
        if not self.accelerator.native_amp or self.device.type != "cpu":
            return nullcontext()
        return arranged_convolutions([self.model, *([self.teacher.model] if self.teacher is not None else [])])

    @contextmanager
    def lower(self) -> Iterator[None]:
        """The context of both: models compute as they do in a step."""
        with self.autocast(), self.right:
            yield
