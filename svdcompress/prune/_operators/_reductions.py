"""Operators that pool, reduce or normalize: dimensions that they mix keep their length."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from svdcompress.prune._operators._common import along_others, combine, opened
from svdcompress.prune._operators._registry import operator
from svdcompress.prune._shadow import Shadow, flat, small
from svdcompress.prune._trace import Trace

SUMS = ("sum", "mean", "cumsum")
"""Operators that add up along dimensions."""


@operator(
    *(f"{kind}{n}d" for n in (1, 2, 3) for kind in ("avg_pool", "_adaptive_avg_pool", "adaptive_avg_pool", "max_pool")),
    *(f"{kind}{n}d" for n in (1, 2, 3) for kind in ("adaptive_max_pool", "reflection_pad", "replication_pad")),
    *(f"max_pool{n}d_with_indices" for n in (1, 2, 3)),
    *(f"{kind}{n}d" for n in (1, 2, 3) for kind in ("upsample_nearest", "_upsample_nearest_exact")),
    *("upsample_linear1d", "upsample_bilinear2d", "_upsample_bilinear2d_aa", "upsample_trilinear3d"),
    *("upsample_bicubic2d", "_upsample_bicubic2d_aa"),
)
def spatial(trace: Trace, name: str, args: tuple, kwargs: dict, out: Any) -> None:
    """Pooling, upsampling, padding by reflection: mixing along the last dimensions only."""
    x = args[0]
    result = out if isinstance(out, Tensor) else out[0]
    found = re.search(r"(\d)d", name)
    dims = list(range(x.dim() - int(found.group(1)), x.dim())) if found else list(range(2, x.dim()))
    shadow = trace.of(x)
    labels = opened(trace, shadow)
    trace.fix(labels, dims, f"{name} mixes these units")
    taint = small(shadow.taint)
    for d in dims:
        taint = taint.any(d, keepdim=True)
        labels = None if labels is None else small(labels).narrow(d, 0, 1)
    follow_up = Shadow(None if labels is None else small(labels).expand(result.shape), taint.expand(result.shape))
    for part in (out,) if isinstance(out, Tensor) else out:
        trace.put(part, follow_up if part.shape == result.shape else Shadow(None, flat(True, part.shape)))


@operator(
    *("sum", "mean", "amax", "amin", "max", "min", "var", "std", "var_mean", "std_mean"),
    *("linalg_vector_norm", "norm", "prod", "any", "all", "argmax", "argmin", "logsumexp", "median"),
)
def reduce(trace: Trace, name: str, args: tuple, kwargs: dict, out: Any) -> None:
    """Sums, means, extremes and norms over dimensions, whose units are therefore fixed."""
    x = args[0]
    position = next((i for i, a in enumerate(_schema(name, args)) if a in ("dim", "dims")), None)
    dims = kwargs.get("dim", args[position] if position is not None and position < len(args) else None)
    dims = list(range(x.dim())) if dims is None or dims == [] else dims if isinstance(dims, list | tuple) else [dims]
    dims = sorted({d % max(x.dim(), 1) for d in dims})
    shadow = trace.of(x)
    labels = opened(trace, shadow)
    adds = name in SUMS and along_others(trace, labels, dims)
    trace.fix(labels, dims, f"{name} is computed over these units")
    taint = small(shadow.taint)
    for d in dims:
        taint = taint.any(d, keepdim=True)
        labels = None if labels is None else small(labels).narrow(d, 0, 1)
    if adds and labels is not None:
        trace.sums.append(labels)
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


@operator("_softmax", "_log_softmax", "_safe_softmax", "cumsum", "cumprod", "sort")
def along(trace: Trace, name: str, args: tuple, kwargs: dict, out: Any) -> None:
    """Softmax, cumulative sums, sorting: units keep their positions, but each value depends on all along a dimension."""
    x = args[0]
    shadow = trace.of(x)
    labels = opened(trace, shadow)
    dim = kwargs.get("dim", args[1] if len(args) > 1 and isinstance(args[1], int) else -1) % max(x.dim(), 1)
    if name in SUMS and labels is not None and along_others(trace, labels, [dim]):
        trace.sums.append(small(labels))
    trace.fix(labels, [dim], f"{name} is computed over these units")
    taint = small(shadow.taint).any(dim, keepdim=True) if x.dim() else shadow.taint
    rows = name == "_softmax" or (name == "_safe_softmax" and bool(torch.isfinite(x).all()))
    for part in (out,) if isinstance(out, Tensor) else out:
        moved = None if labels is None else small(labels).expand(part.shape)
        trace.put(part, Shadow(moved, taint.expand(part.shape), simplex=rows and dim == x.dim() - 1))


@operator("native_layer_norm", "native_group_norm", "_fused_rms_norm")
def normalise(trace: Trace, name: str, args: tuple, kwargs: dict, out: Any) -> None:
    """LayerNorm, GroupNorm: statistics over units, which are therefore kept."""
    x = args[0]
    shadow = trace.of(x)
    labels = opened(trace, shadow)
    if name == "native_group_norm":
        dims, scale = list(range(1, x.dim())), args[1:3]
    else:
        dims, scale = list(range(x.dim() - len(args[1]), x.dim())), args[2:4]
    trace.fix(labels, dims, "normalized over these units: " + ("GroupNorm" if "group" in name else "LayerNorm or RMSNorm"))
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


@operator("native_batch_norm", "_native_batch_norm_legit_no_training", "cudnn_batch_norm", "_native_batch_norm_legit")
def batch_norm(trace: Trace, name: str, args: tuple, kwargs: dict, out: Any) -> None:
    """BatchNorm (and InstanceNorm, which torch computes with it): channel by channel along dimension 1."""
    x = args[0]
    shadow = trace.of(x)
    labels = opened(trace, shadow)
    trace.fix(labels, [d for d in range(x.dim()) if d != 1], "normalized over positions")
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
