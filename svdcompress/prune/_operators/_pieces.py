"""Operators that select, cut, join or pad: how they change the position of each unit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from svdcompress.prune._operators._common import as_labels, bound, combine, mixed_taint, note_pieces, opened
from svdcompress.prune._operators._registry import operator
from svdcompress.prune._paddings import padded
from svdcompress.prune._shadow import Shadow, compact, flat, labels_of, small, varying
from svdcompress.prune._trace import Pieces, Trace


@operator("select", "unbind", "roll", "unfold")
def pick(trace: Trace, name: str, args: tuple, kwargs: dict, out: Any) -> None:
    """select, unbind, roll, unfold: positions are given as numbers, so the dimension keeps its length."""
    x = args[0]
    shadow = trace.of(x)
    dims = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    if name == "roll":
        dims = args[2] if len(args) > 2 and args[2] else list(range(x.dim()))
    if name == "unbind":
        dims = args[1] if len(args) > 1 else 0
    dims = [d % x.dim() for d in (dims if isinstance(dims, list | tuple) else [dims])]
    trace.fix(shadow.labels, dims, f"{name} takes channels by index")
    _all(trace, shadow, bound(name, args, kwargs), out)


def _all(trace: Trace, shadow: Shadow, function: Callable[[Tensor], Any], out: Any) -> None:
    if isinstance(out, Tensor):
        trace.put(out, shadow.move(function))
        return
    for i, part in enumerate(out):
        trace.put(part, shadow.move(lambda tensor, i=i: function(tensor)[i]))


@operator("slice", "split", "split_with_sizes", "chunk", "narrow")
def cut(trace: Trace, name: str, args: tuple, kwargs: dict, out: Any) -> None:
    """slice, split, chunk: equal pieces keep equal sizes; other cuts fix units, unless a tuple of the module has the sizes."""
    x = args[0]
    shadow = trace.of(x)
    if name == "slice":
        dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % x.dim()
        width, step = out.shape[dim], (args[4] if len(args) > 4 else kwargs.get("step", 1))
        start = (args[2] if len(args) > 2 else kwargs.get("start")) or 0
        even = step == 1 and width > 0 and x.shape[dim] % width == 0 and start % width == 0
    else:
        dim = (args[2] if len(args) > 2 else kwargs.get("dim", 0)) % x.dim()
        widths = {part.shape[dim] for part in out}
        width, even = max(widths), len(widths) == 1
    if dim in varying(shadow.labels) and width < x.shape[dim]:
        if even and varying(shadow.labels) == [dim]:
            note_pieces(trace, small(shadow.labels).reshape(-1, width), width)
        elif name != "split_with_sizes" or not _note_lengths(trace, shadow.labels, dim, [part.shape[dim] for part in out]):
            trace.fix(shadow.labels, [dim], "cut into pieces of unequal, fixed size")
    _all(trace, shadow, bound(name, args, kwargs), out)


def _note_lengths(trace: Trace, labels: Any, dim: int, lengths: list[int]) -> bool:
    """Whether the module holds the lengths of the pieces as a tuple or list, which can be updated; if so, records it."""
    if varying(labels) != [dim] or not trace.stack[-1]:
        return False
    for attribute, value in vars(trace.model.get_submodule(trace.stack[-1])).items():
        if isinstance(value, tuple | list) and list(value) == lengths:
            trace.pieces.append(Pieces(small(labels).reshape(-1), tuple(lengths), trace.stack[-1], attribute))
            return True
    return False


@operator("cat", "stack")
def join(trace: Trace, name: str, args: tuple, kwargs: dict, out: Tensor) -> None:
    """cat and stack."""
    tensors = [t for t in args[0] if not (name == "cat" and t.dim() == 1 and t.numel() == 0 and out.dim() > 1)]
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    shadows = [trace.of(tensor) for tensor in tensors]
    function = getattr(torch, name)
    labels = None
    if any(shadow.labels is not None or shadow.parameter is not None for shadow in shadows):
        parts = [as_labels(trace, shadow) for shadow in shadows]
        parts = [flat(0, s.taint.shape) if p is None else p for p, s in zip(parts, shadows, strict=True)]
        labels = compact(function(parts, dim))
    trace.put(out, Shadow(labels, compact(function([shadow.taint for shadow in shadows], dim))))


@operator("constant_pad_nd")
def pad(trace: Trace, name: str, args: tuple, kwargs: dict, out: Tensor) -> None:
    """Padding by a constant: along the only dimension of units it adds units that hold it."""
    shadow = trace.of(args[0])
    labels = opened(trace, shadow)
    if labels is not None:
        longer = padded(trace, shadow, args[1], out.shape)
        if longer is not None:
            return trace.put(out, Shadow(longer, compact(torch.ops.aten.constant_pad_nd(shadow.taint, args[1], 0))))
        grown = [d for d in range(out.dim()) if out.shape[d] != args[0].shape[d]]
        if set(grown) & set(varying(labels)):
            labels = compact(torch.ops.aten.constant_pad_nd(labels, args[1], 0))
        else:
            labels = small(labels).expand(out.shape)
    trace.put(out, Shadow(labels, _spread(shadow.taint, out.shape)))


def _spread(taint: Tensor, shape: torch.Size) -> Tensor:
    """Taint of a tensor of another size: along a dimension that changes, one tainted element taints all."""
    core = small(taint)
    for d, size in enumerate(core.shape):
        if size > 1 and size != shape[d]:
            core = core.any(d, keepdim=True)
    return core.expand(shape)


@operator("glu")
def glu(trace: Trace, name: str, args: tuple, kwargs: dict, out: Tensor) -> None:
    """One half times the sigmoid of the other half: a split and a product."""
    x = args[0]
    dim = (args[1] if len(args) > 1 else -1) % x.dim()
    half = x.shape[dim] // 2
    shadow = trace.of(x)
    if varying(shadow.labels) == [dim]:
        note_pieces(trace, small(shadow.labels).reshape(-1, half), half)
    else:
        trace.fix(shadow.labels, [dim], "halved")
    parts = [shadow.move(lambda t, i=i: t.narrow(dim, i * half, half)) for i in range(2)]
    values = x.chunk(2, dim)
    taint = mixed_taint("mul", list(zip((values[0], values[1].sigmoid()), parts, strict=True)), args, out.shape)
    trace.put(out, combine(trace, parts, out.shape, taint))


@operator("index", "index_select", "gather")
def lookup(trace: Trace, name: str, args: tuple, kwargs: dict, out: Tensor) -> None:
    """index, index_select, gather: positions are given by a tensor, so the indexed dimensions keep their length."""
    x = args[0]
    if name == "index":
        indices = args[1]
        dims = [d for d, index in enumerate(indices) if index is not None]
        if any(index is not None and index.dtype == torch.bool for index in indices):
            dims = list(range(x.dim()))
        tensors = [index for index in indices if index is not None]
    else:
        dims, tensors = [args[1] % x.dim()], [args[2]]
    shadow = trace.of(x)
    if any(tensor is kept for tensor in tensors for kept in trace.kept):  # set by an earlier pruning, and again by this one
        return trace.put(out, shadow.move(bound(name, args, kwargs)))
    trace.fix(shadow.labels, dims, f"{name} takes channels by index")
    moved = shadow.move(bound(name, args, kwargs))
    if any(bool(trace.of(tensor).taint.any()) for tensor in tensors):
        if set(dims) & set(varying(labels_of(shadow))) and shadow.parameter is None and len(varying(shadow.labels)) == 1:
            moved = Shadow(None, moved.taint)
        moved = Shadow(moved.labels, flat(True, out.shape), moved.parameter, moved.places)
    trace.put(out, moved)
