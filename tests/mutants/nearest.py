"""Finds the tests nearest to a function by names alone: what mentions it, what mentions that, until tests are reached.

Nothing is run, so this takes a second. Names match too much (methods of other classes share them) and too little (what a
decorator registers is mentioned nowhere), so they determine only the order of the tests.
"""

from __future__ import annotations

import ast
import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEAR = {"tiny_run"}
"""Fixtures that take as long as many tests."""


@dataclass(frozen=True)
class Place:
    """A function, class or constant: its file, its qualified name, and the names that it mentions."""

    file: str
    name: str
    mentions: frozenset[str]
    line: int
    end: int

    @property
    def simple(self) -> str:
        """The last part of its name."""
        return self.name.rpartition(".")[2]

    @property
    def is_test(self) -> bool:
        """Whether pytest runs it."""
        return self.simple.startswith("test_") and self.file.rpartition("/")[2].startswith("test_")


class Nearest:
    """All places of the package and its tests, and which mention which."""

    def __init__(self, root: Path) -> None:
        files = [*sorted((root / "svdcompress").rglob("*.py")), *sorted((root / "tests").rglob("*.py"))]
        self.places = [place for file in files for place in _places(file, file.relative_to(root).as_posix())]
        self.mentioned: dict[str, list[Place]] = defaultdict(list)
        for place in self.places:
            for name in place.mentions:
                self.mentioned[name].append(place)

    def tests(self, file: str, function: str, line: int, own: tuple[str, ...] = ()) -> list[str]:
        """Pytest's IDs of the tests that lead to a function of a file ("": to the code at the line), nearest first.

        own: folders of tests/ whose tests count as nearer, and files in tests/ whose tests come first.
        """
        start = [place for place in self.places if place.file == file and function and place.name == function]
        start = start or [place for place in self.places if place.file == file and place.line <= line <= place.end]
        steps = self._steps(start)
        if not any(place.is_test for place in steps):  # for example registered by a decorator
            others = [place for place in self.places if place.file == file]
            steps = {place: step + 1 for place, step in self._steps(others).items()}
        found = [(step, place) for place, step in steps.items() if place.is_test]
        found += [(math.inf, place) for place in self.places if place.is_test and place not in steps and _named(place, own)]
        return [f"{place.file}::{place.name.replace('.', '::')}" for _, place in sorted(found, key=_order(file, own))]

    def _steps(self, start: list[Place]) -> dict[Place, float]:
        """The distance of each place: a step to each place that mentions a name, longer the more of them there are."""
        steps: dict[Place, float] = {}
        front = [(0.0, number, place) for number, place in enumerate(start)]
        count = len(front)
        while front:
            step, _, place = heapq.heappop(front)
            if place in steps:
                continue
            steps[place] = step
            for name in _called(place):
                mentioning = self.mentioned.get(name, ())
                further = step + 1 + math.log2(max(len(mentioning), 1)) / 4
                for other in mentioning:
                    if other not in steps:
                        heapq.heappush(front, (further, count, other))
                        count += 1
        return steps


def _order(file: str, own: tuple[str, ...]) -> Callable[[tuple[float, Place]], tuple[Any, ...]]:
    """Sort key: files named in `own` first, then by steps; tests in the room itself count as nearer, and so do those in a file
    of the same name."""
    stem = file.rpartition("/")[2].removesuffix(".py").strip("_")

    def order(entry: tuple[float, Place]) -> tuple[Any, ...]:
        step, place = entry
        inside = any(place.file == f"tests/{each}" or place.file.startswith(f"tests/{each}/") for each in own)
        mirrors = stem in place.file.rpartition("/")[2]
        return (not _named(place, own), step - 1.5 * inside - mirrors, bool(place.mentions & DEAR), place.file, place.line)

    return order


def _named(place: Place, own: tuple[str, ...]) -> bool:
    return any(place.file == f"tests/{each}" for each in own)


def _called(place: Place) -> list[str]:
    """The names by which others refer to a place: its own and, for a member of a class, that of the class."""
    names = place.name.split(".")
    return [name for name in names if not (name.startswith("__") or name == "forward")]


def _places(path: Path, file: str) -> Iterator[Place]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    yield from _inner(tree, file, "")


def _inner(node: ast.Module | ast.ClassDef, file: str, prefix: str) -> Iterator[Place]:
    for part in node.body:
        lines = (part.lineno, part.end_lineno or part.lineno)
        if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{prefix}.{part.name}".lstrip(".")
            if isinstance(part, ast.ClassDef):
                mentions = frozenset().union(*(_mentions(each) for each in (*part.bases, *part.decorator_list)))
                yield Place(file, name, mentions, *lines)
                yield from _inner(part, file, name)
            else:
                yield Place(file, name, _mentions(part), *lines)
        elif isinstance(part, ast.Assign | ast.AnnAssign) and not prefix:
            for target in part.targets if isinstance(part, ast.Assign) else [part.target]:
                if isinstance(target, ast.Name):
                    yield Place(file, target.id, _mentions(part), *lines)


def _mentions(node: ast.AST) -> frozenset[str]:
    """Names, attributes and parameters (which include fixtures) within a node."""
    found: set[str] = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            found.add(part.id)
        elif isinstance(part, ast.Attribute):
            found.add(part.attr)
        elif isinstance(part, ast.arg):
            found.add(part.arg)
    return frozenset(found)
