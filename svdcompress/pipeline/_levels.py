"""The lengths of a search's path and of a trial's cooling, as shares of `train.epochs`, and the number of levels."""

from __future__ import annotations

from svdcompress.recipe import TrainSection

LEVEL_EPOCHS, COOLING_EPOCHS = 0.15, 0.3
"""Shares of `train.epochs`: for each level of the path, at the full learning rate, and for the cooling of a trial, at the end
of which the rate falls to 0."""

BELOW = 2
"""The number of levels of the path below the recipe's beta."""

LEVELS = 6
"""The number of levels if pressure alone leads to a size, unless `search.levels` is set."""

PRESSED = BELOW + 1
"""The number of levels if units are cut in steps: the last level has the recipe's own beta."""


def epochs_of(train: TrainSection, share: float) -> int:
    """The number of epochs in a share of `train.epochs`, at least one."""
    return max(1, round(share * train.epochs))
