"""What the tracer knows about each element of a tensor: its unit, whether the input reaches it, its place in a parameter.

All of this is kept as broadcast views (stride 0 wherever they do not vary), so that a shadow costs next to nothing however
large its tensor is. An operation that only moves data is followed by applying it to the shadow too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from svdcompress.prune._units import Parameter


@dataclass(frozen=True)
class Shadow:
    """labels: the slot of each element's unit, int64 of the tensor's shape (0: none), or None for none at all.

    taint: bool of the tensor's shape, whether the value depends on the model's input (irrelevant weights pass nothing on).
    parameter: the parameter that this is a view of, or None. places: for each of its dimensions, the index of each element
    along it, of the tensor's shape. simplex: whether rows along the last dimension are known to add up to 1. derived: whether
    the values were computed elementwise from the parameter's and are not its own.
    """

    labels: Tensor | None
    taint: Tensor
    parameter: Parameter | None = None
    places: tuple[Tensor, ...] = ()
    simplex: bool = False
    derived: bool = False

    def move(self, function: Callable[[Tensor], Tensor]) -> Shadow:
        """The shadow after an operation that only moves data."""
        labels = None if self.labels is None else compact(function(self.labels))
        places = tuple(compact(function(place)) for place in self.places)
        return Shadow(labels, compact(function(self.taint)), self.parameter, places, derived=self.derived)


def flat(value: int | bool, shape: Sequence[int]) -> Tensor:
    """One value for all elements, as a broadcast view (shadows are kept on the CPU, wherever the model is)."""
    dtype = torch.bool if isinstance(value, bool) else torch.int64
    return torch.full((), value, dtype=dtype).expand(tuple(shape))


def small(tensor: Any) -> Tensor:
    """The tensor with the dimensions along which it does not vary cut to length 1."""
    for d, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and stride == 0:
            tensor = tensor.narrow(d, 0, 1)
    return tensor


def compact(tensor: Tensor) -> Tensor:
    """The same values as a broadcast view along each dimension in which they do not vary."""
    core = small(tensor)
    if core.numel() > 1:
        for d in range(core.dim()):
            if core.shape[d] > 1:
                first = core.narrow(d, 0, 1)
                if bool((core == first).all()):
                    core = first
    return core.expand(tensor.shape)


def varying(tensor: Tensor | None) -> list[int]:
    """Dimensions along which a compact tensor varies."""
    return [] if tensor is None else [d for d, size in enumerate(small(tensor).shape) if size > 1]


def labels_of(shadow: Shadow) -> Tensor | None:
    """The labels of a tensor; for a view of a parameter, the slots of the parameter's last axis that varies in it."""
    if shadow.parameter is None:
        return shadow.labels
    for axis in reversed(range(len(shadow.places))):
        if varying(shadow.places[axis]):
            return compact(small(shadow.places[axis]) + shadow.parameter.axes[axis]).expand(shadow.taint.shape)
    return None
