"""Finds what a forward pass leaves in its modules beside its output, such as an auxiliary head's answers for a loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from svdcompress.batch import call
from svdcompress.convert import as_it_was
from svdcompress.prune._tensors import tensors_in

SHOWN = 3
"""Most attributes that a note names."""


def tell_aside(masked: nn.Module, copied: Callable[[], nn.Module], inputs: Any, own: Any, train: bool) -> list[str]:
    """A note if a pass through the pruned model leaves smaller tensors in attributes than one through the masked model.

    copied: makes a copy of the pruned model. inputs, own: for the masked model and for the pruned one.
    train: whether to look in `train()`, too.
    """
    if not _attributes(masked):  # it has run before
        return []
    smaller: dict[str, str] = {}
    try:
        small = copied()
    except Exception:  # what a pass has left there, such as a lock, may not be copied
        return []
    for mode in (False, True)[: 1 + train]:
        try:
            before = _left(masked, inputs, mode)
            after = _left(small, own, mode) if before else {}
        except Exception:  # what was not verified may not run
            continue
        for name, shapes in before.items():
            for old, new in zip(shapes, after.get(name, ()), strict=False):
                if old != new:
                    smaller.setdefault(name, f"{name} (of shape {old}, now {new})")
    if not smaller:
        return []
    more = f" and {len(smaller) - SHOWN} more" if len(smaller) > SHOWN else ""
    return [
        f"the model keeps tensors beside its output, which were pruned: {', '.join(list(smaller.values())[:SHOWN])}{more}. If "
        "your code reads them, such as a loss, return them from forward(), or protect the layer that makes them (prune.protect)"
    ]


def _left(model: nn.Module, inputs: Any, train: bool) -> dict[str, list[tuple[int, ...]]]:
    """The shapes of all tensors that a pass puts into attributes, by the names of these."""
    earlier = [tensor for _, held in _attributes(model) for tensor in held]  # alive, so that their addresses stay taken
    known = set(map(id, [*earlier, *tensors_in(inputs)]))
    with as_it_was(model, train), torch.no_grad():
        call(model, inputs)
    new = {name: [tuple(tensor.shape) for tensor in held if id(tensor) not in known] for name, held in _attributes(model)}
    return {name: shapes for name, shapes in new.items() if shapes}


def _attributes(model: nn.Module) -> list[tuple[str, list[Tensor]]]:
    """Attributes that hold tensors other than weights, by their names."""
    found = [
        (f"{name}.{key}" if name else key, [tensor for tensor in tensors_in(value) if not isinstance(tensor, nn.Parameter)])
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if key not in ("_parameters", "_buffers", "_modules", "pruning")
    ]
    return [(name, held) for name, held in found if held]
