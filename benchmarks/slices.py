"""Slices of time: a long benchmark stops cleanly when one ends, and resumes in the next."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from pathlib import Path

UNFINISHED = 75
"""The exit code of a slice that has ended before its work."""


class Slice:
    """A limit of `minutes` from now (None: no limit); `check` raises `Over` after it."""

    class Over(Exception):
        """The slice has ended; what was done so far is kept."""

    def __init__(self, minutes: float | None) -> None:
        self.end = math.inf if minutes is None else time.monotonic() + 60 * minutes

    @property
    def left(self) -> float | None:
        """Seconds left; None without a limit."""
        return None if self.end == math.inf else max(1.0, self.end - time.monotonic())

    def check(self) -> None:
        """Raise Over if the time has run out."""
        if time.monotonic() > self.end:
            raise self.Over


def sparsified(out: Path, arguments: list[str], slot: Slice) -> bool:
    """Run `svdc sparsify` into a folder, or resume what an earlier slice left there; returns whether it succeeded.

    Raises Slice.Over if the time runs out first.
    """
    if (out / "report.json").is_file():
        return True
    begun = (out / "recipe.yaml").is_file()
    command = [sys.executable, "-m", "svdcompress", "sparsify", "--out", str(out), "--trust-code"]
    process = subprocess.Popen([*command, *(["--resume"] if begun else arguments)], cwd=Path(__file__).parent.parent)
    try:
        return process.wait(slot.left) == 0
    except subprocess.TimeoutExpired:
        process.terminate()  # the command stops at the next batch and keeps its state
        process.wait()
        raise Slice.Over from None
