"""Slices of time: a long benchmark stops in good order where one ends, and goes on in the next."""

from __future__ import annotations

import math
import time

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
