"""What the sums over draws need to know of a likelihood."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor


class Kind(Protocol):
    """The part of a `Likelihood` that is read while draws are summed."""

    dim: int

    @property
    def name(self) -> str:
        """As the manifest has it."""
        ...

    @property
    def classes(self) -> bool:
        """Whether the dimension `dim` holds classes."""
        ...

    def heads(self, output: Any) -> Any:
        """What is read of a model's output."""
        ...

    def moments(self, heads: Any) -> tuple[Tensor, Tensor]:
        """Mean and variance of an observation, from the heads of one draw."""
        ...
