"""The last step of writing any form of a file: the graph has to load in onnxruntime, and an `Exported` describes it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from svdcompress.export import _parity
from svdcompress.export._export import Exported
from svdcompress.export._metadata import decode
from svdcompress.export._write import write

if TYPE_CHECKING:
    from onnx import ModelProto


def written(
    model: ModelProto, dst: Path, start: float, *, check: Callable[[Path], Any] | None = None, parity: float | None = None
) -> Exported:
    """Write a model if onnxruntime loads it and it passes `check`. start: time.perf_counter() when the work began."""

    def tried(file: Path) -> None:
        _parity.session(file)
        if check is not None:
            check(file)

    size = write(model, dst, tried)
    metadata = {entry.key: decode(entry.value) for entry in model.metadata_props}
    inputs, outputs = ([value.name for value in values] for values in (model.graph.input, model.graph.output))
    return Exported(dst, size, inputs, outputs, parity, {}, metadata, time.perf_counter() - start)
