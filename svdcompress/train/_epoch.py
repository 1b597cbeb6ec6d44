"""One epoch of training: its batches, objective, steps and figures."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice, repeat
from typing import Any

import torch
from torch import Tensor

from svdcompress.batch import call
from svdcompress.errors import DataError, Interrupted
from svdcompress.layers import variational_layers
from svdcompress.sources import InMemory
from svdcompress.train._dropout import Rates, share_of_rates
from svdcompress.train._gradients import nothing
from svdcompress.train._network import Network
from svdcompress.train._nonfinite import explain
from svdcompress.train._norms import norms
from svdcompress.train._shared import Shared
from svdcompress.train._standing import Row, Standing
from svdcompress.train._state import mix, seed_everything
from svdcompress.train._steps import Steps
from svdcompress.train._together import in_all
from svdcompress.train._work import Work


@dataclass(frozen=True)
class Rewind:
    """The result of an epoch whose loss was found not to be finite, perhaps only some batches later: repeat it with a check of
    each batch."""


def train_epoch(
    work: Work,
    network: Network,
    steps: Steps,
    standing: Standing,
    answers: InMemory | None,
    shared: Shared | None,
    rates: Rates,
    *,
    look_every: int,
    rewinds: bool,
) -> Row | Rewind:
    """Train one epoch and return its figures.

    answers: examples with the teacher's outputs as inputs; shared: keeps them, batch by batch (both None: the teacher is run
    in each step). rates: those of the model's dropout. look_every: batches between checks of the loss. rewinds: whether the fit
    can repeat the epoch to check each batch.

    Raises NotFinite, Interrupted, and DataError if there is no batch.
    """
    train_mode(work, standing.keeps_norms)
    epoch, settings, device, world = standing.epoch, work.settings, work.device, work.world
    seed_everything(work.seed, work.stage, epoch, "noise", work.rank)
    losses, nlls, kls = [], [], []
    per_step = settings.batch_size * world
    batches = max(1, math.ceil(len(work.examples) / per_step))
    group = 0  # batches since the last step
    parts = {"rank": work.rank, "world": world, "device": device}
    if shared is not None:
        stream = shared.batches(epoch, check_every=look_every, **parts)
    else:
        parts["shuffle"] = mix(work.seed, work.stage, epoch, "order")
        known = repeat((None, None)) if answers is None else answers.batches(settings.batch_size, **parts)
        stream = zip(work.examples.batches(settings.batch_size, **parts), known)  # noqa: B905 (one may be endless)
    marked = _final_known(stream) if settings.accumulate > 1 else ((batch, True) for batch in stream)
    for index, (((x, y), (answer, _)), final) in enumerate(marked):
        where = epoch + index / batches
        group += 1
        if rates.set(share_of_rates(standing.dropout, where / settings.epochs)):
            network.renew()
        last = final or group == settings.accumulate
        # Forward and backward pass within no_sync: it is the former that prepares DDP to average the gradients.
        with nullcontext() if last or world == 1 else work.accelerator.no_sync(network.synced):
            loss, nll, kl = forward(work, network, x, y, where, answer)
            if index % look_every == 0 and _spoiled(work, loss):
                return _not_finite(work, standing, x, loss.item(), rewinds)
            steps.backward(loss / settings.accumulate if settings.accumulate > 1 else loss)
        if last:
            steps.step(where, group)
            group = 0
        losses.append(loss.detach())
        nlls.append(nll)
        if kl is not None:
            kls.append(kl)
        standing.steps += 1
        if work.bars is not None:
            work.bars.step(where, loss.item)
        if work.stop():
            raise Interrupted(f"stopped in {work.stage}, epoch {epoch + 1} of {settings.epochs}. {work.kept}")
    if not losses:
        raise DataError(f"{work.section}.batch_size: {per_step} is more than the {len(work.examples)} training examples")
    mean = torch.stack([torch.stack(losses).mean(), torch.stack(nlls).mean()])
    loss_mean, nll_mean = work.accelerator.reduce(mean, reduction="mean").tolist()
    if not math.isfinite(loss_mean):
        return _not_finite(work, standing, x, mean[0].item(), rewinds)
    return {
        "stage": work.stage,
        "epoch": epoch + 1,
        "loss": loss_mean,
        "nll": nll_mean,
        "kl": float(torch.stack(kls).mean()) if kls else None,
        "beta": work.elbo.beta if work.elbo is not None else None,
        "lr": steps.lr,
    }


def train_mode(work: Work, keeps_norms: bool) -> None:
    """Put the model in `train()`, except variational layers if they have no noise, and norms if they keep their statistics."""
    work.model.train()
    if keeps_norms:
        for module in norms(work.model):
            module.eval()
    if not work.noise:
        for _, layer in variational_layers(work.model):
            layer.eval()


def forward(
    work: Work, network: Network, x: Any, y: Tensor, where: float, answer: Any = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The loss and its detached parts: negative log likelihood and KL (None if beta is 0). answer: the teacher's output, if
    it is known."""
    if work.teacher is not None:
        work.teacher.begin(where / work.settings.epochs)
    with work.lower():
        output = call(network.called, x)
        loss = work.loss(output, y)
        if work.teacher is not None:
            loss = work.teacher.mix(loss, output, x, answer)
    nll, kl = loss.detach(), None
    if work.elbo is not None:
        work.elbo.set_epoch(where)
        loss = work.elbo(loss)
        kl = work.elbo.last_kl
    return (loss + nothing(work.model) if work.world > 1 else loss), nll, kl


def _spoiled(work: Work, loss: Tensor) -> bool:
    """Whether a loss is not finite here or, as all have to stop then, in another process."""
    if work.world == 1:
        return not math.isfinite(loss.item())
    return bool(work.accelerator.reduce((~loss.detach().isfinite()).float(), reduction="sum").item())


def _not_finite(work: Work, standing: Standing, x: Any, value: float, rewinds: bool) -> Rewind:
    """A rewind if one can help; raises NotFinite otherwise, in all processes."""
    if rewinds:
        return Rewind()
    names, where = (work.stage, work.section), (standing.steps, standing.epoch)
    more = (work.kept, work.autocast(), standing.keeps_norms, work.settings.lr)

    def refuse() -> None:
        if work.world == 1 or not math.isfinite(value):
            raise explain(work.model, x, names, where, value, *more)

    in_all(refuse)
    raise explain(work.model, x, names, where, value, *more)  # each process's loss is finite, and their sum is not


def _final_known(batches: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
    """Each batch, and whether it is the last one; reads one batch ahead."""
    stream = iter(batches)
    waiting = list(islice(stream, 1))
    for batch in stream:
        yield waiting.pop(), False
        waiting.append(batch)
    yield from ((batch, True) for batch in waiting)
