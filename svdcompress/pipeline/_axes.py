"""The dimensions that `export.dynamic_axes` leaves open, and a check, before training, that the model takes other sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from svdcompress.errors import ExportError, RecipeError, SvdcError
from svdcompress.export import Axes, Exported, check_open
from svdcompress.pipeline._baked import baked
from svdcompress.recipe import Recipe
from svdcompress.sources import Data


def as_open_as_can_be(write: Callable[[Axes], Exported], axes: Axes, warn: Callable[[str], None]) -> Exported:
    """A Monte-Carlo file with open dimensions; with the example's sizes only, and a warning, if that cannot be. write: writes
    the file with the dimensions that are passed to it."""
    try:
        return write(axes)
    except ExportError as error:
        if not axes:
            raise
        file = write({})
        warn(f"{file.path.name} takes inputs of the example's sizes only, whatever export.dynamic_axes says: {error}")
        return file


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
