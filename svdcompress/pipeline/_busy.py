"""How many cores other programs use while something is timed, as far as the system reports it (Linux)."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

STAT = Path("/proc/stat")

BUSY = (0, 1, 2, 5, 6, 7)
"""Columns of a processor's line there that count as busy: user, nice, system, interrupts (two), time taken by other guests."""

LEAST = 0.25
"""How many of the cores that the timed work needs may be in use by other programs before it counts as crowded."""


@dataclass
class Load:
    """The load of a machine. cores: how many it has. others: how many of them other programs used on average; None: unknown."""

    cores: int
    others: float | None = None

    def crowded(self, threads: int) -> bool:
        """Whether work with this many threads had to share its cores."""
        return self.others is not None and self.others > self.cores - threads + LEAST


@contextmanager
def watched() -> Iterator[Load]:
    """Measure the load while the body runs; it is set at the end. This process and its finished children are not counted."""
    load = Load(os.cpu_count() or 1)
    begun, busy, own = time.monotonic(), _busy(), _own()
    try:
        yield load
    finally:
        seconds, after = time.monotonic() - begun, _busy()
        if busy is not None and after is not None and seconds > 0:
            load.others = max(0.0, (after - busy - (_own() - own)) / seconds)


def _busy() -> float | None:
    """Busy seconds of all cores together since the machine started; None: unknown."""
    try:
        kind, *columns = STAT.read_text(encoding="utf-8").splitlines()[0].split()
        ticks = sum(int(columns[column]) for column in BUSY) if kind == "cpu" else None
        return None if ticks is None else ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return None


def _own() -> float:
    """Busy seconds of this process and its finished children."""
    now = os.times()
    return now.user + now.system + now.children_user + now.children_system
