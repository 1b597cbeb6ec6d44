"""Operators that act element by element: the units that meet in an element are tied."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from svdcompress.prune._operators._common import combine, mixed_taint, other_units
from svdcompress.prune._operators._registry import operator
from svdcompress.prune._shadow import small
from svdcompress.prune._tensors import tensors_in
from svdcompress.prune._trace import Trace

UNTAGGED = {
    *(
        "hardswish",
        "_prelu_kernel",
        "hardsigmoid",
        "hardtanh",
        "leaky_relu",
        "elu",
        "celu",
        "selu",
        "mish",
        "softplus",
        "relu6",
    ),
    *("log_sigmoid_forward", "threshold", "softshrink", "hardshrink", "rrelu", "nan_to_num", "clamp", "where", "copy", "lerp"),
    *("addcmul", "addcdiv", "masked_fill", "bernoulli_p"),
}
"""Operators that torch does not tag as pointwise in all its versions."""

SUMS = {"add": 1, "sub": 1, "lerp": 1, "addcmul": 2, "addcdiv": 2}
"""Operators that add something to their first operand, and how many operands make it up."""


@operator(*UNTAGGED, tag=torch.Tag.pointwise)
def pointwise(trace: Trace, name: str, args: tuple, kwargs: dict, out: Any) -> None:
    """Follow an elementwise operator with any number of operands."""
    operands = tensors_in((args, kwargs))
    shape = tensors_in(out)[0].shape
    pairs = [(tensor, trace.of(tensor)) for tensor in operands]
    # a copy overwrites what was there before
    taint = pairs[1][1].taint.expand(shape) if name == "copy" else mixed_taint(name, pairs, args, shape)
    adds = name in SUMS and _adds(trace, args[: 1 + SUMS[name]])
    shadow = combine(trace, [shadow for _, shadow in pairs], shape, taint)
    if adds and shadow.labels is not None:
        trace.sums.append(small(shadow.labels))
    for result in tensors_in(out):
        trace.put(result, shadow)


def _adds(trace: Trace, operands: tuple) -> bool:
    """Whether the first operand and the others, together, have units of their own."""
    first, *others = (trace.of(operand).labels if isinstance(operand, Tensor) else None for operand in operands)
    rest = [small(labels).reshape(-1) for labels in others if labels is not None]
    return bool(rest) and other_units(trace, [first, torch.cat(rest)])
