"""A finished run, opened again: its recipe, models, data and figures."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from svdcompress import checkpoint, report
from svdcompress.errors import CheckpointError, OutputError, UsageError
from svdcompress.pipeline._folder import STATE, stored_recipe
from svdcompress.pipeline._select import whole
from svdcompress.recipe import Recipe
from svdcompress.sources import Data, load_weights, make_model, open_data


@dataclass
class OpenRun:
    """A run's folder and its recipe; the rest is read when asked for."""

    folder: Path
    recipe: Recipe

    @cached_property
    def model(self) -> nn.Module:
        """The sparse variational model, in `eval()`."""
        loaded = checkpoint.load(self.folder / "model.safetensors", make_model(self.recipe.model))
        return whole(loaded, self._extra.get("inputs") or {}).eval()

    @cached_property
    def dense(self) -> nn.Module:
        """The dense model that the run began with, in `eval()`."""
        return load_weights(make_model(self.recipe.model), self.folder / "dense.safetensors").eval()

    @cached_property
    def data(self) -> Data:
        """The run's data, split as they were then."""
        section = self.recipe.data
        if "standardized" not in self.preprocessing:  # a run of a version that did nothing to tables by itself
            section = section.model_copy(update={"standardize": False})
        data = open_data(section, self.recipe.task, strict=False)
        data.dim = self.dim
        return data

    @cached_property
    def results(self) -> dict[str, Any]:
        """What `report.json` holds."""
        return report.load(self.folder)

    @cached_property
    def preprocessing(self) -> dict[str, Any]:
        """How the run's inputs were prepared, for `svdcompress.sources.preprocess`; read without the data."""
        return self._extra.get("preprocessing", {})

    @cached_property
    def classes(self) -> list[str] | None:
        """Names of the classes, where there are any."""
        return self._extra.get("classes")

    @cached_property
    def dim(self) -> int:
        """The dimension of the model's output that holds the classes."""
        return self._extra.get("dim", 1)

    @cached_property
    def tau(self) -> float | None:
        """For a regression with constant noise, its precision on the validation data, in the units of the loss."""
        return self._extra.get("tau")

    @cached_property
    def _extra(self) -> dict[str, Any]:
        return checkpoint.read_manifest(self.folder / "model.safetensors").get("extra") or {}


def open_run(folder: str | Path) -> OpenRun:
    """Open the folder of a finished run. Raises OutputError if it is none, or if the run was stopped before its
    end; UsageError for an experiment's."""
    folder = Path(folder)
    if not folder.is_dir():
        raise OutputError(f"{folder}: no such folder")
    recipe = stored_recipe(folder)
    if recipe.experiment is not None:
        raise UsageError(f"{folder}: an experiment leaves figures and pictures, but no model; see them: svdc report {folder}")
    if not (folder / "model.safetensors").is_file():
        if (folder / STATE).is_dir():
            raise OutputError(f"{folder}: the run is not finished; go on with: svdc sparsify --resume --out {folder}")
        raise CheckpointError(f"{folder}: model.safetensors is missing")
    return OpenRun(folder, recipe)
