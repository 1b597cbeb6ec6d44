"""Comparing a file in onnxruntime with PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from svdcompress.errors import ExportError

TOLERANCE = 1e-4
"""Largest difference allowed, relative to the largest number of an output."""

SMALL = 1e-3
"""Size that outputs count as if they are 0 throughout; also their least size if PyTorch's rounding isn't known."""

ROUNDINGS = 20
"""How many times PyTorch's own rounding a file may be off: it adds the same numbers in another order."""

FLAGS, FLIPPED = "set", 0.05
"""Name of the output of zeros and ones, and the share of it that may differ: rounding flips what lies at a set's limit."""

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
    """The named outputs. where: names the case in an error's text."""
    try:
        return session.run(list(names), dict(feeds))
    except Exception as error:
        raise ExportError(f"onnxruntime fails {where}: {error}") from error


def widened(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors, with floating ones as float64."""
    return [tensor.double() if tensor.is_floating_point() else tensor for tensor in tensors]


def differences(
    expected: Mapping[int, Mapping[str, Tensor]],
    got: Callable[[int], list[np.ndarray]],
    double: Callable[[int], Mapping[str, Tensor]],
    floor: float = 0.0,
) -> dict[int, float]:
    """Largest absolute difference of a file from PyTorch for each batch size.

    expected: PyTorch's outputs by name, for each batch size. got: onnxruntime's at a batch size, in the same order. double:
    PyTorch's, computed in float64; called only where a difference might be rounding. floor: the least size that outputs
    count as. Raises ExportError beyond TOLERANCE times an output's size, which is its largest number in all batches.
    """
    theirs = {batch: {name: value.numpy() for name, value in outputs.items()} for batch, outputs in expected.items()}
    sizes: dict[str, float] = {}
    for outputs in theirs.values():
        for name, value in outputs.items():
            sizes[name] = max(sizes.get(name, floor), _size(value))
    result = {}
    for batch, outputs in theirs.items():
        wide: dict[str, np.ndarray] = {}

        def rounding(name: str, batch: int = batch, wide: dict[str, np.ndarray] = wide) -> float | None:
            try:
                if not wide:
                    with torch.no_grad():
                        wide.update({key: value.double().numpy() for key, value in double(batch).items()})
                return _size(wide[name] - theirs[batch][name].astype(np.float64))
            except Exception:  # a model that only computes in float32
                return None

        result[batch] = max(
            difference(name, ours, value, f"at batch {batch}", sizes[name], rounding)
            for (name, value), ours in zip(outputs.items(), got(batch), strict=True)
        )
    return result


def difference(
    name: str,
    ours: np.ndarray,
    torch: np.ndarray,
    where: str,
    size: float | None = None,
    rounding: Callable[[str], float | None] = lambda name: None,
) -> float:
    """Largest absolute difference of an output from PyTorch's.

    size: what the difference is measured against; None: the output's largest number. rounding: by how much PyTorch itself is
    off by the rounding of float32, None if that isn't known: outputs that are small differences of much larger numbers are
    only as exact as those. Raises ExportError beyond the tolerance, for other shapes, and if PyTorch has no finite number,
    which any file would equal.
    """
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
    if not np.isfinite(torch).any():
        raise ExportError(f"{name!r} has no finite number in PyTorch {where}, so no file can be compared with it; {EXAMPLES}")
    same = (ours == torch) | (np.isnan(ours) & np.isnan(torch))  # infinities too
    with np.errstate(invalid="ignore"):
        gap = np.where(same, 0.0, np.abs(ours - torch))
    size = _size(torch) if size is None else size
    limit, largest = TOLERANCE * (size or SMALL), float(np.nan_to_num(gap, nan=np.inf).max())
    if limit < largest <= TOLERANCE * max(1.0, size):
        off = rounding(name)
        limit = max(limit, TOLERANCE * SMALL if off is None else ROUNDINGS * off)
    if largest > limit:
        raise ExportError(f"{name!r} differs from PyTorch by {largest:.3g} {where} (allowed: {limit:.3g}); {ADVICE}")
    return largest


def _size(array: np.ndarray) -> float:
    """The largest finite absolute value."""
    return float(np.abs(array.astype(np.float64)[np.isfinite(array)]).max(initial=0.0))


ADVICE = "a model whose code depends on its batch size, or that draws random numbers, cannot be exported"

EXAMPLES = "give example inputs for which the model's outputs are finite"
