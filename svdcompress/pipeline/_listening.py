"""Data for the stages after training: a pass over them ends between two batches if the run is asked to stop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor

from svdcompress.sources import Data, Examples


class Listening:
    """Examples that call `check` before each batch; it raises an exception to stop the work."""

    def __init__(self, examples: Examples, check: Callable[[], None]) -> None:
        self._examples, self._check = examples, check

    def __len__(self) -> int:
        return len(self._examples)

    def subset(self, indices: Tensor) -> Listening:
        """See `Examples.subset`."""
        return Listening(self._examples.subset(indices), self._check)

    def batches(self, batch_size: int, **how: Any) -> Iterator[tuple[Any, Tensor]]:
        """See `Examples.batches`."""
        for batch in self._examples.batches(batch_size, **how):
            self._check()
            yield batch


def listening(data: Data, check: Callable[[], None]) -> Data:
    """The same data, with all three splits as `Listening`."""
    return replace(data, **{part: Listening(getattr(data, part), check) for part in ("train", "validation", "test")})
