"""The objective of a search, its cost in epochs of training compared with a run without a search, and how many levels and
trials that allows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from svdcompress.pipeline._levels import COOLING_EPOCHS, LEVEL_EPOCHS, LEVELS, PRESSED, epochs_of
from svdcompress.recipe import Recipe, parse_goal

TIMES = 3.0
"""How many times the epochs of one run the path and all trials together may take, unless `search.trials` is set."""

MOST = 8
"""The most trials, however few epochs they take, unless `search.trials` is set."""

LONGEST = 2.0
"""The most epochs for which the best trial recovers further, as a multiple of `recover.epochs`."""


def objective_of(recipe: Recipe) -> str:
    """The measure that a search makes small: that of the goal, else the one that is set, else by the shares of the layers."""
    if recipe.search.goal is not None:
        return parse_goal(recipe.search.goal).measure
    if recipe.search.objective != "auto":
        return recipe.search.objective
    return "macs" if asks_units(recipe) else "nonzero"


def asks_units(recipe: Recipe) -> bool:
    """Whether any layer judges the relevance of whole units."""
    shares = [recipe.convert.share, *(rule.share for rule in recipe.convert.layers if rule.share is not None)]
    return any(not {"input", "output"}.isdisjoint([share] if isinstance(share, str) else share) for share in shares)


def one_run(recipe: Recipe) -> int:
    """Epochs of training and recovery of a run without a search."""
    return recipe.train.epochs + recipe.recover.epochs


def cuts_of(recipe: Recipe, measure: str) -> int:
    """The number of steps in which a trial is cut to its size. Single weights do as well when all go at once: pressure would
    have removed much the same ones, and a weight that goes early gets no second chance."""
    return 1 if measure == "nonzero" else recipe.search.cuts


def reconstructs(recipe: Recipe, measure: str) -> bool:
    """Whether trials without pressure are cut at once and reconstructed: for sizes that follow the shapes, where units would
    otherwise go in steps."""
    return recipe.search.reconstruct == "auto" and measure not in ("nonzero", "bytes") and cuts_of(recipe, measure) > 1


def no_path(recipe: Recipe, measure: str) -> bool:
    """Whether there is no training at all before the cuts: neither levels nor cooling."""
    return not recipe.train.epochs and reconstructs(recipe, measure)


def levels_of(recipe: Recipe, measure: str) -> int:
    """The number of levels in the path: the one that is set, else `LEVELS`, or `PRESSED` if units are cut in steps."""
    if recipe.search.levels is not None:
        return recipe.search.levels
    return LEVELS if cuts_of(recipe, measure) == 1 else PRESSED


def trials_of(recipe: Recipe, measure: str) -> int:
    """How many trials a search may make: the number that is set, else what `TIMES` leaves after the path, at least one.

    With a goal alone, epochs are reserved for the best trial to recover further (`left_for`), if that leaves any trial at all.
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
    """Epochs for which the best trial recovers further: those that `TIMES` allows and were not spent; 0 with
    `search.trials`."""
    if recipe.search.trials is not None:
        return 0
    return max(0, int(min(TIMES * one_run(recipe) - spent, LONGEST * recipe.recover.epochs)))


def recovery_of(recipe: Recipe, *, at_once: bool) -> int:
    """Epochs of recovery for a trial's small model; a trial that is cut at once also gets those of the cooling it skips."""
    spared = epochs_of(recipe.train, COOLING_EPOCHS) if at_once and recipe.train.epochs else 0
    return recipe.recover.epochs + spared


def trained(path: int, trials: Iterable[list[dict[str, Any]]], *, shared: bool) -> int:
    """Epochs that a search has trained. path: those of its levels; trials: the rows of each trial. shared: whether trials
    with equal pressure share a posterior, which was cooled once."""
    rows = [(row["stage"], row["epoch"]) for trial in trials for row in trial]
    cooled = [row for row in rows if row[0].startswith("pressure")]
    return path + len(rows) - (len(cooled) - len(set(cooled)) if shared else 0)
