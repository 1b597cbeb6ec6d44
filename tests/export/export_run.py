"""Running Monte-Carlo files in onnxruntime."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime


def session(path: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def run(at: onnxruntime.InferenceSession, samples: int, **inputs) -> dict[str, np.ndarray]:
    names = [output.name for output in at.get_outputs()]
    return dict(zip(names, at.run(None, {**inputs, "samples": np.array(samples)}), strict=True))


def numbers(layout: list[dict], batch: int) -> int:
    """How many noise numbers a draw takes, from the metadata's layout."""
    return sum(int(np.prod([batch if size is None else size for size in call["shape"]])) for call in layout)
