"""What a fit saves after an epoch, and how a later one goes on from it."""

from __future__ import annotations

import os
import pickle
import random
import time
import zlib
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from svdcompress.errors import CheckpointError, OutputError

SHARE_OF_TIME = 0.1
"""Saving may take up to this share of the time: quick epochs are not all saved, as training repeats exactly anyway."""


def mix(*parts: int | str) -> int:
    """A seed from all that tells a moment from others: the run's seed, stage, epoch, rank."""
    return zlib.crc32(":".join(map(str, parts)).encode())


def seed_everything(*parts: int | str) -> None:
    """Seed torch, numpy and random with `mix(*parts)`."""
    mixed = mix(*parts)
    torch.manual_seed(mixed)
    random.seed(mixed)
    try:
        import numpy

        numpy.random.seed(mixed)
    except ImportError:
        pass


def write_atomically(path: Path, write: Any) -> None:
    """Call `write(temporary path)` and move the result to `path`: readers see the old file or the new, never a part.

    Raises OutputError when there is no space or no permission.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        raise OutputError(f"{path}: cannot be written ({error}); free some space or choose another place with --out") from error


class StateFile:
    """A fit's state on disk: written whole or not at all, read with weights only."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._last = 0.0
        self._took = 0.0

    def due(self) -> bool:
        """Whether so much time has passed since the last save that another one is cheap."""
        return self.path is not None and time.monotonic() - self._last > self._took / SHARE_OF_TIME

    def save(self, state: dict[str, Any]) -> None:
        """Replace the state on disk, if there is a path. Raises OutputError."""
        if self.path is None:
            return
        started = time.monotonic()
        write_atomically(self.path, lambda temporary: torch.save(state, temporary))
        self._last = time.monotonic()
        self._took = self._last - started

    def load(self) -> dict[str, Any] | None:
        """The state, or None if there is none. Raises CheckpointError for a damaged file."""
        if self.path is None or not self.path.exists():
            return None
        try:
            return torch.load(self.path, map_location="cpu", weights_only=True)
        except (OSError, EOFError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
            raise CheckpointError(f"{self.path}: damaged ({error}); remove it to start this stage again") from error
