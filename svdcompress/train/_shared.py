"""Batches that are the same in several fits, so that the teacher's outputs for them are computed once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from svdcompress.batch import generators_kept, map_tensors
from svdcompress.sources import batch_length
from svdcompress.train._ask import MOST_BYTES, SAME, bytes_kept, plain
from svdcompress.train._state import mix, seed_everything
from svdcompress.train._work import Work

NUMBERS = 2**20
"""About the most numbers of a tensor that tell whether a batch is the same."""

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Types to read the bits of a number as, by its size in bytes."""

Batch = tuple[tuple[Any, Tensor], tuple[Any, None]]


class Shared:
    """An epoch's batches, which other fits of the run with the same `Work.held` have, too, and the teacher's outputs, which are
    kept for them (as in fast knowledge distillation, Shen & Xing 2022, arXiv 2112.01528).

    What is drawn while a batch is read depends only on (seed, epoch, rank) and the number of the batch, not on the stage or on
    what the network draws. Kept outputs are those of the very same batch: that they are forgotten, as in a run that resumes,
    changes nothing but the time.

    The teacher is run in each step if a batch is not as it was, because the data draw from generators of their own, or if its
    outputs take too much memory or change from call to call.
    """

    def __init__(self, work: Work) -> None:
        assert work.teacher is not None and work.held is not None
        self._work, self._teacher = work, work.teacher
        same = ("batches", work.settings.batch_size, work.accelerator.mixed_precision, work.compiled)
        self._kept: dict[tuple[int, int], tuple[Any, Tensor]] | None = work.held.setdefault(same, {})
        self._tried = False

    def batches(self, epoch: int, *, check_every: int, **parts: Any) -> Iterator[Batch]:
        """The batches and the teacher's outputs. check_every: batches between checks that one is as it was. parts: those of
        `Examples.batches`, but for `shuffle`."""
        work = self._work
        parts["shuffle"] = mix(work.seed, "shared", epoch)
        stream = iter(work.examples.batches(work.settings.batch_size, **parts))
        index = 0
        while True:
            with generators_kept():
                seed_everything(work.seed, "shared", epoch, index, work.rank)
                batch = next(stream, None)
            if batch is None:
                return
            yield batch, (self._answer((epoch, index), batch[0], index % check_every == 0), None)
            index += 1

    @torch.no_grad()
    def _answer(self, where: tuple[int, int], inputs: Any, checks: bool) -> Any:
        if self._kept is None:
            return None  # `Teacher.mix` runs it then
        known = self._kept.get(where)
        if known is not None:
            if checks and not torch.equal(known[1], marks(inputs)):
                return self._stop()
            return known[0]
        answer = self._run(inputs)
        if not self._tried:
            self._tried = True
            if not self._can_be_kept(answer, inputs):
                return self._stop()
        self._kept[where] = answer, marks(inputs)
        return answer

    def _run(self, inputs: Any) -> Any:
        with self._work.lower():
            return plain(self._teacher.answer(inputs))

    def _can_be_kept(self, answer: Any, inputs: Any) -> bool:
        """Whether outputs are tensors, small enough for all epochs together, and the same if the teacher is called again."""
        work = self._work
        needed = bytes_kept(answer, batch_length(inputs), len(work.examples) / work.world * work.settings.epochs)
        if needed is None or needed > MOST_BYTES:
            return False
        again = self._run(inputs)
        pairs = [(answer, again)] if isinstance(answer, Tensor) else zip(answer, again, strict=True)
        return all(float((one.float() - other.float()).norm()) <= SAME * float(one.float().norm()) for one, other in pairs)

    def _stop(self) -> None:
        if self._kept is not None:
            self._kept.clear()
        self._kept = None


def shared_batches(work: Work) -> Shared | None:
    """The batches of a fit that shares them; None if it does not, or has nothing to gain: it learns from no teacher, or
    compares layers, for which the teacher is run in each step."""
    if not work.shared or work.teacher is None or work.teacher.layers is not None:
        return None
    return Shared(work)


def marks(inputs: Any) -> Tensor:
    """(L,) a number for each of a batch's L tensors, which depends on the bits and the order of up to about NUMBERS numbers."""
    found: list[Tensor] = []

    def mark(tensor: Tensor) -> None:
        flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).detach().reshape(-1)
        flat = flat[:: max(1, len(flat) // NUMBERS)].contiguous().view(INTEGERS[flat.element_size()]).long()
        found.append((flat * torch.arange(1, len(flat) + 1, device=flat.device)).sum())

    map_tensors(inputs, mark)
    return torch.stack(found)
