"""How many targets of each class, or yes-or-no question, a model finds: counted batch by batch in a pass over the data."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from svdcompress.sources import like

MOST_KEPT = 5_000_000
"""The most counts of single examples that are kept of a model, 12 bytes each; examples after these are not compared."""

BASE = 2**31
"""The key of a class in an example is BASE times the number of the example plus the number of the class."""


class Found:
    """Counts of one model, for `train.losses(seen=)`. classes: the targets are classes; else answers, 0 and 1, to questions.

    total, right: targets of each class, and those of them that the model finds, (C,), int64, on the CPU. For one question (one
    output, or outputs with further dimensions but no channels) the classes are its answers, 0 and 1. For several, (N, K) or
    (N, K, ...), they are the questions, and targets those to be answered by yes.
    """

    def __init__(self, classes: bool) -> None:
        self.total = self.right = torch.zeros(0, dtype=torch.int64)
        self.questions = 0  # not known before the first batch
        self._classes, self._fits = classes, True
        self._examples = self._compared = 0
        self._keys: list[Tensor] = []
        self._counts: list[Tensor] = []
        self._kept = 0

    @property
    def known(self) -> bool:
        """Whether there are counts; not if batches have different numbers of outputs, which then are no questions."""
        return self._fits and bool(self.total.sum())

    def __call__(self, targets: Tensor, figures: tuple[Tensor, Tensor, Tensor]) -> None:
        """Count a batch. figures: of `Likelihood.figures`, of which wrong answers and what counts are read."""
        wrong, _, counts = figures
        if not len(wrong) or not self._fits:
            return
        labels = self._of_classes(targets, counts) if self._classes else self._of_questions(targets, wrong)
        if not self._fits:
            return
        right = ~wrong.bool().reshape(labels.shape) & (labels >= 0)
        self._add(labels, right)

    def _of_classes(self, targets: Tensor, counts: Tensor) -> Tensor:
        return torch.where(counts.bool(), targets, -1).reshape(len(targets), -1).long()

    def _of_questions(self, targets: Tensor, wrong: Tensor) -> Tensor:
        """The number of the question of each answer of yes, else -1; of one question the answers themselves; (B, numbers)."""
        yes = like(targets, wrong) > 0.5
        questions = wrong.shape[1] if wrong.dim() == 2 or wrong.dim() > 3 else 1
        self._fits = questions == (self.questions or questions)
        self.questions = questions
        if questions == 1:
            return yes.reshape(len(yes), -1).long()
        number = torch.arange(questions, device=yes.device).view(1, -1, *[1] * (yes.dim() - 2))
        return torch.where(yes, number, -1).reshape(len(yes), -1)

    def _add(self, labels: Tensor, right: Tensor) -> None:
        """labels: (B, numbers), -1 where a number does not count; right: which of them the model finds."""
        classes = max(int(labels.max()) + 1, 1)
        if (more := classes - len(self.total)) > 0:
            self.total, self.right = (functional.pad(one, (0, more)) for one in (self.total, self.right))
        rows = torch.arange(len(labels), device=labels.device)[:, None]
        if len(labels) * classes <= 4 * labels.numel():  # dense enough to be counted in one go, without sorting
            flat = 2 * (rows * (classes + 1) + labels + 1) + right
            table = torch.bincount(flat.flatten(), minlength=2 * len(labels) * (classes + 1))
            table = table.view(len(labels), classes + 1, 2)[:, 1:]
            total, found = table.sum((0, 2)), table[..., 1].flatten()
            (places,) = found.nonzero(as_tuple=True)
            counts = found[places]
        else:
            total = torch.bincount(labels[labels >= 0], minlength=classes)
            places, counts = torch.unique((rows * classes + labels)[right], return_counts=True)
        row, label = places.div(classes, rounding_mode="floor"), places % classes
        self.total[:classes] += total.cpu()
        self.right.index_add_(0, label.cpu(), counts.cpu())
        if self._kept <= MOST_KEPT:
            self._keys.append(((row + self._examples) * BASE + label).cpu())
            self._counts.append(counts.int().cpu())
            self._kept += len(places)
            self._compared += len(labels)
        self._examples += len(labels)

    def differences(self, other: Found) -> tuple[Tensor, Tensor]:
        """For each class, in how many examples this model finds more of its targets than another one of the same examples,
        and in how many fewer; (C,) each."""
        keys = torch.cat([*self._keys, *other._keys])
        size = sum(map(len, self._keys))
        unique, place = torch.unique(keys, return_inverse=True)
        more = torch.zeros(len(unique), dtype=torch.int32)
        more.index_add_(0, place[:size], torch.cat(self._counts))
        more.index_add_(0, place[size:], torch.cat(other._counts), alpha=-1)
        both = unique < min(self._compared, other._compared) * BASE
        label, many = unique % BASE, len(self.total)
        gained, lost = (torch.bincount(label[which & both], minlength=many) for which in (more > 0, more < 0))
        return gained, lost
