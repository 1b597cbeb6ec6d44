"""Asking a teacher for its answers to all examples, before a fit."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor

from svdcompress.batch import main_output, map_tensors
from svdcompress.errors import Interrupted, ModelError
from svdcompress.sources import batch_length
from svdcompress.train._answers import Answers, asks_once
from svdcompress.train._distill import Teacher
from svdcompress.train._work import Work

MOST_BYTES = 2**29
"""Answers up to this size are kept, on the training device."""

SAME = 0.03
"""What part of its answers' deviation a teacher may change its answers by when other examples are beside them, as by rounding.
One that changes them by more, having statistics of batches or chances of its own, is asked in each step."""


def ask(work: Work) -> Answers | None:
    """The teacher's answers, in the order of the examples, always from the same batches. None where they cannot be kept, or
    would be used once.

    Raises Interrupted.
    """
    teacher = work.teacher
    if teacher is None or not asks_once(work.examples, teacher.settings):
        return None
    if work.held is not None:  # a search has trainings of a single epoch, but many of them
        key = (work.settings.batch_size, work.accelerator.mixed_precision, work.compiled)
        return work.held.get(key, lambda: _asked(work, teacher))
    return _asked(work, teacher) if work.settings.epochs > 1 else None


@torch.no_grad()
def _asked(work: Work, teacher: Teacher) -> Answers | None:
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
