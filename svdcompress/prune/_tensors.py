"""Finds the tensors in a model's inputs and outputs, and keeps track of the storages that they share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

Storages = dict[int, StorageWeakRef]
"""Storages by address. A weak reference lets the memory be freed but reserves the address while it is held, so that no new
storage is mistaken for one that was noted."""


def mark(storages: Storages, tensor: Tensor) -> None:
    """Note the storage of a tensor."""
    storage = tensor.untyped_storage()
    if storage._cdata not in storages:
        storages[storage._cdata] = StorageWeakRef(storage)


def marked(storages: Storages, tensor: Tensor) -> bool:
    """Whether the storage of a tensor was noted."""
    return tensor.untyped_storage()._cdata in storages


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in nested containers, mappings, dataclasses and plain objects, each once."""
    found: dict[int, Tensor] = {}
    seen: set[int] = set()

    def look(item: Any, depth: int) -> None:
        if isinstance(item, Tensor):
            found[id(item)] = item
            return
        if (
            isinstance(item, str | bytes | int | float | complex | bool | nn.Module | type(None))
            or id(item) in seen
            or depth > 8
        ):
            return
        seen.add(id(item))
        if isinstance(item, Mapping):
            for part in item.values():
                look(part, depth + 1)
        elif isinstance(item, list | tuple | set):
            for part in item:
                look(part, depth + 1)
        elif hasattr(item, "__dict__"):
            for part in vars(item).values():
                look(part, depth + 1)

    look(value, 0)
    return list(found.values())
