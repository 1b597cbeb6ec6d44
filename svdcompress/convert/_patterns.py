"""Which modules the patterns of a setting mean."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether one of the patterns matches a module's dotted name, or that of a module which it is inside of: "encoder" means
    "encoder.0.fc", too."""
    parts = name.split(".")
    outer = [".".join(parts[:n]) for n in range(1, len(parts) + 1)]
    return any(fnmatchcase(one, pattern) for pattern in patterns for one in outer)
