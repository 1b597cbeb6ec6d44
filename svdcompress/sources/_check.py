"""Checks that targets are of the right kind and all numbers finite: of a split in memory, or batch by batch as it is read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from svdcompress.batch import map_tensors
from svdcompress.errors import DataError
from svdcompress.sources._positions import IGNORED
from svdcompress.sources._transforms import flat_bytes, has_bytes

LARGEST = torch.finfo(torch.float32).max

FROM_ONE = "the labels seem to start at 1: subtract 1, because the first class is 0"

MOST_CLASSES = 2**24
"""Labels this large or larger cannot be classes."""


@dataclass
class Check:
    """The requirements that the inputs and targets of one split must meet.

    task: classification, binary, regression or gaussian. origin: file, folder or factory; split: train, validation or test.
    outputs: the number of classes, None if unknown. why: where that number comes from, for the message.
    bytes: whether inputs so far held bytes. flat_bytes: whether these don't have the shape of images (`flat_bytes`).
    """

    task: str
    origin: str
    split: str
    outputs: int | None = None
    why: str = ""
    bytes: bool = False
    flat_bytes: bool = False

    def targets(self, targets: Tensor, rows: Sequence[int] | None = None) -> Tensor:
        """The targets in the form that the task's losses take: int64 for classes, (N, 1) as (N,); float32 for all others.

        With a class for each pixel or token, -100 marks positions that do not count.

        rows: positions of these examples in the split's source, for the message (None: these are all of them, in order).
        Raises DataError for classes that are not whole numbers or are out of range, for values that are not finite, and, if
        binary, for anything but 0 and 1.
        """
        if self.task == "classification":
            if targets.dim() == 2 and targets.shape[1] == 1:
                targets = targets[:, 0]
            if targets.is_floating_point():
                what = "is not a class; for a regression, use --loss mse (or gaussian-nll)"
                self._refuse(~(targets.isfinite() & (targets == targets.floor())), targets, rows, "{:g}", what)
            targets = targets.long()
            self._refuse(
                targets >= MOST_CLASSES,
                targets,
                rows,
                "label {}",
                f"is too large: at most {MOST_CLASSES:,} classes are possible",
            )
            broken = targets < 0 if not self.outputs else (targets < 0) | (targets >= self.outputs)
            why = f": {FROM_ONE}" if bool(broken.any()) and from_one([targets], self.outputs) else self.why
            known = f" 0 to {self.outputs - 1}{why}" if self.outputs else ""
            if targets.dim() > 1:
                broken &= targets != IGNORED
                known += f"; a {'pixel' if targets.dim() > 2 else 'position'} that does not count has the class {IGNORED}"
            self._refuse(broken, targets, rows, "label {}", f"is out of range{known}")
            return targets
        self._finite(targets, "data.target", rows)
        targets = targets.float()
        if self.task == "binary":
            self._refuse((targets != 0) & (targets != 1), targets, rows, "{}", "is neither 0 nor 1")
        return targets

    def inputs(self, inputs: Any, rows: Sequence[int] | None = None) -> None:
        """Raises DataError for inputs that hold a number that is not finite."""
        map_tensors(inputs, lambda tensor: self._finite(tensor, "data", rows))
        self.bytes = self.bytes or has_bytes(inputs)
        self.flat_bytes = self.flat_bytes or flat_bytes(inputs)

    def _refuse(self, broken: Tensor, targets: Tensor, rows: Sequence[int] | None, form: str, what: str) -> None:
        if not bool(broken.any()):
            return
        where = broken.nonzero()[0].tolist()
        value = form.format(targets[tuple(where)].item())
        raise DataError(f"data.target: {self.origin}: {value} in {_place(where, rows)} ({self.split}) {what}")

    def _finite(self, tensor: Tensor, field: str, rows: Sequence[int] | None) -> None:
        check_finite(tensor, f"{field}: {self.origin}", rows, f" ({self.split})")


def from_one(targets: Sequence[Tensor], outputs: int | None) -> bool:
    """Whether labels, of all splits or of a batch, run from 1 to the number of outputs."""
    held = [labels for each in targets if (labels := each[each != IGNORED]).numel()]
    if not outputs or outputs < 2 or not held:
        return False
    return min(int(labels.min()) for labels in held) == 1 and max(int(labels.max()) for labels in held) == outputs


def check_finite(values: Any, where: str, rows: Sequence[int] | None = None, split: str = "") -> None:
    """Raises DataError for NaN, infinity, and numbers that are infinite as float32, which is what networks compute in.

    values: a tensor, or a tuple or mapping of tensors. where: the file, for the message. rows: see `Check.targets`.
    """
    map_tensors(values, lambda tensor: _one_finite(tensor, where, rows, split))


def _one_finite(tensor: Tensor, where: str, rows: Sequence[int] | None, split: str) -> None:
    if not tensor.is_floating_point():
        return
    # the sum is one quick pass without a copy; it is not finite if any number is not (or if they are huge)
    wide = tensor.dtype == torch.float64
    if not wide and (bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())):
        return
    broken = ~(tensor.abs() <= LARGEST) if wide else ~tensor.isfinite()
    if not bool(broken.any()):
        return
    place = broken.nonzero()[0].tolist()
    value = tensor[tuple(place)].item()
    beyond = ", which overflows float32" if math.isfinite(value) else ""
    raise DataError(f"{where}: {value}{beyond} in {_place(place, rows)}{split}")


def _place(where: list[int], rows: Sequence[int] | None) -> str:
    """`row 7, position [1]`; the row is "?" if it is not known, as when a batch does not hold exactly the rows asked for."""
    row = where[0] if rows is None else rows[where[0]] if where[0] < len(rows) else "?"
    return f"row {row}" + (f", position {where[1:]}" if len(where) > 1 else "")
