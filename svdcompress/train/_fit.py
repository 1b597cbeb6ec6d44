"""A fit by its arguments: what the loop needs is made here."""

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
from svdcompress.sources import Examples, InMemory
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
    distill: Distillation | None = None,
    held: dict[Any, InMemory | None] | None = None,
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
    last_epoch: int | None = None,
    bars: Bars | None = None,
    stop: Callable[[], bool] = lambda: False,
    on_epoch: Callable[[dict[str, Any]], None] | None = None,
    on_note: Callable[[str, bool], None] | None = None,
) -> Fit:
    """Train a model, dense or converted, in place; it ends on the training device.

    Each epoch's noise and order come from (seed, stage, epoch, rank) alone, so a fit that goes on from `state` after any
    kill ends where an undisturbed one does. Under `accelerate launch` each process takes its part of each batch, draws its own
    noise, and gradients are averaged (DDP); as each holds the whole KL, the average counts it once. A parameter that a batch
    does not reach has a gradient of 0 there.

    loss: mean negative log likelihood of (output, targets).
    stage: names the noise, the order and the epochs; section: the settings in what errors say to change (None: the stage).
    schedule: beta by epoch, of the objective `nll + beta KL / N`; None: the loss alone.
    num_examples: N (None: the number of examples).
    lr_log_sigma2: learning rate of the log variances (None: as the others; sgd, which trains the
        means alone, beside Adam: 0.001).
    noise: False trains the mean of a converted model: its layers compute as in `eval()`, and their log variances stay.
    teacher, distill: learn from the teacher's outputs too; task: says what they mean, see `Likelihood.soft_loss`.
    held: where the teacher's answers are kept for further fits with the same teacher and examples, so that it is asked once in
        all; {} at first (None: once in each fit of several epochs).
    student: the part of the model whose layers are named as the teacher's (None: the model), and outputs_kept: which of their
        outputs it has, where it has fewer (`PruneReport.outputs_kept`); for `distill.layers`.
    dim: the dimension of the outputs that holds the classes, for the teacher's; None: 1, or the likelihood's.
    validate: metrics of the model on held-out examples, once an epoch; "best" epochs are chosen by them.
    masks: which weights stay, of the model in `eval()` after each epoch, for the history's sparsity (None: those that are
        relevant by each layer's own threshold, or its frozen mask).
    total: number of weights of which the history's sparsity is a share (None: the model's own; more for a pruned one).
    shrink_from: epoch from which on `shrink` is called with the model after each epoch; where it returns True, having removed
        units in place, the optimizer starts anew. Not under several processes.
    state: file to save each epoch in and to go on from if it exists.
    last_epoch: train up to this epoch of the `settings.epochs` over which learning rates and beta are scheduled (None: all of
        them). A later call with the same `state` and a later last epoch goes on as one long fit would, to the bit; it may have
        another `schedule`, such as a higher beta. `keep="best"` compares the epochs of all calls.
    stop: asked after each step; True ends with Interrupted, the last saved epoch kept.
    on_note: hears what a user of a network that is trained already should know before it is trained on, and whether the
        fit has seen to it already; None: not looked for.

    Raises TrainingError for a loss that is not finite (the state before is kept) and for a state that has done more than
    `last_epoch`, DataError without examples, UsageError for a last epoch that is none of the settings'.
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
        elbo=ELBO(model, _as_it_is, num_examples or len(examples), schedule) if schedule is not None else None,
        teacher=learnt,
        held=held,
        lr_log_sigma2=lr_log_sigma2,
        noise=noise,
        masks=masks,
        total=total,
        seed=seed,
        compiled=compiled,
        bars=bars,
        stop=stop,
        file=StateFile(state),
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
