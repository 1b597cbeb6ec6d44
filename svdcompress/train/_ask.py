"""A teacher's outputs for all examples, computed before a fit."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor

from svdcompress.batch import main_output, map_tensors
from svdcompress.errors import Interrupted, ModelError
from svdcompress.layers import rows_differ
from svdcompress.recipe import Distillation
from svdcompress.sources import Examples, InMemory, batch_length
from svdcompress.train._distill import Teacher
from svdcompress.train._work import Work

MOST_BYTES = 2**29
"""The teacher's outputs are kept, on the training device, if they are not larger than this."""

SAME = 0.03
"""How much a teacher's output may change, relative to itself, with the other examples in the batch, such as by rounding in
bfloat16. A teacher whose outputs change by more, because of batch statistics or randomness of its own, is run in each step."""


def asks_once(examples: Examples, distill: Distillation) -> bool:
    """Whether a fit can run the teacher before its first epoch: only its outputs are needed, and the examples do not change."""
    return isinstance(examples, InMemory) and examples.augment is None and distill.wanted and not distill.layers


def ask(work: Work) -> InMemory | None:
    """The teacher's outputs as the inputs of examples, in the order of the fit's own; always computed in the same batches, so
    that a resumed fit gets the same bits. None if they cannot be kept, or would be used only once.

    Raises Interrupted.
    """
    teacher = work.teacher
    if teacher is None or not asks_once(work.examples, teacher.settings):
        return None
    if work.held is not None:  # a search has trainings of a single epoch, but many of them
        key = (work.settings.batch_size, work.accelerator.mixed_precision, work.compiled)
        if key not in work.held:
            work.held[key] = _asked(work, teacher)
        return work.held[key]
    return _asked(work, teacher) if work.settings.epochs > 1 else None


@torch.no_grad()
def _asked(work: Work, teacher: Teacher) -> InMemory | None:
    parts: list[Any] = []
    shown = nullcontext() if work.bars is None else work.bars.working("teacher", stays=False)
    with shown, work.lower():
        for inputs, _ in work.examples.batches(work.settings.batch_size, device=work.device):
            answer = plain(teacher.answer(inputs))
            if not parts and not _can_be_kept(teacher, answer, inputs, len(work.examples)):
                return None
            parts.append(answer)
            if work.stop():
                raise Interrupted(f"stopped in {work.stage}, before its next epoch. {work.kept}")
    single = isinstance(parts[0], Tensor)
    rows = torch.cat(parts) if single else tuple(map(torch.cat, zip(*parts, strict=True)))
    return InMemory(rows, torch.empty(len(work.examples), device=work.device))


def plain(output: Any) -> Any:
    """The main output of an output with names; any other, such as a tensor or a tuple of tensors, as it is."""
    named = hasattr(output, "keys") or is_dataclass(output)
    return main_output(output) if named else output


def _can_be_kept(teacher: Teacher, answer: Any, inputs: Any, count: int) -> bool:
    """Whether the outputs are tensors with a row for each example, small enough, and each row depends on its example alone."""
    size = batch_length(inputs)
    needed = bytes_kept(answer, size, count)
    if needed is None or needed > MOST_BYTES:
        return False
    some = max(1, size // 2)
    try:
        again = plain(teacher.answer(map_tensors(inputs, lambda tensor: tensor[:some].flip(0))))
    except (RuntimeError, ValueError, ModelError):  # the teacher takes only batches of one size, or rows in one order
        return False
    return not rows_differ(answer, again, (size, some), SAME, backwards=True)


def bytes_kept(answer: Any, size: int, count: float) -> float | None:
    """Bytes of the outputs for `count` examples, by those for a batch of `size`; None if they are not tensors with a row for
    each example."""
    tensors = [answer] if isinstance(answer, Tensor) else list(answer) if isinstance(answer, tuple | list) else []
    if not tensors or not all(isinstance(each, Tensor) and each.dim() and len(each) == size for each in tensors):
        return None
    return count * sum(each[0].numel() * each.element_size() for each in tensors)
