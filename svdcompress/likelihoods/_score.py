"""How models, epochs and thresholds are compared: one order over the metrics of every task."""

from __future__ import annotations

import math
from collections.abc import Mapping


def score(metrics: Mapping[str, float]) -> tuple[float, float]:
    """The key that epochs and thresholds are chosen by, smaller is better: error (or RMSE), then NLL."""
    return metrics.get("error", metrics.get("rmse", math.inf)), metrics["nll"]
