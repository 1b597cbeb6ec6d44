"""What a search costs in epochs of training, beside one run without a search, and how many trials that leaves."""

from __future__ import annotations

from svdcompress.pipeline._path import COOLING_EPOCHS, LEVEL_EPOCHS, epochs_of
from svdcompress.recipe import Recipe

TIMES = 3.0
"""So many times the epochs of one run may the path and all trials take together, where `search.trials` is not set."""

MOST = 8
"""Trials where `search.trials` is not set, however few epochs they take."""


def one_run(recipe: Recipe) -> int:
    """Epochs of training and recovery of a run that does not search."""
    return recipe.train.epochs + recipe.recover.epochs


def trials_of(recipe: Recipe, levels: int) -> int:
    """How many trials a search may make: those that are set, else what `TIMES` leaves beside a path of so many levels."""
    if recipe.search.trials is not None:
        return recipe.search.trials
    trial = epochs_of(recipe.train, COOLING_EPOCHS) + recipe.recover.epochs
    left = TIMES * one_run(recipe) - levels * epochs_of(recipe.train, LEVEL_EPOCHS)
    return min(max(int(left / trial), 1), MOST)
