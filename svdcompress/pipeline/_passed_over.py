"""Settings of a recipe that its run passes over: said once, as somebody set them for something."""

from __future__ import annotations

from functools import reduce
from typing import Any

from svdcompress.pipeline._search_cost import objective_of
from svdcompress.recipe import MEASURES, Recipe

OF_ONE_TRAINING = (
    *("train.schedule", "train.keep", "train.shrink", "train.beta.name", "train.beta.start", "train.beta.stop"),
    *("train.beta.step", "relevance.candidates", "relevance.tolerance"),
)
"""Fields of a run without a search: a search has a path and trials, with schedules and a choice of their own."""

OF_A_SEARCH = (
    *("objective", "trials", "max_minutes", "levels", "cuts"),
    *("latency_command", "latency_batch", "mixture", "reconstruct"),
)


def passed_over(recipe: Recipe) -> list[str]:
    """Notes on fields that are set to other than their defaults and have no part in the run."""
    if recipe.experiment is not None:
        return []
    if not recipe.search.wanted:
        named = _set(recipe, [f"search.{name}" for name in OF_A_SEARCH])
        ask = "without search.max_drop, search.max_error or search.goal nothing is searched for"
        return [f"{ask}: {', '.join(named)} {'do' if named[1:] else 'does'} nothing"] if named else []
    lines = []
    if named := _set(recipe, OF_ONE_TRAINING):
        lines.append(f"a search trains and chooses in its own way (docs/search.md), and passes over {', '.join(named)}")
    measure = objective_of(recipe)
    if recipe.search.latency_command is not None and measure != "latency":
        lines.append(f"search.latency_command is not asked, as what is searched for are {MEASURES[measure]}")
    return lines


def _set(recipe: Recipe, names: Any) -> list[str]:
    plain = Recipe()
    return [name for name in names if _value(recipe, name) != _value(plain, name)]


def _value(recipe: Recipe, name: str) -> Any:
    return reduce(getattr, name.split("."), recipe)
