"""Matches module names with the patterns of a setting."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a pattern matches a module's dotted name, or that of a module containing it: "encoder" includes "encoder.0"."""
    parts = name.split(".")
    outer = [".".join(parts[:n]) for n in range(1, len(parts) + 1)]
    return any(fnmatchcase(one, pattern) for pattern in patterns for one in outer)
