"""How a run's ONNX file names the weights of its model, whose layers it holds inside the wrappers that the file needed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from torch import nn

from svdcompress.export import importance, weight_shapes
from svdcompress.layers import variational_layers
from svdcompress.pipeline._select import Select, bare

PREFIXES = ("", "model.", "model.model.")
"""What wrappers put before a layer's name: none, one (columns in units of the table, or inputs to select), or both."""


class WeightNames:
    """Names of a file's weights by layer. path: the file; model: the run's small model, with or without a selection of inputs.

    A layer whose weight the file does not have under any name, such as one folded into another, keeps its own.
    """

    def __init__(self, path: Path, model: nn.Module) -> None:
        self._model, self._shapes = bare(model), weight_shapes(path)
        self._index = model.index.tolist() if isinstance(model, Select) else None
        layers = [name for name, _ in variational_layers(self._model)]
        there = {prefix: sum(f"{prefix}{name}.weight" in self._shapes for name in layers) for prefix in PREFIXES}
        self._prefix = max(PREFIXES, key=there.__getitem__)

    def weight(self, layer: str) -> str:
        """The file's name of a layer's weight."""
        return f"{self._prefix}{layer}.weight"

    def layer(self, name: str) -> str:
        """The model's name of a layer that the file names `name`."""
        return name.removeprefix(self._prefix)

    def layers(self, found: Mapping[str, str]) -> dict[str, str]:
        """A mapping by the file's names of layers, by the model's."""
        return {self.layer(name): value for name, value in found.items()}

    def importance(self) -> dict[str, np.ndarray]:
        """`export.importance` of the model by the file's names, and in the shapes of its weights."""
        found = {}
        for own, each in importance(self._model).items():
            name = f"{self._prefix}{own}"
            found[name] = self._widened(each, self._shapes.get(name, each.shape))
        return found

    def _widened(self, importance: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """Importances of a weight that, in the file, reads all inputs, with weights of 0 for those that pruning dropped."""
        if self._index is None or sorted(shape) == sorted(importance.shape):  # the file may hold it transposed
            return importance
        inputs = shape[1] if shape[0] == importance.shape[0] else shape[0]
        wide = np.ones((importance.shape[0], inputs, *importance.shape[2:]))  # a weight of 0 stays 0, whatever it counts
        wide[:, self._index] = importance
        return wide
