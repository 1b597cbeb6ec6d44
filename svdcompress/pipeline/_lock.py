"""Locks on files: one process holds each, until it ends, however it ends; its children don't."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

THERE = fcntl is not None
"""Whether this system has such locks."""

_held: set[IO[str]] = set()
"""The files that this process has locked."""


@contextmanager
def holding(path: Path) -> Iterator[bool]:
    """Lock a file while the body runs; it is given whether that worked: False if another process holds the lock.

    Raises OSError (FileNotFoundError) if the file can't be written to.
    """
    with path.open("a") as file:
        if not _lock(file):
            yield False
            return
        _held.add(file)
        try:
            yield True
        finally:
            _held.discard(file)


def is_held(path: Path) -> bool:
    """Whether another process holds the lock of a file; False if there is none, or it can't be written to."""
    if not THERE or not path.is_file():
        return False
    try:
        with path.open("a") as file:
            return not _lock(file)
    except OSError:  # reported when the folder is written to
        return False


def _lock(file: IO[str]) -> bool:
    """Try to lock a file; returns whether it worked (True where there are no locks, as on some network drives)."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # type: ignore[union-attr]
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _let_go() -> None:
    """Close the files in a forked process, such as a worker that reads data: if the run is killed, it lives on for seconds,
    and would keep the lock from a run that resumes at once."""
    for file in _held:
        file.close()
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)
