"""A run's ONNX files, those of the sparse model first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from svdcompress.errors import ExportError
from svdcompress.export import Axes, Exported, export_onnx
from svdcompress.likelihoods import own_likelihood
from svdcompress.pipeline import _figures
from svdcompress.pipeline._axes import as_open_as_can_be
from svdcompress.pipeline._baked import baked
from svdcompress.pipeline._export import export_model, file_metadata
from svdcompress.pipeline._promised import promised, sets_of
from svdcompress.pipeline._results import RunResults
from svdcompress.pipeline._search_start import chosen_by_time
from svdcompress.pipeline._small_files import SmallFiles
from svdcompress.recipe import Recipe
from svdcompress.sources import Data


@dataclass
class Files:
    """Writes the files to `out` and their figures to `results`. warn: takes a line for the user. inputs: for tracing.

    written: the deterministic files of the dense and the sparse model, as far as they could be written. error: why the sparse
    one could not. parity: by file name.
    """

    recipe: Recipe
    data: Data
    inputs: Any
    out: Path
    results: RunResults
    warn: Callable[[str], None]
    written: dict[str, Path] = field(default_factory=dict)
    parity: dict[str, float | None] = field(default_factory=dict)
    small: SmallFiles | None = None
    error: ExportError | None = None

    def sparse(self, small: nn.Module) -> None:
        """Write model.onnx, model_mc.onnx and their small forms."""
        self.results.parity = self.parity
        data, export = self.data, self.recipe.export
        self.units = baked(data.preprocessing, data.task, data.dim)
        metadata = self._metadata(self.results.to_dict()) | promised(self.results.to_dict(), "mean")
        more: dict[str, Any] = {"opset": export.opset, "metadata": metadata, "units": self.units}
        more["dynamic_axes"] = export.dynamic_axes
        feed, timed = partial(_figures.feed, data), chosen_by_time(self.recipe)
        try:
            more["sets"] = self._sets("mean")
            file, gathers = export_model(small, self.out / "model.onnx", self.inputs, feed, timed=timed, **more)
            self._keep("sparse", file)
            if gathers is not None:
                assert self.results.pruning is not None  # the model is pruned
                self.results.pruning["inputs_gathered"] = gathers
        except ExportError as error:
            self.warn(f"model.onnx was not written: {error}")
            self.error = error
        if export.monte_carlo:
            self._monte_carlo(small)
        self._small_forms(small)

    def told(self) -> dict[str, Any]:
        """The names of the files that were written, for `take`."""
        measured = {} if self.small is None else {name: path.name for name, path in self.small.measured.items()}
        return {"written": {name: path.name for name, path in self.written.items()}, "measured": measured}

    def take(self, told: dict[str, Any]) -> None:
        """Take over files that were written before a stop and whose results are known. told: what `told` returned then."""
        self.parity = self.results.parity = self.results.parity or {}
        self.units = baked(self.data.preprocessing, self.data.task, self.data.dim)
        self.written = {name: self.out / file for name, file in told["written"].items()}
        self.small = self._small_files()
        self.small.measured = {name: self.out / file for name, file in told["measured"].items()}
        self.small.figures = {name: getattr(self.results, name) for name in told["measured"]}

    def _small_files(self) -> SmallFiles:
        return SmallFiles(self.recipe, self.data, self.inputs, self.out, self.results, self.parity, self.warn, self.units)

    def _small_forms(self, small: nn.Module) -> None:
        """Write the forms of these files without zeros and in fewer bits."""
        export = self.recipe.export
        self.small = self._small_files()
        if "sparse" in self.written:
            if export.compact:
                make = self._sets("mean")
                self.small.compact(small, None if make is None else make(self.units.model(small)))
            self.small.precision(small)
        if export.monte_carlo:
            self.small.monte_carlo()

    def _sets(self, who: str) -> Callable[[nn.Module], Any] | None:
        """A function that maps a model to its further outputs, if the recipe wants them."""
        if not self.recipe.export.sets:
            return None
        data = self.data
        return lambda model: sets_of(self.results.to_dict(), who, own_likelihood(model, data.task, data.dim))

    def dense(self, model: nn.Module) -> None:
        """Write dense.onnx, for comparison."""
        export = self.recipe.export
        more: dict[str, Any] = {"opset": export.opset, "dynamic_axes": export.dynamic_axes, "metadata": self._metadata({})}
        inputs = self.units.inputs(self.inputs)
        self._keep("dense", export_onnx(self.units.model(model), self.out / "dense.onnx", inputs, **more))

    def _metadata(self, results: dict[str, Any], draws: bool = False) -> dict[str, Any]:
        return file_metadata(results, self.units.preprocessing, self.data.classes, self.data.task, draws)

    def _keep(self, name: str, file: Exported) -> None:
        self.written[name] = file.path
        self.parity[file.path.name] = file.parity
        side = self.results.sparse if name == "sparse" else self.results.dense
        side.bytes = file.bytes

    def _monte_carlo(self, small: nn.Module) -> None:
        """Write model_mc.onnx; with the example's sizes only, if its noise depends on the sizes that should be open."""
        path, axes = self.out / "model_mc.onnx", self.recipe.export.dynamic_axes
        try:
            file = as_open_as_can_be(partial(self._draws, small, path), axes, self.warn)
        except ExportError as error:  # the run's other files are fine
            self.warn(f"model_mc.onnx was not written: {error}")
            return
        self.parity[path.name] = file.parity

    def _draws(self, small: nn.Module, path: Path, axes: Axes) -> Exported:
        sets, model = self._sets("samples"), self.units.drawn(small)  # with its likelihood, set by `keep` at the latest
        return export_onnx(
            model,
            path,
            self.units.inputs(self.inputs),
            monte_carlo=True,
            task=own_likelihood(model, self.data.task, self.data.dim),
            target_scale=self.units.target,
            opset=self.recipe.export.opset,
            metadata=self._metadata(self.results.to_dict(), draws=True) | promised(self.results.to_dict(), "samples"),
            further=None if sets is None else sets(model),
            dynamic_axes=axes,
        )
