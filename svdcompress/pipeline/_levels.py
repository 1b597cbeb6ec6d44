"""How long the path of a search and the cooling of a trial are, of `train.epochs`, and how many levels there are."""

from __future__ import annotations

from svdcompress.recipe import TrainSection

LEVEL_EPOCHS, COOLING_EPOCHS = 0.15, 0.3
"""Shares of `train.epochs`: of each level of the path, at the full learning rate, and of a trial, at the end of which it falls
to 0."""

BELOW = 2
"""Levels of the path below the beta of the recipe."""

LEVELS = 6
"""Levels where pressure alone leads to a size, unless `search.levels` is set."""

PRESSED = BELOW + 1
"""Levels where units are cut in steps: the last one has the recipe's own beta."""


def epochs_of(train: TrainSection, share: float) -> int:
    """Of a share of `train.epochs`; one at least."""
    return max(1, round(share * train.epochs))
