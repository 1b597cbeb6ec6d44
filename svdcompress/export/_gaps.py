"""The places of a sparse tensor's numbers, as steps from each to the next: one or two bytes per number instead of eight."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

KINDS = (np.uint8, np.uint16, np.uint32)
"""Types of a step, the smallest first. A step too large for its type is split into several, with zeros stored in between."""


@dataclass(frozen=True)
class Gaps:
    """Places in a flat tensor.

    steps (count,): the first place, then the distance of each place from the one before. places (count,): the cumulative
    sums of the steps, int64: the requested places and, where a step would be too large, some in between, with numbers of 0.
    """

    steps: np.ndarray
    places: np.ndarray


def gaps(places: np.ndarray, number_bytes: float) -> Gaps:
    """The steps that take the fewest bytes. places: ascending, each once. number_bytes: cost of each beyond its step."""
    forms = (_form(places, kind) for kind in KINDS)
    return min(forms, key=lambda form: len(form.steps) * (form.steps.itemsize + number_bytes))


def _form(places: np.ndarray, kind: type[np.unsignedinteger]) -> Gaps:
    places, largest = places.astype(np.int64), int(np.iinfo(kind).max)
    steps = np.diff(places, prepend=0)
    more = np.maximum(steps - 1, 0) // largest  # steps of the largest size before each
    if more.any():
        ends = np.cumsum(more + 1) - 1
        split = np.full(int(ends[-1]) + 1, largest, np.int64)
        split[ends] = steps - more * largest
        steps = split
    return Gaps(steps.astype(kind), np.cumsum(steps))
