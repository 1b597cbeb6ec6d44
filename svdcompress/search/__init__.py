"""The smallest model within a budget of error, and the best one of a size: what decides, apart from what trains."""

from svdcompress.search._budget import Budget, Losses, Verdict
from svdcompress.search._plan import better_pressure, next_pressure, pressure_of_size, smallest, start_pressure
from svdcompress.search._trial import Trial, front

__all__ = [
    "Budget",
    "Losses",
    "Trial",
    "Verdict",
    "better_pressure",
    "front",
    "next_pressure",
    "pressure_of_size",
    "smallest",
    "start_pressure",
]
