"""What onnxruntime makes of a file, beside PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from svdcompress.errors import ExportError

TOLERANCE = 1e-4
"""Largest difference allowed, relative to the largest output (or to 1 where outputs are smaller)."""

FLAGS, FLIPPED = "set", 0.05
"""An output of zeros and ones, and the share of it that may be otherwise: rounding moves what lies at a set's limit."""

BATCHES = (1, 3, 7)
"""Batch sizes of the check; only 3 was traced, and 1 finds what torch.export's guard cannot (`if batch == 1`, `squeeze()`)."""


def session(path: Path) -> Any:
    """An onnxruntime session on the CPU, one thread, without log lines."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise ExportError(f"{path.name}: onnxruntime cannot load the file: {error}") from error


def run(session: Any, names: Sequence[str], feeds: Mapping[str, np.ndarray], where: str) -> list[np.ndarray]:
    """Outputs by name. `where` names the case in the error's text."""
    try:
        return session.run(list(names), dict(feeds))
    except Exception as error:
        raise ExportError(f"onnxruntime fails {where}: {error}") from error


def difference(name: str, ours: np.ndarray, torch: np.ndarray, where: str) -> float:
    """Largest absolute difference of an output from PyTorch's. Raises ExportError beyond TOLERANCE, or for other shapes."""
    if ours.shape != torch.shape:
        raise ExportError(f"{name!r} has the shape {ours.shape} in onnxruntime and {torch.shape} in PyTorch {where}; {ADVICE}")
    if ours.size == 0:
        return 0.0
    if name == FLAGS and np.isin(ours, (0, 1)).all() and np.isin(torch, (0, 1)).all():
        flipped = float((ours != torch).mean())
        if flipped > FLIPPED:
            raise ExportError(f"{name!r} differs from PyTorch in {100 * flipped:.0f}% of its entries {where}; {ADVICE}")
        return 0.0
    ours, torch = ours.astype(np.float64), torch.astype(np.float64)
    same = (ours == torch) | (np.isnan(ours) & np.isnan(torch))  # infinities too
    with np.errstate(invalid="ignore"):
        gap = np.where(same, 0.0, np.abs(ours - torch))
    finite = np.abs(torch[np.isfinite(torch)])
    limit = TOLERANCE * max(1.0, float(finite.max(initial=0.0)))
    largest = float(np.nan_to_num(gap, nan=np.inf).max())
    if largest > limit:
        raise ExportError(f"{name!r} differs from PyTorch by {largest:.3g} {where} (allowed: {limit:.3g}); {ADVICE}")
    return largest


ADVICE = "a model whose code depends on its batch size, or that draws random numbers, cannot be exported"
