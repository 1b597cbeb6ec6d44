"""`fit`: makes what the training loop needs from its arguments, and runs the loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from svdcompress.errors import DataError, UsageError
from svdcompress.likelihoods import Likelihood, Loss, likelihood_for
from svdcompress.objective import ELBO, Schedule
from svdcompress.recipe import Distillation, Training
from svdcompress.relevance import Masks
from svdcompress.sources import Examples
from svdcompress.train._device import accelerate_kept, make_accelerator
from svdcompress.train._distill import Teacher
from svdcompress.train._gradients import means_alone
from svdcompress.train._layerwise import Layerwise
from svdcompress.train._loop import Loop
from svdcompress.train._progress import Bars
from svdcompress.train._standing import Fit
from svdcompress.train._state import StateFile
from svdcompress.train._work import Work


@accelerate_kept()
def fit(
    model: nn.Module,
    examples: Examples,
    loss: Loss,
    settings: Training,
    *,
    stage: str = "train",
    section: str | None = None,
    schedule: Schedule | None = None,
    num_examples: int | None = None,
    lr_log_sigma2: float | None = None,
    noise: bool = True,
    teacher: nn.Module | None = None,
    reference: nn.Module | None = None,
    distill: Distillation | None = None,
    held: dict[Any, Any] | None = None,
    shared: bool = False,
    student: nn.Module | None = None,
    outputs_kept: Mapping[str, Sequence[int]] | None = None,
    task: str | Likelihood = "classification",
    dim: int | None = None,
    validate: Callable[[nn.Module], dict[str, float]] | None = None,
    masks: Callable[[nn.Module], Masks] | None = None,
    total: int | None = None,
    seed: int = 0,
    device: str = "auto",
    compiled: bool = False,
    shrink_from: float = math.inf,
    shrink: Callable[[nn.Module], bool] | None = None,
    state: Path | None = None,
    owner: str | None = None,
    last_epoch: int | None = None,
    steady: Training | None = None,
    bars: Bars | None = None,
    stop: Callable[[], bool] = lambda: False,
    on_epoch: Callable[[dict[str, Any]], None] | None = None,
    on_note: Callable[[str, bool], None] | None = None,
) -> Fit:
    """Train a model, dense or converted, in place; it is left on the training device.

    Each epoch's noise and order depend only on (seed, stage, epoch, rank), so a fit that resumes from `state` after being
    killed at any point ends with the same result as an uninterrupted one. Under `accelerate launch` each process takes its part
    of each batch and draws its own noise, and gradients are averaged (DDP); the loss of each process includes the whole KL, so
    the average counts it once. There, a parameter that a batch does not reach gets a gradient of 0.

    loss: mean negative log likelihood of (output, targets).
    stage: name of the training stage, in the history, in messages and in the seeds of noise and order; section: the section of
        the recipe whose settings error messages suggest to change (None: the stage).
    schedule: beta by epoch, for the objective `nll + beta KL / N`; None: the loss alone.
    num_examples: N (None: the number of examples).
    lr_log_sigma2: learning rate of the log variances (None: that of the means, but at most 0.001 with sgd, which trains only
        the means and leaves the log variances to Adam).
    noise: False trains only the means of a converted model: its layers compute as in `eval()`, and log variances do not change.
    teacher, distill: learn from the teacher's outputs too; task: how to interpret them, see `Likelihood.soft_loss`.
    reference: the dense model that this one was made from, for `dropout="auto"`: dropout may cost this one little more than
        that one (None: little more than the loss without it).
    held: a dict that keeps the teacher's outputs for further fits with the same teacher and examples, so that they are computed
        once in total; {} at first (None: once in each fit of several epochs). shared: each epoch's order and augmentation are
        those of the same epoch in other fits with `shared`, whatever their stage, so that this is so for augmented examples,
        too.
    student: the part of the model whose layers have the same names as the teacher's (None: the model); outputs_kept: for layers
        with fewer outputs than the teacher's, which of them are left (`PruneReport.outputs_kept`). Both for `distill.layers`.
    dim: the dimension of the teacher's outputs that holds the classes; None: 1, or the likelihood's.
    validate: returns metrics of the model on held-out examples; called after each epoch. `keep="best"` chooses by them.
    masks: returns the masks of the model, which is in `eval()` after each epoch, for the history's sparsity (None: by each
        layer's own threshold, or its frozen mask).
    total: the number of weights that the history's sparsity is relative to (None: the model's own; more for a pruned one).
    shrink_from: the epoch from which `shrink` is called with the model after each epoch; if it returns True, having removed
        units in place, a new optimizer is made. Ignored with several processes.
    state: file to save the state in after epochs, and to resume from if it exists.
    owner: a name that the state carries; one that carries another is refused (None: any state is taken).
    last_epoch: train up to this epoch of the `settings.epochs` over which learning rates and beta are scheduled (None: all of
        them). A later call with the same `state` and a later last epoch continues bit for bit as one long fit would; it may
        have another `schedule`, such as a higher beta. `keep="best"` compares the epochs of all calls.
    steady: settings in place of `settings`, but for `epochs` and `keep`, if running statistics of normalization layers stay
        (`norms`), where SGD at a rate for batch statistics could end in a loss that is not finite. A fit that is resumed keeps
        those that it began with.
    stop: called after each step; if it returns True, the fit raises Interrupted, and the last saved epoch is kept.
    on_note: called as `on_note(line, settled)` with what the user should know before a trained network is trained further, and
        whether the fit has dealt with it already; None: checks that would only report are skipped.

    Raises TrainingError for a loss that is not finite (the state before it is kept) and for a state that is past `last_epoch`,
    CheckpointError for a state that is damaged or has another owner, DataError if there are no examples, UsageError for a last
    epoch outside the settings' epochs.
    """
    section = section or stage
    if not len(examples):
        raise DataError(f"{stage}: no examples to train on")
    if last_epoch is not None and not 1 <= last_epoch <= settings.epochs:
        raise UsageError(f"last_epoch: {last_epoch} is not one of the {settings.epochs} epochs ({section}.epochs)")
    learnt = None
    if teacher is not None and distill is not None and distill.wanted:
        learnt = Teacher(teacher, distill, likelihood_for(task, dim), loss)
        if distill.layers:
            learnt.layers = Layerwise(student or model, teacher, outputs_kept or {})
    work = Work(
        model,
        examples,
        loss,
        settings,
        make_accelerator(device, settings.precision),
        stage=stage,
        section=section,
        last=settings.epochs if last_epoch is None else last_epoch,
        steady=steady,
        elbo=ELBO(model, _as_it_is, num_examples or len(examples), schedule) if schedule is not None else None,
        teacher=learnt,
        reference=reference,
        held=held,
        shared=shared and held is not None,
        lr_log_sigma2=lr_log_sigma2,
        noise=noise,
        masks=masks,
        total=total,
        seed=seed,
        compiled=compiled,
        bars=bars,
        stop=stop,
        file=StateFile(state, owner),
        validate=validate,
        shrink_from=math.inf if shrink is None else shrink_from,
        shrink=shrink,
        on_epoch=on_epoch,
        on_note=on_note,
    )
    try:
        with nullcontext() if noise else means_alone(model):
            done = Loop(work).run()
        if learnt is not None and learnt.layers is not None and on_note is not None and (line := learnt.layers.missing()):
            on_note(f"{section}.{line}", False)
        return done
    finally:
        if learnt is not None and learnt.layers is not None:
            learnt.layers.close()


def _as_it_is(loss: Tensor) -> Tensor:
    return loss
