"""Restores a model if work on it fails halfway."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


@contextmanager
def unchanged_on_error(model: nn.Module) -> Iterator[None]:
    """Restore the model if an exception is raised within the context: classes, attributes, submodules, tensors and their data.

    No tensor is copied: tensors that were given other data get the old data back, but writes into a tensor are not undone.
    """
    modules = [(module, type(module), dict(vars(module))) for module in model.modules()]
    containers = [
        (held, _copied(held)) for _, _, own in modules for held in own.values() if isinstance(held, dict | set | list)
    ]
    tensors = [(tensor, tensor.data) for tensor in _tensors(model)]
    try:
        yield
    except BaseException:
        for tensor, data in tensors:
            tensor.data = data
        for held, before in containers:
            held.clear()
            held.extend(before) if isinstance(held, list) else held.update(before)
        for module, kind, own in modules:
            module.__class__ = kind
            vars(module).clear()
            vars(module).update(own)
        raise


def _copied(held: Any) -> Any:
    return list(held) if isinstance(held, list) else dict(held) if isinstance(held, dict) else set(held)


def _tensors(model: nn.Module) -> list[Tensor]:
    found = {id(tensor): tensor for own in (model.parameters(), model.buffers()) for tensor in own}
    return list(found.values())
