"""Slices of time: a long benchmark stops in good order where one ends, and goes on in the next."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from pathlib import Path

UNFINISHED = 75
"""The exit code of a slice that has ended before its work."""


class Slice:
    """The time that is left, in minutes (None: no end); `Over` is raised where it ends."""

    class Over(Exception):
        """The slice has ended; what was done so far is kept."""

    def __init__(self, minutes: float | None) -> None:
        self.end = math.inf if minutes is None else time.monotonic() + 60 * minutes

    @property
    def left(self) -> float | None:
        """Seconds; None without an end."""
        return None if self.end == math.inf else max(1.0, self.end - time.monotonic())

    def check(self) -> None:
        """Raise Over where the time has run out."""
        if time.monotonic() > self.end:
            raise self.Over


def sparsified(out: Path, arguments: list[str], slot: Slice) -> bool:
    """Run `svdc sparsify` into a folder, or go on with what a slice left there; whether it has ended well.

    Raises Slice.Over where the time runs out before.
    """
    if (out / "report.json").is_file():
        return True
    begun = (out / "recipe.yaml").is_file()
    command = [sys.executable, "-m", "svdcompress", "sparsify", "--out", str(out), "--trust-code"]
    process = subprocess.Popen([*command, *(["--resume"] if begun else arguments)], cwd=Path(__file__).parent.parent)
    try:
        return process.wait(slot.left) == 0
    except subprocess.TimeoutExpired:
        process.terminate()  # the command stops at the next batch, and keeps what it has
        process.wait()
        raise Slice.Over from None
