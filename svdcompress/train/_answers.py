"""What a teacher answers to all examples, kept where the examples are the same in each epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from svdcompress.batch import map_tensors
from svdcompress.recipe import Distillation
from svdcompress.sources import Examples, InMemory, order_of


class Answers:
    """Outputs for the examples, a row each."""

    def __init__(self, rows: Any) -> None:
        self._rows = rows

    def batches(self, batch_size: int, *, shuffle: int, rank: int, world: int) -> Iterator[Any]:
        """In the batches that `Examples.batches` makes of the examples."""
        count = len(self._rows if isinstance(self._rows, Tensor) else self._rows[0])
        for rows in order_of(count, batch_size, shuffle, rank, world):
            yield map_tensors(self._rows, lambda tensor, rows=rows: tensor.index_select(0, rows.to(tensor.device)))


class Held:
    """Answers of one teacher to the same examples, for several fits: by what else they depend on."""

    def __init__(self) -> None:
        self._known: dict[Any, Answers | None] = {}

    def get(self, key: Any, make: Callable[[], Answers | None]) -> Answers | None:
        """Those of a key, made where there are none yet."""
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]


def asks_once(examples: Examples, distill: Distillation) -> bool:
    """Whether a fit can ask the teacher before its first epoch: for its outputs alone, of examples that stay the same."""
    return isinstance(examples, InMemory) and examples.augment is None and distill.wanted and not distill.layers
