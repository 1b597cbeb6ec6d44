"""The choice among several ways to one size: the one with the lowest NLL, unless chance could explain its lead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from svdcompress.uncertainty import paired_means


@dataclass(frozen=True)
class Option:
    """A way to a size. size: that of the model it leaves, in the measure of the search; None: not measured. nll: mean
    negative log likelihood in nats of the masked model, before any training. rows: (N,) what each example adds to it, or to
    the mean squared error of a regression."""

    name: str
    size: float | None
    nll: float
    rows: Tensor


def best_option(options: Sequence[Option]) -> Option:
    """The option with the lowest mean of those that are surely better than the first one, which is the default: the 95%
    interval of the paired differences from it lies below 0. Without any, the first. Options with losses that are not finite
    count only if there are no others. options: at least one, on the same examples in the same order.

    >>> import torch
    >>> rows = torch.tensor([0.1, 0.3, 0.2, 0.4])
    >>> first, same, better = (Option(name, 9.0, 0.2, rows + d) for name, d in (("a", 0.0), ("b", 0.0), ("c", -0.05)))
    >>> best_option([first, same, better]).name, best_option([first, same]).name
    ('c', 'a')
    """
    finite = [option for option in options if bool(option.rows.isfinite().all())]
    first = (finite or options)[0]
    surely = [option for option in finite[1:] if paired_means(option.rows.double() - first.rows.double())[1] < 0]
    return min(surely, key=lambda option: float(option.rows.double().mean()), default=first)


def record(options: Sequence[Option], examples: int, chosen: str) -> dict[str, Any]:
    """The report's entry on a choice: {chosen, usual, examples, candidates: [{name, nll, size}]}."""
    candidates = [{"name": option.name, "nll": option.nll, "size": option.size} for option in options]
    return {"chosen": chosen, "usual": options[0].name, "examples": examples, "candidates": candidates}
