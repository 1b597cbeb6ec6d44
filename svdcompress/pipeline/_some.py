"""A fixed random subset of examples, for work that would take too long with all of them."""

from __future__ import annotations

import torch
from torch import Tensor

from svdcompress.sources import Examples


def some(examples: Examples, count: int) -> Examples:
    """`count` of the examples, drawn with a fixed seed; all if there are no more than that."""
    return examples if len(examples) <= count else examples.subset(places(len(examples), count))


def places(total: int, count: int) -> Tensor:
    """The indices of these examples, in ascending order."""
    if total <= count:
        return torch.arange(total)
    return torch.randperm(total, generator=torch.Generator().manual_seed(0))[:count].sort().values
