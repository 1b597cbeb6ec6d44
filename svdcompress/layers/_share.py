"""Which weights share a prior variance: names of prior groups, and the dimensions of a weight that they span.

Every weight is seen as a view of shape (groups, outputs per group, inputs per group, kernel positions); a prior group then
spans a set of dimensions of that view, whatever the layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from svdcompress.errors import ModelError

REDUCED: dict[str, tuple[int, ...]] = {"weight": (), "input": (1, 3), "output": (2, 3), "layer": (0, 1, 2, 3)}
"""Dimensions of the canonical view that one group of each name spans."""

Share = str | Sequence[str] | Mapping[str, float]
Threshold = float | Mapping[str, float]


def parse_share(share: Share) -> dict[str, float]:
    """A share in any of its forms as {name: part}, the parts adding up to 1.

    "input" is {"input": 1}; ["weight", "input"] weighs its members equally; a mapping gives the parts itself.
    Raises ModelError for an unknown name, an empty list, or parts that are not positive.
    """
    if isinstance(share, str):
        parts = {share: 1.0}
    elif isinstance(share, Mapping):
        parts = {str(name): float(part) for name, part in share.items()}
    else:
        parts = dict.fromkeys(share, 1.0)
    unknown = sorted(set(parts) - set(REDUCED))
    if unknown:
        raise ModelError(f"share: unknown name {unknown[0]!r}; use one or several of {', '.join(REDUCED)}")
    if not parts or any(part <= 0 for part in parts.values()):
        raise ModelError("share: name at least one of " + ", ".join(REDUCED) + ", with positive parts")
    total = sum(parts.values())
    return {name: part / total for name, part in parts.items()}


def parse_threshold(threshold: Threshold, default: Threshold = 3.0) -> dict[str, float]:
    """A limit on log alpha for each share: one number for all, or a mapping (the names it lacks get those of `default`).

    Raises ModelError for an unknown name, or a limit that is not a number.
    """
    if isinstance(threshold, Mapping):
        unknown = sorted(set(threshold) - set(REDUCED))
        if unknown:
            raise ModelError(f"threshold: unknown name {unknown[0]!r}; use some of {', '.join(REDUCED)}")
        others = default if isinstance(default, Mapping) else dict.fromkeys(REDUCED, default)
        limits = {name: float(threshold[name] if name in threshold else others[name]) for name in REDUCED}
    else:
        limits = dict.fromkeys(REDUCED, float(threshold))
    if any(math.isnan(limit) for limit in limits.values()):
        raise ModelError("threshold: nan is not a valid limit on log alpha")
    return limits


def canonical(weight: Tensor, groups: int, transposed: bool) -> Tensor:
    """View of a weight as (groups, outputs per group, inputs per group, kernel positions).

    weight: Linear (out, in); convolution (out, in / groups, *kernel); transposed (in, out / groups, *kernel).
    """
    first, second = weight.shape[:2]
    view = weight.reshape(groups, first // groups, second, -1)
    return view.transpose(1, 2) if transposed else view


def as_weight(view: Tensor, shape: Sequence[int], groups: int, transposed: bool, outputs: int | None = None) -> Tensor:
    """The inverse of `canonical`: a view (groups, outputs, inputs, positions) in a weight's shape.

    view: dimensions of size 1 are broadcast. shape: the weight's. outputs: outputs per group, if not the weight's.
    """
    first, second = shape[:2]
    inputs = first // groups if transposed else second
    if outputs is None:
        outputs = second if transposed else first // groups
    view = view.expand(groups, outputs, inputs, math.prod(shape[2:]))
    sizes = (groups * inputs, outputs) if transposed else (groups * outputs, inputs)
    return (view.transpose(1, 2) if transposed else view).reshape(*sizes, *shape[2:])
