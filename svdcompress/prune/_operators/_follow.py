"""Follows an operator with the handler registered for it; an operator without one pins the units that enter it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from svdcompress.prune._operations import operation
from svdcompress.prune._operators._registry import Operator, Unfollowed, known, note_bug
from svdcompress.prune._shadow import Shadow, flat, varying
from svdcompress.prune._tensors import mark, marked, tensors_in
from svdcompress.prune._trace import Trace


def follow(trace: Trace, func: Any, args: tuple, kwargs: dict, out: Any) -> None:
    """Give the outputs of an operator their shadows."""
    operands = tensors_in((args, kwargs))
    results = tensors_in(out)
    if not results:
        return
    name = base_name(func)
    mutable = func._schema.is_mutable
    before = trace.of(args[0]) if mutable and args and isinstance(args[0], Tensor) else None
    entry = known(func, name)
    if entry is None or not operands or (mutable and (before is None or kwargs.get("out") is not None)):
        unknown(trace, func, operands, results)
    else:
        try:
            entry.handler(trace, name, args, kwargs, out)
        except Unfollowed:
            unknown(trace, func, operands, results)
        except Exception as error:  # a bug must not cost anybody their run, and must not look like a refusal
            note_bug(trace, name, entry.handler, error)
            unknown(trace, func, operands, results)
    if (macs := operation(func, args, kwargs, out)) is not None:
        trace.operations.append(macs)
        if entry is not None and entry.factors:
            attribute_macs(trace, entry, args)
    for result in results:
        if any(result is operand for operand in operands) or func.is_view:
            mark(trace.viewed, result)
    if before is not None and results[0] is args[0]:
        after = trace.of(results[0])
        changed = before.taint.shape != after.taint.shape or bool((after.taint & ~before.taint).any())
        if (changed or after.parameter is not before.parameter) and _shared(trace, results[0]):
            mark(trace.dirty, results[0])


def _shared(trace: Trace, tensor: Tensor) -> bool:
    return tensor._is_view() or marked(trace.viewed, tensor)


def base_name(func: Any) -> str:
    """An operator's name without namespace, overload and the trailing `_` of in-place operators."""
    name = func._schema.name.split("::")[-1]
    return name[:-1] if func._schema.is_mutable and name.endswith("_") and not name.endswith("__") else name


def attribute_macs(trace: Trace, entry: Operator, args: tuple) -> None:
    """Attribute the last of the operations to the weight that it applies, or to the units that it multiplies."""
    shadows = [trace.of(args[i]) for i in entry.factors if i < len(args)]
    weights = [shadow.parameter for shadow in shadows if shadow.parameter is not None]
    number = len(trace.operations) - 1
    if len(weights) == 1:
        trace.applied.setdefault(id(weights[0].tensor), []).append(number)
    elif not weights and len(shadows) == 2 and (labels := _multiplied(*(shadow.labels for shadow in shadows))) is not None:
        trace.products.append((labels, number))


def _multiplied(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """The units that share a product of activations equally, (B, M, K) x (B, K, N): heads, or the channels of the result."""
    for labels in (first, second):
        if labels is not None and labels.dim() == 3 and 0 in varying(labels):
            return labels[:, 0, 0]
    if second is not None and second.dim() == 3 and varying(second) == [2] and not varying(first):
        return second[0, 0]
    return None


def unknown(trace: Trace, func: Any, operands: list[Tensor], results: list[Tensor]) -> None:
    """Pin the operands; results belong to no unit, and depend on the input if an operand does or if the operator is random."""
    taint = torch.Tag.nondeterministic_seeded in func.tags
    for operand in operands:
        shadow = trace.of(operand)
        trace.pin(operand, f"enters {base_name(func)}, through which units cannot be followed")
        taint = taint or bool(shadow.taint.any())
    for result in results:
        trace.put(result, Shadow(None, flat(taint, result.shape)))
