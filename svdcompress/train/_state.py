"""The state that a fit saves after an epoch and a later one resumes from, and the seeds of both."""

from __future__ import annotations

import random
import time
import zipfile
import zlib
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from svdcompress.errors import CheckpointError, explained, shortened
from svdcompress.files import write_atomically

SHARE_OF_TIME = 0.1
"""Saving may take up to this share of the time: quick epochs are not all saved, as training can be repeated exactly."""


def mix(*parts: int | str) -> int:
    """A seed from everything that identifies a point in training: the run's seed, stage, epoch, rank."""
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


class StateFile:
    """A fit's state on disk: written whole or not at all, read with `weights_only=True`.

    owner: a name that the file carries; one with another name is refused, and one without, as earlier versions wrote it, is
    not.
    """

    def __init__(self, path: Path | None, owner: str | None = None) -> None:
        self.path = path
        self.owner = owner
        self._last = 0.0
        self._took = 0.0

    def due(self) -> bool:
        """Whether enough time has passed since the last save for another one to be cheap; False without a path."""
        return self.path is not None and time.monotonic() - self._last > self._took / SHARE_OF_TIME

    def save(self, state: dict[str, Any]) -> None:
        """Replace the state on disk, if there is a path. Raises OutputError."""
        if self.path is None:
            return
        started = time.monotonic()
        write_atomically(self.path, lambda temporary: torch.save({**state, "owner": self.owner}, temporary))
        self._last = time.monotonic()
        self._took = self._last - started

    def load(self) -> dict[str, Any] | None:
        """The state, or None if there is none. Raises CheckpointError for a damaged file, and for that of another owner."""
        state = self._content()
        if state is None:
            return None
        if self.owner is not None and state.get("owner") not in (None, self.owner):
            raise CheckpointError(f"{self.path}: it belongs to another run; remove it to start this stage again")
        try:
            _Saved.model_validate({name: value for name, value in state.items() if isinstance(name, str)})
        except ValidationError as error:
            raise self._damaged(explained(error)) from None
        return state

    def epochs(self) -> float | None:
        """How many epochs are done in the state, or None if there is none. Raises CheckpointError for a damaged file."""
        state = self._content()
        if state is None:
            return None
        done = state.get("epoch")
        if isinstance(done, bool) or not isinstance(done, int) or done < 0:
            raise self._damaged(f"it has done {done!r} epochs")
        return done

    def _content(self) -> dict[str, Any] | None:
        if self.path is None or not self.path.exists():
            return None
        try:
            with zipfile.ZipFile(self.path) as parts:  # torch.load does not compare its checksums
                if (wrong := parts.testzip()) is not None:
                    raise ValueError(f"the checksum of {wrong} differs")
            state = torch.load(self.path, map_location="cpu", weights_only=True)
        except Exception as error:  # on arbitrary bytes the unpickler can raise anything
            raise self._damaged(f"{type(error).__name__}: {error}") from error
        if not isinstance(state, dict):
            raise self._damaged(f"it holds a {type(state).__name__}")
        return state

    def _damaged(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: damaged ({shortened(reason)}); remove it to start this stage again")


class _Chosen(BaseModel):
    """The best epoch so far."""

    model_config = ConfigDict(strict=True, extra="allow")
    score: Annotated[list[float], Field(min_length=2, max_length=2)]
    epoch: Annotated[int, Field(ge=0)]
    weights: dict[str, Any] | None


class _Saved(BaseModel):
    """The types of what a fit saves; whether its tensors fit the model shows when the model loads them."""

    model_config = ConfigDict(strict=True, extra="allow")
    stage: str
    epoch: Annotated[int, Field(ge=0)]
    steps: Annotated[int, Field(ge=0)]
    model: dict[str, Any]
    surgery: dict[str, Any] = {}
    optimizer: dict[str, Any]
    scaler: dict[str, Any] | None
    history: list[dict[str, Any]]
    rate: float | None = None
    best: _Chosen
