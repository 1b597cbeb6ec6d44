"""Which tests call which functions of the package: a copy whose functions tell, and a plugin of pytest that listens."""

from __future__ import annotations

import ast
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

LISTENER = "hits = set()\nhit = hits.add\n"


def instrument(root: Path, package: str = "svdcompress") -> None:
    """Make each function below a folder say that it was called."""
    (root / "mutant_hits.py").write_text(LISTENER)
    for path in (root / package).rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        name = path.relative_to(root).as_posix()
        _tell(tree, name, "")
        futures = [each for each in tree.body if isinstance(each, ast.ImportFrom) and each.module == "__future__"]
        at = tree.body.index(futures[-1]) + 1 if futures else _docstring(tree)
        tree.body.insert(at, ast.parse("from mutant_hits import hit as _mutant_hit").body[0])
        path.write_text(ast.unparse(ast.fix_missing_locations(tree)), encoding="utf-8")


def _tell(node: Any, file: str, function: str) -> None:
    for part in ast.iter_child_nodes(node):
        inner = function
        if isinstance(part, ast.FunctionDef | ast.ClassDef):
            inner = f"{function}.{part.name}".lstrip(".")
        _tell(part, file, inner)
        if isinstance(part, ast.FunctionDef):
            part.body.insert(_docstring(part), ast.parse(f"_mutant_hit({f'{file} {inner}'!r})").body[0])


def _docstring(node: Any) -> int:
    first = node.body[0] if node.body else None
    return int(isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str))


# The plugin. CALLS_TO names the folder that its findings go to.

_found: dict[str, dict[str, Any]] = {}
_fixtures: dict[str, tuple[set[str], float]] = {}


def _hits() -> set[str]:
    import mutant_hits  # type: ignore[import-not-found]

    return mutant_hits.hits


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: Any, request: Any):
    hits = _hits()
    before, started = set(hits), time.monotonic()
    hits.clear()
    result = yield
    _fixtures[f"{fixturedef.baseid}:{fixturedef.argname}"] = (set(hits), time.monotonic() - started)
    hits |= before
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: Any, nextitem: Any):
    _hits().clear()
    started = time.monotonic()
    result = yield
    seconds, hits = time.monotonic() - started, set(_hits())
    for definitions in item._fixtureinfo.name2fixturedefs.values():
        more, took = _fixtures.get(f"{definitions[-1].baseid}:{definitions[-1].argname}", (set(), 0.0))
        if not more <= hits:
            hits |= more
            seconds += took
    entry = _found.setdefault(item.nodeid, {"passed": True})
    entry.update(seconds=round(seconds, 3), functions=sorted(hits))
    return result


def pytest_runtest_logreport(report: Any) -> None:
    entry = _found.setdefault(report.nodeid, {"passed": True})
    entry["passed"] = entry["passed"] and report.outcome == "passed"


def pytest_sessionfinish() -> None:
    found = {name: entry for name, entry in _found.items() if "functions" in entry}
    if found:
        Path(os.environ["CALLS_TO"], f"{os.getpid()}.json").write_text(json.dumps(found))
