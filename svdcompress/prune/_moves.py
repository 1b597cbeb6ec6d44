"""Operators that move, select, join, pool or reduce: what they do to the place of each unit."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from svdcompress.prune._padding import padded
from svdcompress.prune._pointwise import as_labels, combine, mixed_taint, unlabelled
from svdcompress.prune._shadow import Shadow, compact, flat, labels_of, small, varying

if TYPE_CHECKING:
    from svdcompress.prune._trace import Trace

Handler = Callable[["Trace", str, tuple, dict, Any], None]


def _bound(trace: Trace, name: str, args: tuple, kwargs: dict) -> Callable[[Tensor], Any]:
    """The operator as a function of its first argument alone."""
    function = getattr(torch.ops.aten, name)
    rest = [_on_cpu(argument) for argument in args[1:]]
    return lambda tensor: function(tensor, *rest, **kwargs)


def _on_cpu(argument: Any) -> Any:
    if isinstance(argument, list | tuple):
        return [_on_cpu(part) for part in argument]
    return argument.cpu() if isinstance(argument, Tensor) else argument


def same(trace: Trace, name: str, args: tuple, kwargs: dict, out: Tensor) -> None:
    """The same values in the same places."""
    trace.put(out, trace.of(args[0]))


def reshape(trace: Trace, name: str, args: tuple, kwargs: dict, out: Tensor) -> None:
    """Views: where units come to vary along a new dimension, code may hold its length as a number."""
    before = trace.of(args[0])
    shadow = before.move(lambda tensor: tensor.reshape(out.shape))
    note_view(trace, shadow.labels, out)
    trace.put(out, _rows(before, shadow))


def _rows(before: Shadow, after: Shadow) -> Shadow:
    """Rows that add up to 1 still do where the last dimension is what it was."""
    return replace(after, simplex=before.simplex and before.taint.shape[-1:] == after.taint.shape[-1:])


def note_view(trace: Trace, labels: Tensor | None, out: Tensor) -> None:
    """Remember a change of shape of units."""
    from svdcompress.prune._trace import View

    if varying(labels):
        trace.views.append(View(small(labels), tuple(out.shape), trace.stack[-1]))


def move(trace: Trace, name: str, args: tuple, kwargs: dict, out: Any) -> None:
    """Permutations and the like, done to the shadow too."""
    trace.put(out, trace.of(args[0]).move(_bound(trace, name, args, kwargs)))


def expand(trace: Trace, name: str, args: tuple, kwargs: dict, out: Tensor) -> None:
    """Broadcasting."""
    before = trace.of(args[0])
    trace.put(out, _rows(before, before.move(lambda tensor: tensor.expand(out.shape))))


def like(trace: Trace, name: str, args: tuple, kwargs: dict, out: Tensor) -> None:
    """A new tensor of another's shape: its places follow those of the other, its values don't depend on it."""
    shadow = trace.of(args[0])
    labels = None if shadow.parameter is not None or out.shape != args[0].shape else shadow.labels
    trace.put(out, Shadow(labels, flat(name.startswith("rand"), out.shape)))


def pick(trace: Trace, name: str, args: tuple, kwargs: dict, out: Any) -> None:
    """select, unbind, roll, unfold: a place given as a number, so the dimension keeps its length."""
    x = args[0]
    shadow = trace.of(x)
    dims = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    if name == "roll":
        dims = args[2] if len(args) > 2 and args[2] else list(range(x.dim()))
    if name == "unbind":
        dims = args[1] if len(args) > 1 else 0
    dims = [d % x.dim() for d in (dims if isinstance(dims, list | tuple) else [dims])]
    trace.fix(shadow.labels, dims, f"{name} takes channels by number")
    _all(trace, shadow, _bound(trace, name, args, kwargs), out)


def _all(trace: Trace, shadow: Shadow, function: Callable[[Tensor], Any], out: Any) -> None:
    if isinstance(out, Tensor):
        trace.put(out, shadow.move(function))
        return
    for i, part in enumerate(out):
        trace.put(part, shadow.move(lambda tensor, i=i: function(tensor)[i]))


def cut(trace: Trace, name: str, args: tuple, kwargs: dict, out: Any) -> None:
    """slice, split, chunk: pieces of one size stay of one size; other cuts through units hold them in place."""
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
        elif name != "split_with_sizes" or not note_lengths(trace, shadow.labels, dim, [part.shape[dim] for part in out]):
            trace.fix(shadow.labels, [dim], "cut into pieces of unequal, fixed size")
    _all(trace, shadow, _bound(trace, name, args, kwargs), out)


def note_pieces(trace: Trace, pieces: Tensor, width: int) -> None:
    """Remember pieces of units that must stay of equal size, and that code may know this size."""
    from svdcompress.prune._trace import View

    trace.splits.append(pieces)
    trace.views.append(View(pieces[:1], (1, width), trace.stack[-1]))


def note_lengths(trace: Trace, labels: Any, dim: int, lengths: list[int]) -> bool:
    """Whether the lengths of pieces are those of a tuple that the module holds, which can follow them; remembers it."""
    from svdcompress.prune._trace import Pieces

    if varying(labels) != [dim] or not trace.stack[-1]:
        return False
    for attribute, value in vars(trace.model.get_submodule(trace.stack[-1])).items():
        if isinstance(value, tuple | list) and list(value) == lengths:
            trace.pieces.append(Pieces(small(labels).reshape(-1), tuple(lengths), trace.stack[-1], attribute))
            return True
    return False


def join(trace: Trace, name: str, args: tuple, kwargs: dict, out: Tensor) -> None:
    """cat and stack."""
    tensors = [t for t in args[0] if not (name == "cat" and t.dim() == 1 and t.numel() == 0 and out.dim() > 1)]
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    shadows = [trace.of(tensor) for tensor in tensors]
    function = getattr(torch, name)
    labels = None
    if any(shadow.labels is not None or shadow.parameter is not None for shadow in shadows):
        parts = [as_labels(trace, shadow) for shadow in shadows]
        parts = [unlabelled(s.taint.shape) if p is None else p for p, s in zip(parts, shadows, strict=True)]
        labels = compact(function(parts, dim))
    trace.put(out, Shadow(labels, compact(function([shadow.taint for shadow in shadows], dim))))


def pad(trace: Trace, name: str, args: tuple, kwargs: dict, out: Tensor) -> None:
    """Padding by a constant: along a dimension of units it adds units that hold it."""
    shadow = trace.of(args[0])
    labels = _opened(trace, shadow)
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


def _opened(trace: Trace, shadow: Shadow) -> Tensor | None:
    if shadow.parameter is not None:
        trace.seal(shadow.parameter, "used as values")
        return None
    return shadow.labels


def _spread(taint: Tensor, shape: torch.Size) -> Tensor:
    """Taint of a tensor of another size: wherever a dimension changes, any of its elements may count."""
    core = small(taint)
    for d, size in enumerate(core.shape):
        if size > 1 and size != shape[d]:
            core = core.any(d, keepdim=True)
    return core.expand(shape)


def spatial(trace: Trace, name: str, args: tuple, kwargs: dict, out: Any) -> None:
    """Pooling, upsampling, padding by reflection: mixing along the last dimensions only."""
    x = args[0]
    result = out if isinstance(out, Tensor) else out[0]
    found = re.search(r"(\d)d", name)
    dims = list(range(x.dim() - int(found.group(1)), x.dim())) if found else list(range(2, x.dim()))
    shadow = trace.of(x)
    labels = _opened(trace, shadow)
    trace.fix(labels, dims, f"{name} mixes them")
    taint = small(shadow.taint)
    for d in dims:
        taint = taint.any(d, keepdim=True)
        labels = None if labels is None else small(labels).narrow(d, 0, 1)
    follow_up = Shadow(None if labels is None else small(labels).expand(result.shape), taint.expand(result.shape))
    for part in (out,) if isinstance(out, Tensor) else out:
        trace.put(part, follow_up if part.shape == result.shape else Shadow(None, flat(True, part.shape)))


def reduce(trace: Trace, name: str, args: tuple, kwargs: dict, out: Any) -> None:
    """Sums, means, extremes and norms over dimensions, which then keep their length in units."""
    x = args[0]
    position = next((i for i, a in enumerate(_schema(name, args)) if a in ("dim", "dims")), None)
    dims = kwargs.get("dim", args[position] if position is not None and position < len(args) else None)
    dims = list(range(x.dim())) if dims is None or dims == [] else dims if isinstance(dims, list | tuple) else [dims]
    dims = sorted({d % max(x.dim(), 1) for d in dims})
    shadow = trace.of(x)
    labels = _opened(trace, shadow)
    trace.fix(labels, dims, f"{name} is taken over them")
    taint = small(shadow.taint)
    for d in dims:
        taint = taint.any(d, keepdim=True)
        labels = None if labels is None else small(labels).narrow(d, 0, 1)
    for part in (out,) if isinstance(out, Tensor) else out:
        trace.put(part, Shadow(_fit(labels, dims, part), _fit(taint, dims, part)))


def _schema(name: str, args: tuple) -> list[str]:
    packet = getattr(torch.ops.aten, name)
    best: list[str] = []
    for overload in packet.overloads():
        names = [argument.name for argument in getattr(packet, overload)._schema.arguments]
        if "dim" in names and (not best or names.index("dim") < best.index("dim")):
            best = names
    return best


def _fit(reduced: Tensor | None, dims: list[int], part: Tensor) -> Any:
    if reduced is None:
        return None
    if reduced.dim() != part.dim():
        for d in reversed(dims):
            reduced = reduced.squeeze(d)
    return small(reduced).expand(part.shape)


def along(trace: Trace, name: str, args: tuple, kwargs: dict, out: Any) -> None:
    """Softmax, cumulative sums, sorting: same places, but each value depends on all along a dimension."""
    x = args[0]
    shadow = trace.of(x)
    labels = _opened(trace, shadow)
    dim = kwargs.get("dim", args[1] if len(args) > 1 and isinstance(args[1], int) else -1) % max(x.dim(), 1)
    trace.fix(labels, [dim], f"{name} is taken over them")
    taint = small(shadow.taint).any(dim, keepdim=True) if x.dim() else shadow.taint
    rows = name == "_softmax" or (name == "_safe_softmax" and bool(torch.isfinite(x).all()))
    for part in (out,) if isinstance(out, Tensor) else out:
        moved = None if labels is None else small(labels).expand(part.shape)
        trace.put(part, Shadow(moved, taint.expand(part.shape), simplex=rows and dim == x.dim() - 1))


def normalise(trace: Trace, name: str, args: tuple, kwargs: dict, out: Any) -> None:
    """LayerNorm, GroupNorm: statistics over units, which therefore stay."""
    x = args[0]
    shadow = trace.of(x)
    labels = _opened(trace, shadow)
    if name == "native_group_norm":
        dims, scale = list(range(1, x.dim())), args[1:3]
    else:
        dims, scale = list(range(x.dim() - len(args[1]), x.dim())), args[2:4]
    trace.fix(labels, dims, "normalised over them: " + ("GroupNorm" if "group" in name else "LayerNorm or RMSNorm"))
    taint = small(shadow.taint)
    for d in dims:
        taint = taint.any(d, keepdim=True)
    result = Shadow(labels, taint.expand(x.shape))
    shapes = [1, -1] + [1] * (x.dim() - 2) if name == "native_group_norm" else None
    for tensor in scale:
        if tensor is not None:
            other = trace.of(tensor)
            other = other if shapes is None else other.move(lambda t: t.reshape(shapes))
            result = combine(trace, [result, other], x.shape, result.taint)
    trace.put(out[0] if isinstance(out, tuple | list) else out, result)
    for part in out[1:] if isinstance(out, tuple | list) else ():
        trace.put(part, Shadow(None, flat(True, part.shape)))


def batch_norm(trace: Trace, name: str, args: tuple, kwargs: dict, out: Any) -> None:
    """BatchNorm (and InstanceNorm, which torch computes by it): channel by channel along dimension 1."""
    x = args[0]
    shadow = trace.of(x)
    labels = _opened(trace, shadow)
    trace.fix(labels, [d for d in range(x.dim()) if d != 1], "normalised over positions")
    taint = small(shadow.taint)
    for d in range(x.dim()):
        taint = taint if d == 1 else taint.any(d, keepdim=True)
    result = Shadow(labels, taint.expand(x.shape))
    for tensor in args[1:5]:
        if isinstance(tensor, Tensor) and tensor.numel():
            other = trace.of(tensor).move(lambda t: t.reshape([1, -1] + [1] * (x.dim() - 2)))
            result = combine(trace, [result, other], x.shape, result.taint)
    trace.put(out[0], result)
    for part in out[1:]:
        trace.put(part, Shadow(None, flat(True, part.shape)))


def glu(trace: Trace, name: str, args: tuple, kwargs: dict, out: Tensor) -> None:
    """A half times the sigmoid of the other half: a split and a product."""
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


def shuffle(trace: Trace, name: str, args: tuple, kwargs: dict, out: Tensor) -> None:
    """Channel shuffle: a view as (groups, rest), transposed."""
    x, groups = args[0], args[1]
    shadow = trace.of(x)
    split = (x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])
    moved = shadow.move(lambda t: t.reshape(split))
    note_view(trace, moved.labels, torch.empty(split, device="meta"))
    trace.put(out, moved.move(lambda t: t.transpose(1, 2).reshape(x.shape)))


def lookup(trace: Trace, name: str, args: tuple, kwargs: dict, out: Tensor) -> None:
    """index, index_select, gather: places given by a tensor, so what is indexed keeps its length."""
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
        return trace.put(out, shadow.move(_bound(trace, name, args, kwargs)))
    trace.fix(shadow.labels, dims, f"{name} takes channels by number")
    moved = shadow.move(_bound(trace, name, args, kwargs))
    if any(bool(trace.of(tensor).taint.any()) for tensor in tensors):
        if set(dims) & set(varying(labels_of(shadow))) and shadow.parameter is None and len(varying(shadow.labels)) == 1:
            moved = Shadow(None, moved.taint)
        moved = Shadow(moved.labels, flat(True, out.shape), moved.parameter, moved.places)
    trace.put(out, moved)


MOVES: dict[str, Handler] = {
    **dict.fromkeys(("clone", "_to_copy", "detach", "alias", "contiguous", "lift_fresh", "lift_fresh_copy", "positive"), same),
    **dict.fromkeys(("view", "_unsafe_view", "_reshape_alias", "reshape", "_reshape_copy", "flatten", "unflatten"), reshape),
    **dict.fromkeys(("permute", "transpose", "t", "squeeze", "unsqueeze", "flip", "repeat", "pixel_shuffle"), move),
    **dict.fromkeys(("pixel_unshuffle", "movedim", "swapaxes"), move),
    **dict.fromkeys(("expand",), expand),
    **dict.fromkeys(("zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like"), like),
    **dict.fromkeys(("new_zeros", "new_ones", "new_full", "new_empty"), like),
    **dict.fromkeys(("select", "unbind", "roll", "unfold"), pick),
    **dict.fromkeys(("slice", "split", "split_with_sizes", "chunk", "narrow"), cut),
    **dict.fromkeys(("cat", "stack"), join),
    "constant_pad_nd": pad,
    **dict.fromkeys(
        (
            *(f"{kind}{n}d" for n in (1, 2, 3) for kind in ("avg_pool", "_adaptive_avg_pool", "adaptive_avg_pool")),
            *(f"{kind}{n}d" for n in (1, 2, 3) for kind in ("adaptive_max_pool", "reflection_pad", "replication_pad")),
            *(f"max_pool{n}d_with_indices" for n in (1, 2, 3)),
            *(f"max_pool{n}d" for n in (1, 2, 3)),
            *(f"{kind}{n}d" for n in (1, 2, 3) for kind in ("upsample_nearest", "_upsample_nearest_exact")),
            *("upsample_linear1d", "upsample_bilinear2d", "_upsample_bilinear2d_aa", "upsample_trilinear3d"),
            *("upsample_bicubic2d", "_upsample_bicubic2d_aa"),
        ),
        spatial,
    ),
    **dict.fromkeys(("sum", "mean", "amax", "amin", "max", "min", "var", "std", "var_mean", "std_mean"), reduce),
    **dict.fromkeys(("linalg_vector_norm", "norm", "prod", "any", "all", "argmax", "argmin", "logsumexp", "median"), reduce),
    **dict.fromkeys(("_softmax", "_log_softmax", "_safe_softmax", "cumsum", "cumprod", "sort"), along),
    **dict.fromkeys(("native_layer_norm", "native_group_norm", "_fused_rms_norm"), normalise),
    **dict.fromkeys(
        ("native_batch_norm", "_native_batch_norm_legit_no_training", "cudnn_batch_norm", "_native_batch_norm_legit"),
        batch_norm,
    ),
    "glu": glu,
    **dict.fromkeys(("channel_shuffle", "native_channel_shuffle"), shuffle),
    **dict.fromkeys(("index", "index_select", "gather"), lookup),
}
"""Handlers by operator name."""
