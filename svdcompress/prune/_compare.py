"""How far two tensors are apart, and every tolerance by which pruning calls numbers equal, with its reason."""

from __future__ import annotations

import torch
from torch import Tensor

# Of outputs, as a share of their size (see `difference`)

TOLERANCE = 3e-6
"""What rounding does in float32: some 25 units in the last place (1.2e-7), as sums of fewer terms are added in another order.
Deep networks exceed it without a mistake, so what is larger is looked at in double precision."""

MISTAKE = 0.01
"""Beyond it no double precision is asked: float32 does not round that far in a network that works, and the answer costs a
wide copy of both models."""

EXACT = 1e-6
"""In double precision, where order no longer matters (1e-16): what is left is the rounding of a folded constant to the float32
of the bias that holds it. A wrong channel is off by far more."""

ROUGH = 0.02
"""Of a model in half precision against one in single: bfloat16 has 8 bits, 0.4% in each number, and rounds after each layer.
It says only that nothing went wrong in rounding; the choice itself was verified without it."""

TINY = 1e-12
"""Size of outputs that counts as 0, so that nothing is divided by it."""

# Of constants, as a share of the largest value

CONSTANT = 1e-6
"""Within a batch, or over positions: kernels may compute the same number in another order for the last rows of a batch, which
differs in the last places of float32."""

PROPORTIONAL = 1e-7
"""One constant as a multiple of another (a carrier past zero padding): the difference goes into the weights, so it may be no
more than float32 rounds away (6e-8)."""

LARGEST_RATIO = 1e4
"""Beyond it a carrier is too small beside what it is to carry: its own rounding, times this, would be seen."""


def difference(found: list[Tensor], expected: list[Tensor]) -> tuple[float, float]:
    """Largest difference of outputs: absolute, and as a share of the size of the tensor that it is in (see `_scale`).

    Infinite where shapes differ, or where one is finite and the other isn't.
    """
    if [t.shape for t in found] != [t.shape for t in expected]:
        return float("inf"), float("inf")
    absolute = relative = 0.0
    for a, b in zip(found, expected, strict=True):
        if not a.is_floating_point() and not a.is_complex():
            if not torch.equal(a, b):
                return float("inf"), float("inf")
            continue
        if a.numel() == 0:
            continue
        if not torch.equal(torch.isfinite(a), torch.isfinite(b)):
            return float("inf"), float("inf")
        gap = torch.nan_to_num((a - b).abs(), nan=0.0, posinf=0.0)
        size = torch.nan_to_num(b.abs(), nan=0.0, posinf=0.0)
        absolute = max(absolute, float(gap.max()))
        relative = max(relative, float((gap / size.clamp_min(_scale(size))).max()))
    return absolute, relative


def _scale(size: Tensor) -> float:
    """Size of a tensor's values: the largest, or 20 times the lower quartile of those that are not 0 (some 6 standard
    deviations), whichever is less.

    Neither a floor of 1 (outputs may be small) nor the maximum will do: where code fills what is masked with -1e9, a
    share of that hides any mistake in the rest. Larger values are compared with themselves.
    """
    values = size[size > 0].double()
    if not values.numel():
        return TINY
    values = values[:: values.numel() // 1_000_000 + 1]
    quartile = values.kthvalue((values.numel() + 3) // 4).values
    return max(min(20 * float(quartile), float(values.max())), TINY)
