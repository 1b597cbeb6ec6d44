"""A teacher's answers to all examples, asked for once where the examples are the same in each epoch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor

from svdcompress.batch import main_output, map_tensors
from svdcompress.errors import Interrupted, ModelError
from svdcompress.recipe import Distillation, Training
from svdcompress.sources import Examples, InMemory, batch_length, order_of
from svdcompress.train._distill import Teacher
from svdcompress.train._work import Work

MOST_BYTES = 2**29
"""Answers up to this size are kept, on the training device."""

SAME = 0.03
"""What part of its answers' deviation a teacher may change its answers by when other examples are beside them, as by rounding.
One that changes them by more, having statistics of batches or chances of its own, is asked in each step."""


class Answers:
    """Outputs for the examples, a row each."""

    def __init__(self, rows: Any) -> None:
        self._rows = rows

    def batches(self, batch_size: int, *, shuffle: int, rank: int, world: int) -> Iterator[Any]:
        """In the batches that `Examples.batches` makes of the examples."""
        count = len(self._rows if isinstance(self._rows, Tensor) else self._rows[0])
        for rows in order_of(count, batch_size, shuffle, rank, world):
            yield map_tensors(self._rows, lambda tensor, rows=rows: tensor.index_select(0, rows.to(tensor.device)))


def asks_once(examples: Examples, settings: Training, distill: Distillation) -> bool:
    """Whether a fit can ask the teacher before its first epoch: for its outputs alone, of examples that stay the same, and
    more than once."""
    same = isinstance(examples, InMemory) and examples.augment is None
    return same and settings.epochs > 1 and distill.wanted and not distill.layers


@torch.no_grad()
def ask(work: Work) -> Answers | None:
    """The teacher's answers, in the order of the examples, always from the same batches. None where they cannot be kept.

    Raises Interrupted.
    """
    teacher = work.teacher
    if teacher is None or not asks_once(work.examples, work.settings, teacher.settings):
        return None
    parts: list[Any] = []
    shown = nullcontext() if work.bars is None else work.bars.working("teacher", stays=False)
    with shown, work.autocast(), work.right:
        for inputs, _ in work.examples.batches(work.settings.batch_size, device=work.device):
            answer = _plain(teacher.answer(inputs))
            if not parts and not _can_be_kept(teacher, answer, inputs, len(work.examples)):
                return None
            parts.append(answer)
            if work.stop():
                raise Interrupted(f"stopped in {work.stage}, before it went on. {work.kept}")
    if isinstance(parts[0], Tensor):
        return Answers(torch.cat(parts))
    return Answers(tuple(map(torch.cat, zip(*parts, strict=True))))


def _plain(output: Any) -> Any:
    """A tensor or a tuple of tensors as it is; of what has names, what counts."""
    named = hasattr(output, "keys") or is_dataclass(output)
    return main_output(output) if named else output


def _can_be_kept(teacher: Teacher, answer: Any, inputs: Any, count: int) -> bool:
    """Whether these are tensors with a row for each example, small enough, and each row that of its example alone."""
    tensors = [answer] if isinstance(answer, Tensor) else list(answer) if isinstance(answer, tuple | list) else []
    size = batch_length(inputs)
    if not tensors or not all(isinstance(each, Tensor) and each.dim() and len(each) == size for each in tensors):
        return False
    row = sum(each[0].numel() * each.element_size() for each in tensors)
    if row * count > MOST_BYTES:
        return False
    some = max(1, size // 2)
    try:
        again = _plain(teacher.answer(map_tensors(inputs, lambda tensor: tensor[:some])))
    except (RuntimeError, ValueError, ModelError):  # made for batches of one size
        return False
    again = [again] if isinstance(again, Tensor) else list(again)
    return all(_same(one[:some].float(), other.float()) for one, other in zip(tensors, again, strict=True))


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool((one - other).square().mean() <= SAME**2 * one.var(correction=0))
