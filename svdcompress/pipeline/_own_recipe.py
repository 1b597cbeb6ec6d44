"""The recipe that a stopped run was made with, and whether `recipe.yaml` in its folder is still whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from svdcompress.errors import OutputError, RecipeError, shortened
from svdcompress.pipeline._folder import STATE, RunState, stored_recipe
from svdcompress.recipe import HEADING, Recipe, as_written, from_earlier, parse_recipe, parse_yaml


def recipe_used(folder: Path) -> Recipe:
    """The recipe with which a run was begun or last resumed; that of `recipe.yaml` if an earlier version did so.

    Raises OutputError if it cannot be read.
    """
    text = RunState(folder, writer=False).facts.get("recipe")
    if text is None:
        return stored_recipe(folder)
    try:
        content = parse_yaml(text)
        return parse_recipe(content if text.startswith(HEADING) else from_earlier(content))
    except (yaml.YAMLError, RecipeError) as error:
        file = folder / STATE / "run.json"
        raise OutputError(
            f"{file}: recipe: damaged ({shortened(str(error))}); remove {file.parent} and resume to run all stages again"
        ) from error


def check_own_recipe(folder: Path) -> None:
    """Check `recipe.yaml` of a stopped run that is to be resumed with it alone.

    Raises RecipeError if it cannot be read, or lacks fields that the run has written: they would silently become defaults.
    """
    if not (folder / STATE).is_dir() and (folder / "report.json").is_file():  # finished, which `prepare` says
        return
    file = folder / "recipe.yaml"
    cure = (
        f"restore it, or give the run's recipe again (svdc sparsify RECIPE --resume --out {folder}), or start again with "
        "--overwrite"
    )
    try:
        stored_recipe(folder)
    except RecipeError as error:
        raise RecipeError(f"{error}; {cure}") from error
    now = parse_yaml(file.read_text(encoding="utf-8"))
    if not now:
        raise RecipeError(f"{file}: empty; {cure}")
    if RunState(folder, writer=False).facts.get("recipe") is None:  # an earlier version may have written fewer fields
        return
    if lost := _lost(as_written(recipe_used(folder)), now):
        more = f" and {len(lost) - 4} more" if len(lost) > 4 else ""
        raise RecipeError(f"{file}: truncated, or edited: it lacks {', '.join(lost[:4])}{more}; {cure}")


def _lost(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """The sections, and fields of sections that are left, that a recipe no longer has."""
    lost = [name for name in before if name not in now]
    both = [(name, before[name], now[name]) for name in before if name in now]
    return lost + [
        f"{name}.{field}"
        for name, left, right in both
        if isinstance(left, dict) and isinstance(right, dict)
        for field in left
        if field not in right
    ]
