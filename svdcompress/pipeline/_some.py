"""Some of the examples, where all would take too long: always the same ones."""

from __future__ import annotations

import torch
from torch import Tensor

from svdcompress.sources import Examples


def some(examples: Examples, count: int) -> Examples:
    """So many of the examples, drawn with a fixed seed; all where there are no more."""
    return examples if len(examples) <= count else examples.subset(places(len(examples), count))


def places(total: int, count: int) -> Tensor:
    """Which of all examples those are, in their order."""
    if total <= count:
        return torch.arange(total)
    return torch.randperm(total, generator=torch.Generator().manual_seed(0))[:count].sort().values
