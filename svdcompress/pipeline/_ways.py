"""The ways from a cooled posterior to one size, by the measure of the search."""

from __future__ import annotations

from torch import nn

from svdcompress.pipeline._begin import Dense, Opened
from svdcompress.pipeline._context import Context
from svdcompress.pipeline._measure import Measure
from svdcompress.pipeline._unit_ways import Units
from svdcompress.pipeline._way import Ways
from svdcompress.pipeline._weight_ways import Weights
from svdcompress.relevance import Masks


def ways(
    context: Context,
    opened: Opened,
    dense: Dense,
    model: nn.Module,
    measure: Measure,
    target: float,
    masks: Masks | None = None,
    *,
    by_outputs: bool = False,
) -> Ways:
    """The ways for a measure. target: the size to reach, in that measure. masks: what earlier cuts have left of the model,
    which holds no masks itself; None: all of it. by_outputs: whether the usual way also ranks units by how far the outputs
    move with them, because variances that were trained without pressure tell little."""
    kind = Weights if measure.name == "nonzero" else Units
    return kind(context, opened, dense, model, measure, target, masks, by_outputs)
