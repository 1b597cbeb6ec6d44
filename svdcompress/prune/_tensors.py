"""Finds the tensors in a model's inputs and outputs, and keeps track of the storages that they share."""

from __future__ import annotations

from array import array
from collections.abc import ItemsView, Iterable, Iterator, Mapping, Sequence, Set, ValuesView
from contextlib import suppress
from functools import partial
from itertools import count
from types import FunctionType, MethodType, ModuleType, NoneType
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

NUMBERS = (range, bytearray, memoryview, array)
"""Sequences that hold no objects."""


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
    """What a model returns, as tensors that can be compared: `tensors_in` and NumPy arrays; floats and lists of floats only if
    there are no others, as they may be times that were measured."""
    found, alone = tensors_in(output, functions=True), list[Tensor]()
    for item in _leaves(output, functions=True):
        if isinstance(item, np.ndarray) and item.dtype.kind in "fiubc":
            found.append(torch.from_numpy(item.astype(complex if item.dtype.kind == "c" else float)))
        elif isinstance(item, list | tuple | float):
            alone.append(torch.tensor(item, dtype=torch.float64))
    return found or alone


def unseen(output: Any) -> str | None:
    """Why it cannot be told whether what a model returns has changed, or None."""
    for item in _leaves(output, functions=True):
        if isinstance(item, Iterator) and not isinstance(item, count):
            return f"the model returns an iterator ({type(item).__name__}), which can be read only once: return a list or tuple"
    if not returned_in(output):
        return f"no tensor is found in what the model returns ({type(output).__name__})"
    return None


def _leaves(value: Any, functions: bool) -> Iterator[Any]:
    """The items at any depth, up to a limit, that hold no others."""
    seen: dict[int, Any] = {}  # alive, as the address of an object that is made on the way would be used again

    def look(item: Any, depth: int) -> Iterator[Any]:
        if isinstance(item, Tensor | str | bytes | int | float | complex | nn.Module | type | ModuleType | NoneType):
            yield item
        elif id(item) not in seen and depth <= DEEPEST:
            seen[id(item)] = item
            parts = _parts(item, functions)
            if parts is None:
                yield item
            else:
                for part in parts:
                    yield from look(part, depth + 1)

    return look(value, 0)


def _parts(item: Any, functions: bool) -> Iterable[Any] | None:
    """What an object holds; None for a list of floats, and for an object that holds nothing or is not looked into."""
    if type(item) in (list, tuple):
        return None if item and all(isinstance(part, float) for part in item) else item
    if isinstance(item, np.ndarray):
        return item.ravel().tolist() if item.dtype == object else None
    if isinstance(item, FunctionType | MethodType | partial):
        return list(_bound(item)) if functions else None
    found: list[Any] = []
    with suppress(Exception):  # a collection of one's own may raise anything
        if isinstance(item, Mapping):
            found += item.values()
        elif isinstance(item, Sequence | Set | ValuesView | ItemsView) and not isinstance(item, NUMBERS):
            found += item
    if hasattr(item, "__dict__"):
        found += vars(item).values()
    for name in (name for kind in type(item).__mro__ for name in _slots(kind)):
        with suppress(Exception):  # not set, or a property of the same name
            found.append(getattr(item, name))
    return found or None


def _bound(function: Any) -> Iterator[Any]:
    """What a function, method or partial was made with."""
    if isinstance(function, MethodType):
        yield function.__self__
    elif isinstance(function, partial):
        yield from (function.func, *function.args, *function.keywords.values())
    else:
        yield from (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
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
