"""Finds the tensors in a model's inputs and outputs, and keeps track of the storages that they share."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set, ValuesView
from contextlib import suppress
from functools import partial
from types import FunctionType, ModuleType, NoneType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

Storages = dict[int, StorageWeakRef]
"""Storages by address. A weak reference lets the memory be freed but reserves the address while it is held, so that no new
storage is mistaken for one that was noted."""

DEEPEST = 8
"""Levels of collections and objects that are looked into."""


def mark(storages: Storages, tensor: Tensor) -> None:
    """Note the storage of a tensor."""
    storage = tensor.untyped_storage()
    if storage._cdata not in storages:
        storages[storage._cdata] = StorageWeakRef(storage)


def marked(storages: Storages, tensor: Tensor) -> bool:
    """Whether the storage of a tensor was noted."""
    return tensor.untyped_storage()._cdata in storages


def tensors_in(value: Any, functions: bool = False) -> list[Tensor]:
    """All tensors in nested collections, mappings, dataclasses and plain objects, each once. functions: in closures, too."""
    return list({id(item): item for item in _leaves(value, functions) if isinstance(item, Tensor)}.values())


def returned_in(output: Any) -> list[Tensor]:
    """What a model returns, as tensors that can be compared: `tensors_in`, NumPy arrays, lists of floats; a float if there are
    no others, as it may be a time that was measured."""
    found, alone = tensors_in(output, functions=True), list[Tensor]()
    for item in _leaves(output, functions=True):
        if isinstance(item, np.ndarray) and item.dtype.kind in "fiubc":
            found.append(torch.from_numpy(item.copy()))
        elif isinstance(item, list | tuple):
            found.append(torch.tensor(item, dtype=torch.float64))
        elif isinstance(item, float):
            alone.append(torch.tensor(item, dtype=torch.float64))
    return found or alone


def unseen(output: Any) -> str | None:
    """Why it cannot be told whether what a model returns has changed, or None."""
    for item in _leaves(output, functions=True):
        if isinstance(item, Iterator):
            return f"the model returns an iterator ({type(item).__name__}), which can be read only once: return a list or tuple"
    if not returned_in(output):
        return f"no tensor is found in what the model returns ({type(output).__name__})"
    return None


def _leaves(value: Any, functions: bool) -> Iterator[Any]:
    """The items at any depth, up to a limit, that hold no others."""
    seen: set[int] = set()

    def look(item: Any, depth: int) -> Iterator[Any]:
        if isinstance(item, Tensor | str | bytes | int | float | complex | nn.Module | type | ModuleType | NoneType):
            yield item
        elif id(item) not in seen and depth <= DEEPEST:
            seen.add(id(item))
            parts = _parts(item, functions)
            if parts is None:
                yield item
            else:
                for part in parts:
                    yield from look(part, depth + 1)

    return look(value, 0)


def _parts(item: Any, functions: bool) -> Iterable[Any] | None:
    """What an object holds; None for a list of floats, and for an object that holds nothing or is not looked into."""
    if isinstance(item, Mapping):
        return list(item.values())
    if isinstance(item, list | tuple | set):
        numbers = not isinstance(item, set) and len(item) > 0 and all(isinstance(part, float) for part in item)
        return None if numbers else item
    if isinstance(item, np.ndarray):
        return item.ravel().tolist() if item.dtype == object else None
    if isinstance(item, FunctionType):
        return list(_cells(item)) if functions else None
    if isinstance(item, partial):
        return [*item.args, *item.keywords.values()] if functions else None
    if isinstance(item, Sequence | Set | ValuesView) and not isinstance(item, range | bytearray | memoryview | array):
        return list(item)
    own = vars(item).values() if hasattr(item, "__dict__") else ()
    slots = [getattr(item, name) for kind in type(item).__mro__ for name in _slots(kind) if hasattr(item, name)]
    return [*own, *slots] or None


def _cells(function: FunctionType) -> Iterator[Any]:
    """What a function has taken from the place where it was defined."""
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # the variable has no value yet
            yield cell.cell_contents


def _slots(kind: type) -> list[str]:
    """The attributes of a class's own `__slots__`."""
    names = vars(kind).get("__slots__", ())
    names = [names] if isinstance(names, str) else list(names)
    private = f"_{kind.__name__.lstrip('_')}"
    return [
        f"{private}{name}" if name.startswith("__") and not name.endswith("__") else name
        for name in names
        if name not in ("__dict__", "__weakref__")
    ]
