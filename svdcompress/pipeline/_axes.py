"""The dimensions that `export.dynamic_axes` leaves open, and a check, before training, that the model takes other sizes."""

from __future__ import annotations

from typing import Any

from torch import nn

from svdcompress.errors import RecipeError, SvdcError
from svdcompress.export import check_open
from svdcompress.pipeline._baked import baked
from svdcompress.recipe import Recipe
from svdcompress.sources import Data


def open_dims(model: nn.Module, recipe: Recipe, data: Data, inputs: Any) -> list[set[int]]:
    """The open dimensions of each tensor of the inputs, [] if the recipe has none. inputs: the first examples.

    Raises RecipeError, with the field, if the files could not have these dimensions.
    """
    axes = recipe.export.dynamic_axes
    if not axes or not recipe.export.onnx:
        return []
    units = baked(data.preprocessing, data.task, data.dim)
    try:
        return check_open(units.model(model), units.inputs(inputs), axes)
    except SvdcError as error:
        raise RecipeError(f"export.{error}") from error
