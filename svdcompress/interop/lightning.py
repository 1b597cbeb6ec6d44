"""Sparsification in a Lightning Trainer: one callback, nothing to change in the module."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import callbacks
from torch import Tensor
from torch.utils.data import DistributedSampler, SequentialSampler

from svdcompress.convert import warn_of_half_precision
from svdcompress.errors import UsageError
from svdcompress.interop._decay import DECAYED, decays
from svdcompress.interop._noise import own_noise
from svdcompress.interop._schedule import Penalty
from svdcompress.layers import WHOLE, check_whole, variance_parameters, variational_layers
from svdcompress.objective import LinearWarmup, Schedule
from svdcompress.relevance import relevance

AVERAGING = tuple(
    getattr(callbacks, name) for name in ("StochasticWeightAveraging", "WeightAveraging") if hasattr(callbacks, name)
)
"""Lightning's callbacks that keep a copy of the module; later versions have more of them."""

IN_FLOAT32 = 'use Trainer(precision="bf16-mixed") or "16-mixed", which keep parameters in float32'
"""The remedy for "bf16-true" and "16-true", which cast the module after its conversion."""

DIVIDING = {"FSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy"}
"""Strategies that divide weights among processes; some need packages that may be missing."""

CLEARLY = 0.9
"""Fewer examples than this share of N make a difference."""


class SparsifyCallback(pl.Callback):
    """Convert a LightningModule and train it with the annealed ELBO.

    The module is converted in place before its optimizer is made, and `beta KL / N` is added to what its `training_step`
    returns, once for each optimizer step however many batches are accumulated (if fewer are left at an epoch's end, only
    their share of it, just as Lightning weights the data there). Beta follows the schedule within epochs, too. `svdc_beta`
    and `svdc_sparsity` are logged once an epoch.

    num_examples: N, over all processes; None: the length of the train dataloader's dataset, or of its SubsetRandomSampler.
    schedule: beta by epoch, or a constant.
    options: arguments of `svdcompress.convert` (prior, share, include, exclude, log_sigma2 ...).

    Weight decay would pull log variances to 0: if `configure_optimizers` uses it, give them a group without it (a warning
    says so): `{"params": svdcompress.layers.variance_parameters(self), "weight_decay": 0.0}`.

    Name it before callbacks that average weights (StochasticWeightAveraging, EMAWeightAveraging), which copy the module;
    otherwise it raises UsageError.

    In several processes (strategy="ddp"), each draws its own noise.

    Train in "32-true" or "bf16-mixed". With "bf16-true" or "16-true" log variances do not learn (a warning says so).

    The module's own loss has to average over the batch (a sum would make the KL count too little). Modules with manual
    optimization are refused: they call their optimizers themselves, and the callback sees no loss.

    Example:
        >>> from svdcompress.interop.lightning import SparsifyCallback
        >>> callback = SparsifyCallback(share=["weight", "input"])
        >>> callback.penalty.beta  # the first epochs only fit the data
        0.0
    """

    def __init__(
        self,
        *,
        num_examples: int | None = None,
        schedule: Schedule | float = LinearWarmup(start=5, stop=20),  # noqa: B008
        **options: Any,
    ) -> None:
        super().__init__()
        self.penalty = Penalty(num_examples, schedule, options)
        self._plain: Callable[..., Any] | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Convert the module; Lightning makes its optimizers afterwards."""
        if stage == "fit" and DIVIDING & _classes(trainer.strategy):
            raise UsageError(
                f"strategy: {type(trainer.strategy).__name__} divides weights among processes, but the KL and relevance need "
                f'whole layers; {WHOLE} (strategy="ddp")'
            )
        if stage == "fit" and not variance_parameters(pl_module):
            self._refuse_copies(trainer)
            _refuse_started(trainer.strategy)
        self.penalty.convert(pl_module)
        if stage != "fit":
            return
        self.penalty.begin()
        if self._plain is not None:
            return
        if not pl_module.automatic_optimization:
            raise UsageError(
                f"{type(pl_module).__name__} optimizes manually: wrap its loss in svdcompress.ELBO yourself, and leave out "
                "SparsifyCallback"
            )
        self._plain = plain = pl_module.training_step

        @functools.wraps(plain)
        def training_step(*args: Any, **kwargs: Any) -> Any:
            with own_noise(trainer.global_rank, trainer.world_size, trainer.global_step, pl_module.device):
                output = plain(*args, **kwargs)
            if self.penalty.num_examples is None:  # a search for a learning rate or batch size calls no `on_train_start`
                self.penalty.count(trainer.train_dataloader)
            return self._penalised(output, pl_module)

        pl_module.training_step = training_step

    def _refuse_copies(self, trainer: pl.Trainer) -> None:
        """Callbacks that average weights copy the module in their own `setup`: parameters of a copy from before the conversion
        would be averaged with others than their own."""
        given: list[Any] = list(getattr(trainer, "callbacks", ()))
        for callback in given[: given.index(self)] if self in given else ():
            if isinstance(callback, AVERAGING):
                raise UsageError(
                    f"callbacks: {type(callback).__name__} comes before SparsifyCallback, so it would average a copy from "
                    "before the conversion: name SparsifyCallback first"
                )

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Give the module its own `training_step` back."""
        if self._plain is not None:
            vars(pl_module).pop("training_step", None)
            self._plain = None

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """The same after Ctrl-C or an exception, when Lightning does not call `teardown`."""
        self.teardown(trainer, pl_module, "fit")

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Find N, and warn of what would keep the variances from what the data say."""
        check_whole(pl_module)
        self.penalty.count(trainer.train_dataloader)
        warn_of_half_precision(list(variational_layers(pl_module)), stacklevel=3, remedy=IN_FLOAT32)
        self._tell_part(trainer)
        variances = variance_parameters(pl_module)
        if any(decays(optimizer, variances) for optimizer in trainer.optimizers):
            warnings.warn(DECAYED, stacklevel=2)

    def _tell_part(self, trainer: pl.Trainer) -> None:
        """Warn if each epoch takes the same part of the data, and N is the number of all: the KL would count too little."""
        loader, batches, count = trainer.train_dataloader, trainer.num_training_batches, self.penalty.num_examples
        sampler: Any = getattr(loader, "sampler", None)
        size = getattr(loader, "batch_size", None)  # None: a sampler makes the batches
        if getattr(trainer, "fast_dev_run", False) or not _in_order(sampler):
            return
        if loader is None or size is None or count is None or batches >= len(loader):
            return
        seen = min(len(sampler), int(batches) * size) * trainer.world_size
        if seen < CLEARLY * count:
            warnings.warn(
                f"limit_train_batches or overfit_batches leaves the same {seen:,} examples in each epoch, but the KL is "
                f"divided by N = {count:,} and counts too little: shuffle, or give SparsifyCallback(num_examples={seen})",
                stacklevel=3,
            )

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        """Set beta for this point of the epoch."""
        batches = trainer.num_training_batches
        done = batch_idx / batches if isinstance(batches, int) and batches > 0 else 0.0
        self.penalty.set_epoch(trainer.current_epoch + done)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log beta and sparsity, alike in all processes, each of which has both, for callbacks that monitor them."""
        with torch.no_grad():
            sparsity = relevance(pl_module).sparsity
        pl_module.log_dict({"svdc_beta": float(self.penalty.beta), "svdc_sparsity": sparsity}, sync_dist=True)

    def _penalised(self, output: Any, module: pl.LightningModule) -> Any:
        if isinstance(output, Tensor):
            return output + self.penalty.of(module)
        if isinstance(output, dict) and "loss" in output:
            return {**output, "loss": output["loss"] + self.penalty.of(module)}
        return output  # None: Lightning skips the batch


def _in_order(sampler: Any) -> bool:
    """Whether a sampler takes the data in the same order in each epoch; Lightning's wrapper of another sampler need not."""
    if isinstance(sampler, DistributedSampler):
        return not sampler.shuffle and not hasattr(sampler.dataset, "_sampler")
    return isinstance(sampler, SequentialSampler)


def _refuse_started(strategy: Any) -> None:
    """ddp_spawn, ddp_fork and ddp_notebook call `setup` only in processes of their own, and load the trained weights into the
    main process's module, which was not converted: its variances would be lost."""
    if "_MultiProcessingLauncher" in _classes(getattr(strategy, "launcher", None)):
        raise UsageError(
            "strategy: it starts processes that convert modules of their own, so the trained variances would not come back: "
            'call svdcompress.convert(module) before Trainer.fit, or use strategy="ddp"'
        )


def _classes(thing: Any) -> set[str]:
    """The names of an object's class and its bases; versions of Lightning differ in what can be imported."""
    return {kind.__name__ for kind in type(thing).__mro__}
