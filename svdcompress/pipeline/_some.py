"""A fixed random subset or order of examples, for work that would take too long with all of them or depends on their order."""

from __future__ import annotations

import torch
from torch import Tensor

from svdcompress.sources import Examples


def some(examples: Examples, count: int) -> Examples:
    """`count` of the examples, drawn with a fixed seed; all if there are no more than that."""
    return examples if len(examples) <= count else examples.subset(places(len(examples), count))


def mixed(examples: Examples) -> Examples:
    """The examples in a fixed random order: of data sorted by class, a batch would show only the variance within a class."""
    return examples.subset(torch.randperm(len(examples), generator=torch.Generator().manual_seed(0)))


def places(total: int, count: int) -> Tensor:
    """The indices of these examples, in ascending order."""
    if total <= count:
        return torch.arange(total)
    return torch.randperm(total, generator=torch.Generator().manual_seed(0))[:count].sort().values
