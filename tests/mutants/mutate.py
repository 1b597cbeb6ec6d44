"""Small ways to break a Python file: a comparison reversed, a number changed, a line removed. Each is an edit of the source."""

from __future__ import annotations

import ast
import copy
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

COMPARISONS: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip

OPERATORS: dict[type, type] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Pow: ast.Mult,
    ast.Mod: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip

NAMES = {
    "min": "max", "max": "min", "any": "all", "all": "any", "sum": "mean", "mean": "sum", "amax": "amin", "amin": "amax",
    "exp": "expm1", "log": "log1p", "log1p": "log", "sqrt": "abs", "square": "abs", "zeros": "ones", "ones": "zeros",
    "zeros_like": "ones_like", "ones_like": "zeros_like", "argmax": "argmin", "logical_and": "logical_or",
}  # fmt: skip
"""Functions and methods, and their replacements."""

DROPPED = {"abs", "clamp", "detach", "clone", "exp", "log", "sqrt", "square", "neg", "sort", "unique", "reciprocal", "eval",
           "double", "float"}  # fmt: skip
"""Methods whose calls are removed: `x.abs()` becomes `x`."""


@dataclass(frozen=True)
class Mutant:
    """One edit. The file and the function it is in ("" outside of all); offsets are in characters of the file."""

    file: str
    function: str
    line: int
    start: int
    end: int
    old: str
    new: str

    @property
    def key(self) -> str:
        """Its identifier, as long as the function contains `old`."""
        return f"{self.file} {self.function}: {' '.join(self.old.split())} -> {' '.join(self.new.split())}"

    def order(self, seed: int) -> str:
        """A pseudo-random sort key that other edits of the package do not change."""
        return hashlib.sha256(f"{seed}:{self.key}".encode()).hexdigest()

    def applied(self, source: str) -> str:
        """The file with this edit. Raises ValueError if the source differs at its place."""
        if source[self.start : self.end] != self.old:
            raise ValueError(f"{self.file}:{self.line} does not hold {self.old}")
        return source[: self.start] + self.new + source[self.end :]


def mutants(path: Path, root: Path) -> list[Mutant]:
    """All edits of a file that leave it a valid program. Error messages, annotations and docstrings are left alone."""
    source = path.read_text(encoding="utf-8")
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))

    def offset(line: int, column: int) -> int:
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    found: dict[str, Mutant] = {}
    for function, node, new in _edits(ast.parse(source), ""):
        start = offset(node.lineno, node.col_offset)  # type: ignore[attr-defined]
        end = offset(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]
        one = Mutant(path.relative_to(root).as_posix(), function, node.lineno, start, end, source[start:end], new)  # type: ignore
        try:
            ast.parse(one.new)
        except SyntaxError:
            continue
        found.setdefault(one.key, one)
    return list(found.values())


def _edits(node: ast.AST, function: str) -> Iterator[tuple[str, ast.AST, str]]:
    """(function, node, replacement) for a node and all nodes within."""
    yield from ((function, node, text) for text in _changes(node))
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        function = f"{function}.{node.name}".lstrip(".")
    for part in _inner(node):
        yield from _edits(part, function)


def _inner(node: ast.AST) -> list[ast.AST]:
    """The child nodes to mutate."""
    if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom):
        return []
    if isinstance(node, ast.FunctionDef):
        own = node.name in ("__repr__", "extra_repr", "__dir__")
        return [] if own else [*node.args.defaults, *(each for each in node.args.kw_defaults if each), *node.body]
    if isinstance(node, ast.AnnAssign):
        return [node.value] if node.value else []
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return []
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return []
    if isinstance(node, ast.Call) and ast.unparse(node.func) in (
        "warnings.warn",
        "warn",
        "self._warn",
        "self._note",
        "self.say",
    ):
        return []
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
        return node.args[:1]
    return list(ast.iter_child_nodes(node))


def _changes(node: ast.AST) -> Iterator[str]:
    """The possible replacements of a node."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        yield _with(node, ops=[COMPARISONS[type(node.ops[0])](), *node.ops[1:]])
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS and not _texts(node):
        yield f"({_with(node, op=OPERATORS[type(node.op)]())})"
    elif isinstance(node, ast.BoolOp):
        yield f"({_with(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())})"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.Constant):
        yield from _constant(node.value)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        name, inner = node.func.attr, ast.unparse(node.func.value)
        if name in DROPPED and inner not in ("torch", "math", "np"):
            yield inner
        if name in NAMES:
            yield _with(node, func=ast.Attribute(node.func.value, NAMES[name], ast.Load()))
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("min", "max", "any", "all"):
        yield _with(node, func=ast.Name(NAMES[node.func.id], ast.Load()))
    elif isinstance(node, ast.If | ast.IfExp | ast.While) and not isinstance(node.test, ast.Compare | ast.BoolOp | ast.UnaryOp):
        if isinstance(node, ast.IfExp):
            yield f"({_with(node, body=node.orelse, orelse=node.body)})"
    elif (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)) or isinstance(node, ast.AugAssign):
        yield "pass"


def _constant(value: object) -> Iterator[str]:
    if isinstance(value, bool):
        yield str(not value)
    elif isinstance(value, int):
        yield str(value + 1)
    elif isinstance(value, float):
        yield str(value * 2 if value else 1.0)


def _with(node: ast.AST, **parts: object) -> str:
    other = copy.copy(node)
    for name, value in parts.items():
        setattr(other, name, value)
    return ast.unparse(ast.fix_missing_locations(other))


def _texts(node: ast.BinOp) -> bool:
    """Whether the operands may be strings, which are often messages."""
    sides = (node.left, node.right)
    return any(
        isinstance(side, ast.JoinedStr) or (isinstance(side, ast.Constant) and isinstance(side.value, str)) for side in sides
    )
