"""How many cores other programs use while something is timed, as far as the system tells it (Linux)."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

STAT = Path("/proc/stat")

BUSY = (0, 1, 2, 5, 6, 7)
"""Of a processor's columns there: user, nice, system, interrupts (two), and what other guests of the host took."""

LEAST = 0.25
"""Of the cores that the timed work needs, so much may be taken by others."""


@dataclass
class Load:
    """cores: of the machine. others: how many of them other programs used on average; None where that is not known."""

    cores: int
    others: float | None = None

    def crowded(self, threads: int) -> bool:
        """Whether work of so many threads had to share its cores."""
        return self.others is not None and self.others > self.cores - threads + LEAST


@contextmanager
def watched() -> Iterator[Load]:
    """What others use meanwhile; known at the end. This process, and those it started and that ended, are not others."""
    load = Load(os.cpu_count() or 1)
    begun, busy, own = time.monotonic(), _busy(), _own()
    try:
        yield load
    finally:
        seconds, after = time.monotonic() - begun, _busy()
        if busy is not None and after is not None and seconds > 0:
            load.others = max(0.0, (after - busy - (_own() - own)) / seconds)


def _busy() -> float | None:
    """Seconds that all cores together have worked since the machine began."""
    try:
        kind, *columns = STAT.read_text(encoding="utf-8").splitlines()[0].split()
        ticks = sum(int(columns[column]) for column in BUSY) if kind == "cpu" else None
        return None if ticks is None else ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return None


def _own() -> float:
    """Seconds that this process has worked, with its children that ended."""
    now = os.times()
    return now.user + now.system + now.children_user + now.children_system
