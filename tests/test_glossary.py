"""Names in the code follow docs/glossary.md where it settles which of several words to use."""

from __future__ import annotations

import ast
import re
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "svdcompress"
FILES = sorted(PACKAGE.rglob("*.py"))

MASKS = {"keep", "kept", "stays", "held", "alive"}
"""Former names of masks, now ordinary words for a verb or a number."""

PLOTS = {"folder", "path", "context", "ax"}
"""Typical parameters of functions that plot."""

ONE_CLASS = {"Draw", "Draws", "Noise"}
"""Terms of the glossary that used to name several classes."""


def misnamed(source: str) -> list[str]:
    """Masks (tensors) under other names, and functions that plot but are called draw."""
    found = []
    for node in ast.walk(ast.parse(source)):
        name, annotation = "", None
        if isinstance(node, ast.arg):
            name, annotation = node.arg, node.annotation
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name, annotation = node.target.id, node.annotation
        elif isinstance(node, ast.FunctionDef) and node.name.strip("_") == "draw":
            found += ["draw plots"] if PLOTS & {one.arg for one in node.args.args} else []
        typed = set(re.findall(r"\w+", ast.unparse(annotation))) if annotation is not None else set()
        found += [f"{name} is a mask"] if name in MASKS and {"Tensor", "Masks"} & typed else []
    return found


def test_masks_are_called_masks_and_draws_are_random():
    found = {str(file.relative_to(PACKAGE)): misnamed(file.read_text(encoding="utf-8")) for file in FILES}
    assert {file: names for file, names in found.items() if names} == {}


def test_what_is_misnamed_is_seen():
    source = "class A:\n    kept: Tensor | None\n    alive: int\n\ndef draw(x, folder): ...\n"
    source += "def f(keep: Mapping[str, Tensor], held: list[int], stays: Masks): ...\ndef draw(mean, noise: Tensor): ...\n"
    assert sorted(misnamed(source)) == ["draw plots", "keep is a mask", "kept is a mask", "stays is a mask"]


def test_an_idea_has_one_class():
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in FILES]
    names = [node.name.strip("_") for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    assert {name for name in ONE_CLASS if names.count(name) > 1} == set()
