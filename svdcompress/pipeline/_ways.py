"""The kind of ways that leads to a size, by the measure of the search."""

from __future__ import annotations

from svdcompress.pipeline._measure import Measure
from svdcompress.pipeline._unit_ways import Units
from svdcompress.pipeline._way import Ways
from svdcompress.pipeline._weight_ways import Weights


def ways_for(measure: Measure) -> type[Ways]:
    """The class of the ways to a size in a measure."""
    return Weights if measure.name == "nonzero" else Units
