"""Epochs whose batches come again, so that the teacher's outputs for them are computed once."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from svdcompress.batch import generators_kept, map_tensors
from svdcompress.recipe import Distillation
from svdcompress.sources import Examples
from svdcompress.train._ask import MOST_BYTES, SAME, asks_once, plain
from svdcompress.train._state import mix, seed_everything
from svdcompress.train._work import Work

NUMBERS = 2**20
"""About the most numbers of a tensor that tell whether a batch has come again."""

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Types to read the bits of a number as, by its size in bytes."""

Batch = tuple[tuple[Any, Tensor], tuple[Any, None]]


class Views:
    """Batches of a few fixed epochs ("views": an order and an augmentation each) in turn, with the teacher's outputs, which are
    kept (fast knowledge distillation: Shen & Xing 2022, arXiv 2112.01528).

    What is drawn while a batch is read depends only on (seed, view, rank) and the number of the batch, so a fit that resumes
    gets the same batches, and other fits of the run share the views (`Work.held`); the stage decides which comes first. Kept
    outputs are those of the very same batch: that they are forgotten, as in a fit that resumes, changes nothing but the time.

    If a batch does not come again as it was, because the data draw from generators of their own, or if the teacher's outputs
    take too much memory or change from call to call, the teacher is run in each step; `Work.on_note` is told.
    """

    def __init__(self, work: Work) -> None:
        assert work.teacher is not None
        self._work, self._teacher, self._count = work, work.teacher, work.teacher.settings.views
        self._first = first_view(work.stage, self._count)
        same = ("views", work.settings.batch_size, work.accelerator.mixed_precision, work.compiled)
        self._kept: dict[tuple[int, int], tuple[Any, Tensor]] | None
        self._kept = {} if work.held is None else work.held.setdefault(same, {})
        self._tried = False

    def batches(self, epoch: int, *, check_every: int, **parts: Any) -> Iterator[Batch]:
        """The batches of an epoch and the teacher's outputs. check_every: batches between checks that one has come again.
        parts: those of `Examples.batches`, but for `shuffle`."""
        work, view = self._work, (self._first + epoch) % self._count
        parts["shuffle"] = mix(work.seed, "view", view)
        stream = iter(work.examples.batches(work.settings.batch_size, **parts))
        index = 0
        while True:
            with generators_kept():  # the network's noise does not depend on what the data draw
                seed_everything(work.seed, "view", view, index, work.rank)
                batch = next(stream, None)
            if batch is None:
                return
            yield batch, (self._answer((view, index), batch[0], index % check_every == 0), None)
            index += 1

    @torch.no_grad()
    def _answer(self, where: tuple[int, int], inputs: Any, checks: bool) -> Any:
        if self._kept is None:
            return None  # `Teacher.mix` runs it then
        known = self._kept.get(where)
        if known is not None:
            if not checks or torch.equal(known[1], marks(inputs)):
                return known[0]
            self._stop("batches do not come again as they were: the data draw from a generator of their own")
            return None
        answer = self._run(inputs)
        if not self._tried:
            self._tried = True
            if (why := self._against(answer, inputs)) is not None:
                self._stop(why)
                return None
        self._kept[where] = answer, marks(inputs)
        return answer

    def _run(self, inputs: Any) -> Any:
        with self._work.autocast(), self._work.right:
            return plain(self._teacher.answer(inputs))

    def _against(self, answer: Any, inputs: Any) -> str | None:
        """Why the teacher's outputs can't be kept, judged by those of one batch; None if they can."""
        work, tensors = self._work, [answer] if isinstance(answer, Tensor) else list(answer)
        if not all(isinstance(each, Tensor) for each in tensors):
            return "the teacher's output is neither a tensor nor several"
        row = sum(each.numel() * each.element_size() for each in tensors) / work.settings.batch_size
        views = min(self._count, work.settings.epochs) if work.held is None else self._count
        size = row * len(work.examples) / work.world * views
        if size > MOST_BYTES:
            fit = int(self._count * MOST_BYTES / size)
            then = f" ({fit} would fit)" if fit else ""
            return f"the teacher's outputs for {self._count} views would take {size / 2**30:.1f} GB{then}"
        again = self._run(inputs)
        for one, other in zip(tensors, [again] if isinstance(again, Tensor) else again, strict=True):
            if float((one.float() - other.float()).norm()) > SAME * float(one.float().norm()):
                return "the teacher's outputs change from call to call"
        return None

    def _stop(self, why: str) -> None:
        work = self._work
        if self._kept is not None:
            self._kept.clear()
        self._kept = None
        if work.on_note is not None:
            named = f"{work.section}.distill.views"
            work.on_note(f"{named}: {why}, so the teacher is run in each step, and no time is saved (--set {named}=0)", False)


def epochs_asked(examples: Examples, distill: Distillation) -> int | None:
    """For how many epochs the teacher is run, in all fits of a run together, if its outputs can be kept; None: for each.

    One if the examples do not change; else as many as there are views.
    """
    if asks_once(examples, distill):
        return 1
    return distill.views if distill.wanted and distill.views and not distill.layers else None


def views_of(work: Work, known: bool) -> Views | None:
    """The views of a fit; None if it has none. known: whether the teacher's outputs are known for all epochs already."""
    teacher = work.teacher
    if teacher is None or not teacher.settings.views or known:
        return None
    if teacher.layers is None:
        if work.settings.epochs <= teacher.settings.views:
            _tell(work, f"no epoch comes again in {work.settings.epochs} epochs, so only the trials of a search save time")
        return Views(work)
    _tell(work, "it changes nothing, as distill.layers needs the teacher in each step")
    return None


def first_view(stage: str, count: int) -> int:
    """The view that a stage begins with: a fixed one, so that stages of few epochs do not all have the same ones."""
    return random.Random(stage).randrange(count)


def _tell(work: Work, what: str) -> None:
    if work.on_note is not None:
        work.on_note(f"{work.section}.distill.views: {what}", False)


def marks(inputs: Any) -> Tensor:
    """(L,) a number for each of a batch's L tensors, which depends on the bits and the order of up to about NUMBERS numbers."""
    found: list[Tensor] = []

    def mark(tensor: Tensor) -> None:
        flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).detach().reshape(-1)
        flat = flat[:: max(1, len(flat) // NUMBERS)].contiguous().view(INTEGERS[flat.element_size()]).long()
        found.append((flat * torch.arange(1, len(flat) + 1, device=flat.device)).sum())

    map_tensors(inputs, mark)
    return torch.stack(found)
