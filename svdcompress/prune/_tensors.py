"""The tensors in whatever models take and return."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn


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
