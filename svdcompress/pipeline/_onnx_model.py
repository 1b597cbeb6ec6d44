"""An ONNX file in place of the model that it was made from."""

from __future__ import annotations

from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from svdcompress.errors import ExportError, shortened
from svdcompress.export import as_given
from svdcompress.pipeline._baked import Baked
from svdcompress.pipeline._promised import NAMES


class OnnxModel(nn.Module):
    """Runs a run's deterministic file in onnxruntime on the CPU, called with the same inputs as the run's model.

    Returns what a likelihood reads of the file's outputs, in the units of the model's: the main one, or all of a tuple.
    """

    def __init__(self, path: Path, units: Baked | None = None) -> None:
        super().__init__()
        self.path, self.units = path, units or Baked()
        self.session = open_session(path)

    def forward(self, *positional: Any, **named: Any) -> Any:
        given: Any = named or (positional[0] if len(positional) == 1 else positional)
        arrays = zip(self.session.get_outputs(), run(self.session, self.units.inputs(given), self.path), strict=True)
        output = as_given({value.name: torch.from_numpy(array) for value, array in arrays if value.name not in NAMES})
        return self.units.standardized(output)


def open_session(path: Path) -> Any:
    """An onnxruntime session on the CPU, without logging, with PyTorch's number of threads. Raises ExportError."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 4
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's own exceptions have no common base
        raise ExportError(f"onnxruntime cannot load it: {shortened(str(error))}") from error


def run(session: Any, inputs: Any, path: Path, **more: np.ndarray) -> list[np.ndarray]:
    """Run a file; returns its outputs. inputs: a tensor, a tuple in the order of the file's inputs, or a mapping. more:
    further inputs, by name. Raises ExportError if that fails."""
    feeds = arrays_of(session, inputs, more)
    try:
        return session.run(None, {**feeds, **more})
    except Exception as error:
        raise ExportError(f"onnxruntime cannot run {path.name}: {shortened(str(error))}") from error


def arrays_of(session: Any, inputs: Any, more: Container[str] = ()) -> dict[str, np.ndarray]:
    """Arrays of the inputs by the names of a file's inputs, except those in `more`."""
    names = [str(value.name) for value in session.get_inputs() if value.name not in more]
    if isinstance(inputs, Tensor):
        inputs = (inputs,)
    given = (
        dict(inputs.items())
        if isinstance(inputs, Mapping) or hasattr(inputs, "keys")
        else dict(zip(names, inputs, strict=False))
    )
    return {name: given[name].numpy() for name in names if isinstance(given.get(name), Tensor)}
