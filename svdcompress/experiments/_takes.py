"""Which fields of a recipe have an effect on an experiment; the others are refused, so that none is ignored silently."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import BaseModel

from svdcompress.errors import RecipeError
from svdcompress.recipe import Recipe

TAKEN = ("description", "experiment", "seed", "device", "out")
DATA = ("rotated-digit", "vae")
"""Experiments that read the recipe's data; the others make their own."""


def check_recipe(recipe: Recipe, settings: Sequence[str], given: Iterable[str] = ()) -> None:
    """Raises RecipeError, which lists what the experiment takes, for fields without effect that differ from their default.

    settings: names of the experiment's settings. given: further fields that were set, perhaps to their default.
    """
    assert recipe.experiment is not None
    name = recipe.experiment.name
    taken = (*TAKEN, "data") if name in DATA else TAKEN
    fields = [*given, *_changed(recipe, Recipe())]
    idle = list(dict.fromkeys(field for field in fields if field.partition(".")[0] not in taken))
    idle = [field for field in idle if not any(field.startswith(f"{other}.") for other in idle)]
    if idle:
        others = ", ".join(field for field in taken if field not in ("description", "experiment"))
        raise RecipeError(
            f"{', '.join(idle)}: without effect on the experiment {name}; it takes {others}, and "
            f"experiment.settings.FIELD, as in --set experiment.settings.{settings[0]}=..., for {', '.join(settings)}"
        )


def _changed(section: BaseModel, default: BaseModel, prefix: str = "") -> list[str]:
    """Dotted names of the fields whose value is not the default."""
    found: list[str] = []
    for field in type(section).model_fields:
        value: Any = getattr(section, field)
        usual: Any = getattr(default, field)
        if isinstance(value, BaseModel) and isinstance(usual, BaseModel):
            found += _changed(value, usual, f"{prefix}{field}.")
        elif value != usual:
            found.append(f"{prefix}{field}")
    return found
