"""Differences between outputs, and every tolerance within which pruning treats numbers as equal, with its reason."""

from __future__ import annotations

import torch
from torch import Tensor

# Tolerances for outputs, as a share of their size (see `difference`)

TOLERANCE = 3e-6
"""Rounding in float32: about 25 units in the last place (1.2e-7), as sums of fewer terms are added in another order. Deep
networks exceed it without a mistake, so larger differences are checked again in double precision."""

MISTAKE = 0.01
"""Larger differences are mistakes, without a check in double precision: rounding in float32 does not go that far in a working
network, and the check needs double-precision copies of both models."""

EXACT = 1e-6
"""In double precision, where the order of a sum no longer matters (1e-16): what remains is the rounding of a folded constant
to the float32 of the bias that holds it. A wrong channel is off by far more."""

ROUGH = 0.02
"""For a model in half precision compared with one in single: bfloat16 has 8 bits, 0.4% of each number, and rounds after each
layer. It shows only that nothing went wrong in rounding; the choice itself was verified in single precision."""

TINY = 1e-12
"""Smallest size of outputs that differences are divided by."""

# Tolerances for constants, as a share of the largest value

CONSTANT = 1e-6
"""Within a batch, or over positions: kernels may add in another order for the last rows of a batch, so that the same number
differs in the last places of float32."""

PROPORTIONAL = 1e-7
"""For one constant as a multiple of another (a carrier past zero padding): the difference goes into the weights, so it may not
exceed the rounding of float32 (6e-8)."""

LARGEST_RATIO = 1e4
"""Largest ratio of a constant to its carrier: beyond it the carrier's own rounding, times the ratio, would show."""


def difference(found: list[Tensor], expected: list[Tensor]) -> tuple[float, float]:
    """Largest difference of outputs: absolute, and relative to the expected value or the scale of its tensor (see `_scale`),
    whichever is larger.

    Infinite if shapes or values that are not floating point differ, or if a value is finite in one and not in the other.
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
    """Scale of a tensor's values: the largest, or 20 times the lower quartile of those that are not 0 (about 6 standard
    deviations), whichever is less.

    Neither a floor of 1 (outputs may be small) nor the maximum would do: if code fills masked positions with -1e9, a share of
    that hides any mistake in the rest. Larger values are compared relative to themselves.
    """
    values = size[size > 0].double()
    if not values.numel():
        return TINY
    values = values[:: values.numel() // 1_000_000 + 1]
    quartile = values.kthvalue((values.numel() + 3) // 4).values
    return max(min(20 * float(quartile), float(values.max())), TINY)
