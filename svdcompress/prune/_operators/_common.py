"""What several handlers need: applying operators to shadows, and combining shadows where elements of several tensors meet."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from svdcompress.prune._shadow import Shadow, compact, labels_of, small, varying
from svdcompress.prune._trace import Trace, View
from svdcompress.prune._units import Parameter, distinct


def bound(name: str, args: tuple, kwargs: dict) -> Callable[[Tensor], Any]:
    """The operator as a function of its first argument alone."""
    function = getattr(torch.ops.aten, name)
    rest = [_on_cpu(argument) for argument in args[1:]]
    return lambda tensor: function(tensor, *rest, **kwargs)


def _on_cpu(argument: Any) -> Any:
    if isinstance(argument, list | tuple):
        return [_on_cpu(part) for part in argument]
    return argument.cpu() if isinstance(argument, Tensor) else argument


def opened(trace: Trace, shadow: Shadow) -> Tensor | None:
    """Labels of a tensor whose values are used; if it is a view of a parameter, the parameter is sealed."""
    if shadow.parameter is not None:
        trace.seal(shadow.parameter, "its values are used directly")
        return None
    return shadow.labels


def as_labels(trace: Trace, shadow: Shadow) -> Tensor | None:
    """Labels of a tensor, either computed or a view of a parameter; None if it has none. Grouped parameters are sealed."""
    if shadow.parameter is not None and shadow.parameter.grouped:
        trace.seal(shadow.parameter, "its values are used directly")
        return None
    return labels_of(shadow)


def note_view(trace: Trace, labels: Tensor | None, out: Tensor) -> None:
    """Record a change of shape of a tensor with units."""
    if varying(labels):
        trace.views.append(View(small(labels), tuple(out.shape), trace.stack[-1]))


def note_pieces(trace: Trace, pieces: Tensor, width: int) -> None:
    """Record pieces of units that must keep equal sizes, and this size, which code may hold as a number."""
    trace.splits.append(pieces)
    trace.views.append(View(pieces[:1], (1, width), trace.stack[-1]))


# Sums


def other_units(trace: Trace, parts: list[Tensor | None]) -> bool:
    """Whether two of the tensors that are added up each have units that the other one lacks, so far: a gated tensor has those
    of the plain one, and halves that are turned against each other have the same."""
    found = {frozenset(trace.units.resolve(small(labels)).unique().tolist()) for labels in parts if labels is not None}
    return any(one - other and other - one for one, other in combinations(found, 2))


def along_others(trace: Trace, labels: Tensor | None, dims: list[int]) -> bool:
    """Whether a tensor has different units along dimensions over which it is added up, and other units in each place there."""
    if labels is None or not set(varying(labels)) - set(dims):
        return False
    core = small(labels)
    here = [d for d in varying(labels) if d in dims]
    return any(other_units(trace, list(core.unbind(d))) for d in here)


# Elements that meet


def mixed_taint(name: str, pairs: list[tuple[Tensor, Shadow]], args: tuple, shape: torch.Size) -> Tensor:
    """The input reaches an element if it reaches an operand there, unless a product has a constant 0 in that place."""
    if name == "mul" and len(pairs) == 2:
        (a, sa), (b, sb) = pairs
        dead_a, dead_b = _constant_zero(a, sa), _constant_zero(b, sb)
        taint = (small(sa.taint) & ~dead_b) | (small(sb.taint) & ~dead_a)
    else:
        taint = small(pairs[0][1].taint)
        for _, shadow in pairs[1:]:
            taint = taint | small(shadow.taint)
    return compact(taint.expand(shape))


def _constant_zero(tensor: Tensor, shadow: Shadow) -> Tensor:
    """Where an activation is 0 whatever the input is (parameters that happen to be 0 don't count, as they may be trained)."""
    taint = small(shadow.taint)
    if shadow.parameter is not None or shadow.labels is None or bool(taint.all()):
        return torch.zeros_like(taint)
    zero = (tensor == 0).cpu()
    for d, size in enumerate(taint.shape):
        if size == 1 and zero.shape[d] > 1:
            zero = zero.all(d, keepdim=True)
    return zero & ~taint


def combine(trace: Trace, shadows: list[Shadow], shape: torch.Size, taint: Tensor) -> Shadow:
    """The shadow of a tensor whose elements combine those of several tensors (broadcast to `shape`)."""
    if len(shadows) == 1 and shadows[0].taint.shape == shape:
        one = shadows[0]
        return Shadow(one.labels, taint, one.parameter, one.places, derived=True)
    aligned = [_align(shadow, len(shape)) for shadow in shadows]
    labelled = [shadow for shadow in aligned if shadow.labels is not None]
    parameters: list[Any] = [shadow for shadow in aligned if shadow.parameter is not None]
    if not labelled:
        others = [shadow for shadow in aligned if shadow.parameter is None]
        if len(parameters) == 1 and all(shadow.taint.numel() == 1 and not bool(shadow.taint) for shadow in others):
            places = tuple(place.expand(shape) for place in parameters[0].places)
            return Shadow(None, taint, parameters[0].parameter, places, derived=True)
        for shadow in parameters:
            trace.seal(shadow.parameter, "transformed before use")
        return Shadow(None, taint)
    labels = _meet(trace, [shadow.labels for shadow in labelled if shadow.labels is not None], shape)
    for shadow in aligned:
        if shadow.labels is not None:
            continue
        if shadow.parameter is not None:
            attach(trace, shadow.parameter, shadow.places, labels, shape)
        else:
            wide = [d for d, size in enumerate(shadow.taint.shape) if size > 1]
            trace.fix(labels, wide, "meets values that belong to no unit")
    if len(varying(labels)) > 1:  # tied units may vary along fewer dimensions
        labels = compact(trace.units.resolve(small(labels))).expand(shape)
    return Shadow(labels, taint)


def _align(shadow: Shadow, dims: int) -> Shadow:
    missing = dims - shadow.taint.dim()
    if missing <= 0:
        return shadow
    front = (None,) * missing

    def grow(tensor: Tensor) -> Tensor:
        return tensor[front]

    labels = None if shadow.labels is None else grow(shadow.labels)
    return Shadow(labels, grow(shadow.taint), shadow.parameter, tuple(grow(place) for place in shadow.places))


def _meet(trace: Trace, all_labels: list[Tensor], shape: torch.Size) -> Tensor | None:
    """Tie the labels of operands that line up; the units of an operand that is broadcast over other units are pinned."""
    free = {d for labels in all_labels for d in varying(labels)}
    kept = []
    for labels in all_labels:
        if any(labels.shape[d] == 1 and shape[d] > 1 for d in free):
            trace.units.pin(small(labels), "multiplies or shifts other units")
        else:
            kept.append(labels)
    if not kept:
        return None
    core = small(kept[0])
    for labels in kept[1:]:
        trace.units.tie(core, small(labels))
        if small(labels).numel() > core.numel():
            core = small(labels)
    core = core.expand(torch.broadcast_shapes(*(small(labels).shape for labels in kept)))
    return core.expand(shape)


def attach(trace: Trace, parameter: Parameter, places: tuple[Tensor, ...], labels: Tensor | None, shape: torch.Size) -> None:
    """Tie a parameter to the units that its elements meet, along an axis whose indices meet one unit each, or fix both."""
    if labels is None:
        return
    free = varying(labels)
    wide = [d for d in free if any(place.shape[d] > 1 for place in places)]
    if not wide:
        return
    core = small(labels)
    done = False
    loose: list[tuple[int, Tensor]] = []  # axes of which each index meets units that no other index meets
    for axis, place in enumerate(places):
        index = small(place)
        if parameter.sizes[axis] == 1 or parameter.grouped or index.numel() == 1:
            continue
        index, units = torch.broadcast_tensors(index, core)
        pairs = distinct(torch.stack([index.reshape(-1), units.reshape(-1)]))
        if len(torch.unique(pairs[0])) == pairs.shape[1]:
            trace.units.tie(pairs[0] + parameter.axes[axis], pairs[1])
            done = True
        elif len(torch.unique(pairs[1])) == pairs.shape[1]:
            loose.append((axis, pairs))
    if not done and len(wide) == len(free) and len(loose) == 1:
        axis, pairs = loose[0]
        trace.units.tie(pairs[0] + parameter.axes[axis], pairs[1])
    elif not done:
        trace.fix(labels, wide, f"meets {parameter.name}, which has no axis for these units")
        trace.seal(parameter, "does not line up with units")
