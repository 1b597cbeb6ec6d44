"""What a search makes small, what it costs in epochs of training, beside one run without a search, and how many levels and
trials that leaves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from svdcompress.pipeline._levels import COOLING_EPOCHS, LEVEL_EPOCHS, LEVELS, PRESSED, epochs_of
from svdcompress.recipe import Recipe, parse_goal

TIMES = 3.0
"""So many times the epochs of one run may the path and all trials take together, where `search.trials` is not set."""

MOST = 8
"""Trials where `search.trials` is not set, however few epochs they take."""

LONGEST = 2.0
"""So many times `recover.epochs` may the best trial recover on, at most."""


def objective_of(recipe: Recipe) -> str:
    """What a search makes small: what is set, else what the goal measures, else what the shares of the layers ask for."""
    if recipe.search.goal is not None:
        return parse_goal(recipe.search.goal).measure
    if recipe.search.objective != "auto":
        return recipe.search.objective
    return "macs" if asks_units(recipe) else "nonzero"


def asks_units(recipe: Recipe) -> bool:
    """Whether any layer asks its units as a whole whether they are needed."""
    shares = [recipe.convert.share, *(rule.share for rule in recipe.convert.layers if rule.share is not None)]
    return any(not {"input", "output"}.isdisjoint([share] if isinstance(share, str) else share) for share in shares)


def one_run(recipe: Recipe) -> int:
    """Epochs of training and recovery of a run that does not search."""
    return recipe.train.epochs + recipe.recover.epochs


def cuts_of(recipe: Recipe, measure: str) -> int:
    """In how many steps a trial comes to its size. Single weights do as well when all go at once: pressure would have got to
    much the same ones, and what goes early never gets another chance."""
    return 1 if measure == "nonzero" else recipe.search.cuts


def reconstructs(recipe: Recipe, measure: str) -> bool:
    """Whether trials without pressure are cut at once, reconstructed: for sizes that follow the shapes, where whole units go in
    steps otherwise."""
    return recipe.search.reconstruct == "auto" and measure not in ("nonzero", "bytes") and cuts_of(recipe, measure) > 1


def no_path(recipe: Recipe, measure: str) -> bool:
    """Whether there is no training before the cuts at all: neither levels nor cooling."""
    return not recipe.train.epochs and reconstructs(recipe, measure)


def levels_of(recipe: Recipe, measure: str) -> int:
    """Levels of the path: those that are set, else `LEVELS`, or as many as lead to what cuts in steps begin from."""
    if recipe.search.levels is not None:
        return recipe.search.levels
    return LEVELS if cuts_of(recipe, measure) == 1 else PRESSED


def trials_of(recipe: Recipe, measure: str) -> int:
    """How many trials a search may make: those that are set, else what `TIMES` leaves beside the path, one at least.

    Of a goal alone the best trial is to recover once more (`left_for`), where that leaves a trial to make.
    """
    settings, once = recipe.search, recipe.recover.epochs
    if settings.trials is not None:
        return settings.trials
    trial = epochs_of(recipe.train, COOLING_EPOCHS) + once
    left = TIMES * one_run(recipe) - levels_of(recipe, measure) * epochs_of(recipe.train, LEVEL_EPOCHS)
    if no_path(recipe, measure):
        trial, left = once, TIMES * once
    if not trial:
        return MOST
    if settings.max_drop is None and settings.max_error is None:
        left -= once
    return min(max(int(left / trial), 1), MOST)


def left_for(recipe: Recipe, spent: int) -> int:
    """Epochs that the best trial recovers on: what `TIMES` leaves of the epochs that were not spent, where `search.trials` is
    not set."""
    if recipe.search.trials is not None:
        return 0
    return max(0, int(min(TIMES * one_run(recipe) - spent, LONGEST * recipe.recover.epochs)))


def recovery_of(recipe: Recipe, *, at_once: bool) -> int:
    """Epochs that the small model of a trial recovers for: with those of the cooling that one which is cut at once has not."""
    spared = epochs_of(recipe.train, COOLING_EPOCHS) if at_once and recipe.train.epochs else 0
    return recipe.recover.epochs + spared


def trained(path: int, trials: Iterable[list[dict[str, Any]]], *, shared: bool) -> int:
    """Epochs that a search trained. path: those of its levels; trials: the rows of each. shared: whether trials of one pressure
    have one posterior, which was cooled once."""
    rows = [(row["stage"], row["epoch"]) for trial in trials for row in trial]
    return path + (len(set(rows)) if shared else len(rows))
