"""The type of numbers that a model takes, where it fails on those it is given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from svdcompress.batch import call

TAKEN = (torch.float32, torch.int64)
"""The types that models take: numbers, and token ids or categories."""


def other_type(model: nn.Module, inputs: Any, place: str) -> str:
    """The hint for the error of a model that fails on its inputs, but takes zeros of another type in their place; or "".

    place: where the inputs are. If there are several, one of them alone is tried before all.
    """
    parts = _parts(inputs)
    for wanted in TAKEN:
        others = [name for name, part in parts.items() if part.dtype != wanted]
        for names in [[name] for name in others] + [others]:
            if names and _runs(model, _with_zeros(inputs, names, wanted)):
                return _said(names, parts[names[0]], wanted, place)
    return ""


def _parts(inputs: Any) -> dict[Any, Tensor]:
    """The tensors of a batch by their keys or positions; a single one has the key None."""
    found = {None: inputs}
    if isinstance(inputs, Mapping):
        found = dict(inputs)
    elif isinstance(inputs, tuple | list):
        found = dict(enumerate(inputs))
    return {name: part for name, part in found.items() if isinstance(part, Tensor)}


def _with_zeros(inputs: Any, names: list[Any], wanted: torch.dtype) -> Any:
    """The inputs with zeros in place of some parts: any embedding has a row 0, and no number is lost."""
    changed = {name: torch.zeros_like(part, dtype=wanted) for name, part in _parts(inputs).items() if name in names}
    if isinstance(inputs, Tensor):
        return changed[None]
    if isinstance(inputs, Mapping):
        return {**inputs, **changed}
    return tuple(changed.get(position, part) for position, part in enumerate(inputs))


def _runs(model: nn.Module, inputs: Any) -> bool:
    try:
        with torch.no_grad():
            call(model, inputs)
    except Exception:  # whatever the user's model raises
        return False
    return True


def _said(names: list[Any], part: Tensor, wanted: torch.dtype, place: str) -> str:
    found, needed = (str(kind).removeprefix("torch.") for kind in (part.dtype, wanted))
    one = len(names) == 1 and names[0] is not None
    which, are, them = (f"The input {names[0]!r}", "is", "it") if one else ("The inputs", "are", "them")
    bytes_too = " (as are bytes, uint8, divided by 255)" if part.is_floating_point() else ""
    return f". {which} ({place}) {are} read as {found}{bytes_too}, but the model takes {needed}: store {them} as {needed}"
