"""Dimensions other than the batch whose size a file leaves open, such as an image's height or a text's length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from svdcompress.errors import ExportError, UsageError

BATCH = "batch"
"""The name of the first dimension, which is always open."""

TAKEN = (BATCH, "samples", "numbers")
"""Names of dimensions that files have anyway."""

SMALLEST = 2
"""torch.export takes a size of 1 for a constant."""

NEAR = (1, 2, 4, 8, 16, 32)
"""How far the sizes that are tried lie from the example's, if neither half nor one and a half times of it fits."""

AWAY = range(1, 8)
"""How far from the example's sizes a traced model is compared: sizes of all remainders by 2 to 8."""

TINY = (2, 3, 5, 8, 13, 32, 64, 128)
"""Small sizes at which it is compared."""

Axes = Mapping[str, Mapping[int, str]]
"""`dynamic_axes`: for an input's name, the names of its open dimensions."""


class OpenAxes:
    """The open dimensions of a file's inputs, and the sizes that the file is checked at.

    names: of the inputs; tensors: their examples. axes: for each input {dimension: name}; dimensions of one name have one
    size. sizes: the examples' sizes by name.
    """

    def __init__(self, names: Sequence[str], tensors: Sequence[Tensor], dynamic_axes: Axes | None) -> None:
        self.axes: list[dict[int, str]] = [{} for _ in names]
        self.sizes: dict[str, int] = {}
        self._others: list[dict[str, int]] = []
        for name, dims in (dynamic_axes or {}).items():
            if name not in names:
                raise UsageError(f"dynamic_axes: the file has no input {name!r}; its inputs are {', '.join(names)}")
            if not isinstance(dims, Mapping):
                raise UsageError(f"dynamic_axes: {name}: {dims!r} is no mapping of dimensions to names, as in {{2: 'height'}}")
            index = list(names).index(name)
            for dim, axis in dims.items():  # as text in a file's metadata
                self._add(index, name, tensors[index], int(dim) if str(dim).lstrip("-").isdigit() else dim, axis)

    def _add(self, index: int, name: str, tensor: Tensor, dim: int, axis: str) -> None:
        where = f"dynamic_axes: {name}: dimension {dim}"
        if not isinstance(dim, int) or not 1 <= dim < tensor.dim():
            also = "the first one, the batch, is open anyway" if dim == 0 else f"the input has {tensor.dim()}, counted from 0"
            raise UsageError(f"{where} cannot be named {axis!r}: {also}")
        if not str(axis).isidentifier() or axis in TAKEN:
            raise UsageError(f"{where}: {axis!r} is no name for it; a word such as height or length is")
        size = tensor.shape[dim]
        if size < SMALLEST:
            raise UsageError(f"{where} has the size {size} in the example; give an example where it is at least {SMALLEST}")
        if self.sizes.setdefault(axis, size) != size:
            raise UsageError(
                f"{where} is called {axis!r} and has the size {size}, but another one of this name has {self.sizes[axis]}; "
                "dimensions of one name have one size"
            )
        self.axes[index][dim] = axis

    def __bool__(self) -> bool:
        return bool(self.sizes)

    def find(self, run: Callable[[list[Tensor]], Any], tensors: Sequence[Tensor]) -> None:
        """Find sizes besides the example's that the model takes: a smaller one and a larger one, or whichever there is.

        run: the model. tensors: examples of one row. Raises ExportError if it takes none for some dimension.
        """
        failed: dict[str, str] = {}

        def fits(sizes: dict[str, int]) -> bool:
            try:
                with torch.no_grad():
                    run(self.at(tensors, sizes))
            except Exception as error:  # whatever the user's model raises for sizes that it does not take
                failed.setdefault(" and ".join(f"{name} {size}" for name, size in sizes.items()), _line(error))
                return False
            return True

        for candidates in (_smaller, _larger):
            found = next((sizes for sizes in _together(self.sizes, candidates) if fits({**self.sizes, **sizes})), None)
            if found is not None:
                self._others.append({**self.sizes, **found})
        if self.sizes and not self._others:
            tried, why = next(iter(failed.items()))
            raise ExportError(
                f"dynamic_axes: the model takes no other sizes than those of the example; with {tried} it fails: {why}"
            )

    def nearby(self) -> Iterator[dict[str, int]]:
        """Further sizes at which a traced model is compared, whether the model takes them or not."""
        for step in (*AWAY, *(-step for step in AWAY)):
            yield {name: max(size - step, SMALLEST) for name, size in self.sizes.items()}
        yield {name: 2 * size for name, size in self.sizes.items()}
        for least in TINY:
            if least < min(self.sizes.values(), default=0):
                yield dict.fromkeys(self.sizes, least)

    def of_check(self, batch: int) -> dict[str, int]:
        """The sizes that a batch of the checks has: other ones for a single row and for more than five."""
        if not self._others or 1 < batch <= 5:
            return self.sizes
        return self._others[0] if batch == 1 else self._others[-1]

    def at(self, tensors: Sequence[Tensor], sizes: Mapping[str, int]) -> list[Tensor]:
        """The tensors repeated or cut to other sizes, values unchanged."""
        found = []
        for tensor, dims in zip(tensors, self.axes, strict=True):
            for dim, axis in dims.items():
                places = torch.arange(sizes[axis]) % self.sizes[axis]
                tensor = tensor.index_select(dim, places)
            found.append(tensor)
        return found

    def dynamic(self, batch: Any) -> list[dict[int, Any]]:
        """Each input's open dimensions for torch.export, in terms of the dimension `batch`."""
        return [{0: batch, **dict.fromkeys(dims, torch.export.Dim.DYNAMIC)} for dims in self.axes]


def _together(sizes: Mapping[str, int], candidates: Callable[[int], Iterator[int]]) -> Iterator[dict[str, int]]:
    """Sizes for all names at once, by one rule."""
    for values in zip(*(candidates(size) for size in sizes.values()), strict=True):
        if values != tuple(sizes.values()):
            yield dict(zip(sizes, values, strict=True))


def _smaller(size: int) -> Iterator[int]:
    for other in (size // 2 + 1, size // 2, *(size - step for step in NEAR)):
        yield max(SMALLEST, other)


def _larger(size: int) -> Iterator[int]:
    yield from (size + size // 2 + 1, 2 * size, *(size + step for step in NEAR))


def _line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
