"""Which of several ways to one size is taken: the best by the NLL of examples, unless chance explains its lead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from svdcompress.uncertainty import paired_means


@dataclass(frozen=True)
class Option:
    """A way to a size. size: what it leaves, in the measure of the search; None: not measured. nll: mean negative log
    likelihood in nats of the masked model, untrained. rows: (N,) what each example adds to it, or to a regression's mean
    square."""

    name: str
    size: float | None
    nll: float
    rows: Tensor


def best_option(options: Sequence[Option]) -> Option:
    """The one of the lowest mean; the first, which is how it is done without a choice, unless the 95% interval of the paired
    differences from it lies below 0. options: at least one, on the same examples in the same order.

    >>> import torch
    >>> rows = torch.tensor([0.1, 0.3, 0.2, 0.4])
    >>> first, same, better = (Option(name, 9.0, 0.2, rows + d) for name, d in (("a", 0.0), ("b", 0.0), ("c", -0.05)))
    >>> best_option([first, same, better]).name, best_option([first, same]).name
    ('c', 'a')
    """
    first = options[0].rows.double()
    surely = [option for option in options[1:] if paired_means(option.rows.double() - first)[1] < 0]
    return min(surely, key=lambda option: float(option.rows.double().mean()), default=options[0])


def record(options: Sequence[Option], examples: int) -> dict[str, Any]:
    """What the report tells of a choice: {chosen, usual, examples, candidates: [{name, nll, size}]}."""
    candidates = [{"name": option.name, "nll": option.nll, "size": option.size} for option in options]
    return {"chosen": best_option(options).name, "usual": options[0].name, "examples": examples, "candidates": candidates}
