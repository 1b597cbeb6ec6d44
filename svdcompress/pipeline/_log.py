"""Optional event files for TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from svdcompress.errors import DependencyError

FOLDER = "tensorboard"


def check_tensorboard() -> None:
    """Raises DependencyError, before anything is trained, if the package is missing."""
    try:
        import tensorboard  # noqa: F401
    except ImportError as error:
        raise DependencyError("report.tensorboard needs the package tensorboard: pip install tensorboard") from error


def log_row(out: Path, row: Mapping[str, Any]) -> None:
    """Write the figures of an epoch as the scalars STAGE/FIGURE below `out`."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(out / FOLDER)) as writer:  # closed each time, so that a killed run's file is complete
        for name, value in row.items():
            if isinstance(value, int | float) and name != "epoch":
                writer.add_scalar(f"{row['stage']}/{name}", value, row["epoch"])
