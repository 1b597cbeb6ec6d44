"""Writes docs/api.md, the reference of the public names, from their docstrings: python docs/api.py [--check]"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import svdcompress
from svdcompress import (
    checkpoint,
    cost,
    errors,
    evaluation,
    execution,
    experiments,
    export,
    layers,
    likelihoods,
    pipeline,
    predict,
    recipe,
    reconstruction,
    report,
    selection,
    sources,
    train,
    uncertainty,
)

TARGET = Path(__file__).with_name("api.md")
MODULES = {
    "svdcompress": svdcompress,
    "svdcompress.uncertainty": uncertainty,
    "svdcompress.calibrate": importlib.import_module("svdcompress.calibrate"),  # the package also has a function of this name
    "svdcompress.export": export,
    "svdcompress.pipeline": pipeline,
    "svdcompress.predict": predict,
    "svdcompress.train": train,
    "svdcompress.selection": selection,
    "svdcompress.reconstruction": reconstruction,
    "svdcompress.execution": execution,
    "svdcompress.layers": layers,
    "svdcompress.likelihoods": likelihoods,
    "svdcompress.cost": cost,
    "svdcompress.report": report,
    "svdcompress.checkpoint": checkpoint,
    "svdcompress.sources": sources,
    "svdcompress.recipe": recipe,
    "svdcompress.evaluation": evaluation,
    "svdcompress.experiments": experiments,
    "svdcompress.errors": errors,
}
"""The modules that get a section; a name that is in several of them is explained only in the first."""


def reference() -> str:
    """The whole page."""
    parts = ["# API reference", "Made from the docstrings by `make docs`. The command line explains itself: `svdc --help`."]
    seen: set[int] = set()
    for module_name, module in MODULES.items():
        entries = [entry for name, value in _public(module) for entry in _entry(name, value, seen)]
        if entries:
            parts += [f"## {module_name}", _doc(module), *entries]
    return "\n\n".join(part for part in parts if part) + "\n"


def _public(module: object) -> Iterator[tuple[str, object]]:
    names = getattr(module, "__all__", None)
    if names is None:
        names = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        names = [name for name in names if not name.startswith("_")]
    for name in names:
        value = getattr(module, name)
        if inspect.isroutine(value) or inspect.isclass(value):
            yield name, value


def _entry(name: str, value: object, seen: set[int]) -> Iterator[str]:
    if id(value) in seen or not getattr(value, "__module__", "").startswith("svdcompress"):
        return
    seen.add(id(value))
    yield f"### {name}"
    yield f"```python\n{_signature(name, value)}\n```"
    yield _doc(value)
    if inspect.isclass(value):
        for method_name, method in vars(value).items():
            if not method_name.startswith("_") and _explained(method):
                yield f"**`{method_name}{_arguments(method)}`** – {_doc(method)}"


def _explained(method: object) -> bool:
    routine = inspect.isfunction(method) or isinstance(method, property | classmethod | staticmethod)
    return routine and bool(getattr(method, "__doc__", None))


def _signature(name: str, value: object) -> str:
    head = "class " if inspect.isclass(value) else ""
    text = f"{head}{name}{_arguments(value)}"
    if len(text) <= 100:
        return text
    inside = re.sub(r"^[^(]*\(|\)[^)]*$", "", text)
    tail = text[text.rindex(")") :]
    return f"{head}{name}(\n    " + ",\n    ".join(_split(inside)) + f",\n{tail}"


def _split(arguments: str) -> list[str]:
    """Split arguments at commas that are not within brackets."""
    parts, depth, start = [], 0, 0
    for position, letter in enumerate(arguments):
        depth += (letter in "[({") - (letter in "])}")
        if letter == "," and depth == 0:
            parts.append(arguments[start:position].strip())
            start = position + 1
    return [*parts, arguments[start:].strip()]


def _arguments(value: object) -> str:
    if isinstance(value, property):
        return ""
    function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
    try:
        text = str(inspect.signature(function))
    except (TypeError, ValueError):
        return "(...)"
    text = (
        re.sub(r" at 0x[0-9a-f]+", "", text)
        .replace("'", "")
        .replace("(self, ", "(")
        .replace("(cls, ", "(")
        .replace("(self)", "()")
    )
    return text.removesuffix(" -> None")


def _doc(value: object) -> str:
    """A docstring as Markdown: lines that begin with names of arguments and a colon become list items."""
    first, *lines = (inspect.getdoc(value) or "").splitlines() or [""]
    return "\n".join([first, *(re.sub(r"^(\w+(?:, \w+)*): ", r"- `\1`: ", line) for line in lines)])


def main() -> int:
    """Write the page, or with --check say whether it is current."""
    text = reference()
    if "--check" not in sys.argv:
        TARGET.write_text(text, encoding="utf-8")
        return 0
    if TARGET.is_file() and TARGET.read_text(encoding="utf-8") == text:
        return 0
    print("docs/api.md is not what the docstrings say: run make docs", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
