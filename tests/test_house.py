"""Rules for the package: imports go one way, some packages belong to one room, rooms are small, public names are documented."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import svdcompress

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "svdcompress"
# fmt: off
ORDER = [
    "cli", "predict", "experiments", "evaluation", "pipeline", "report", "search", "interop", "train", "calibrate", "export",
    "uncertainty", "selection", "execution", "prune", "cost", "reconstruction", "relevance", "objective", "checkpoint",
    "convert", "layers", "likelihoods", "sources", "recipe", "files", "batch", "hooks", "errors", "renamed", "lazy", "version",
]
# fmt: on
"""A room imports only from the rooms to its right (and from its own files)."""

ONE_ROOM = {"accelerate": "train", "typer": "cli", "torch_pruning": "interop"}
"""Packages that only one room may import, so that they can be replaced there."""

LAZY = (
    "torch",
    "pydantic",
    "matplotlib",
    "onnx",
    "onnxscript",
    "onnxruntime",
    "accelerate",
    "torchmetrics",
    "pandas",
    "transformers",
)
"""Heavy packages that `import svdcompress` does not load."""

FILES = sorted(PACKAGE.rglob("*.py"))
PYTHON = sorted(
    file for folder in ("svdcompress", "tests", "benchmarks", "docs", "recipes") for file in (ROOT / folder).rglob("*.py")
)


def room(file: Path) -> str:
    """The room of a file: its name, or that of its folder; "" for the front (`__init__` and `__main__`)."""
    name = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return "" if name in ("__init__", "__main__") else name


def imports(file: Path) -> list[tuple[str, int]]:
    """The dotted names that a file imports anywhere, with their lines; `from a import b` counts as a.b."""
    found = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: a relative import; the house names its rooms"
            found += [(f"{node.module}.{alias.name}", node.lineno) for alias in node.names]
    return found


def test_every_file_belongs_to_a_known_room():
    assert FILES, "no package found"
    assert {room(file) for file in FILES} - {""} <= set(ORDER)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports_go_one_way(file):
    own = room(file)
    if not own:
        return
    allowed = {own, *ORDER[ORDER.index(own) + 1 :]}
    for name, line in imports(file):
        top, _, rest = name.partition(".")
        if top == "svdcompress":
            assert rest.split(".")[0] in allowed, f"{file.relative_to(ROOT)}:{line}: {own} may not import {name}"


def module(file: Path) -> str:
    """The dotted name of a file of the package."""
    return ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


def inner_imports(sources: dict[str, list[str]]) -> dict[str, set[str]]:
    """For each module, the modules of its own room that it imports, anywhere (in a function or only for types).

    sources: {module: the dotted names that it imports}. A name is assigned to the longest module that it starts with.
    """
    found: dict[str, set[str]] = {name: set() for name in sources}
    for name, imported in sources.items():
        for full in imported:
            parts = full.split(".")
            longest = (".".join(parts[:n]) for n in range(len(parts), 1, -1))
            target = next((one for one in longest if one in sources), None)
            if target not in (None, name) and target.split(".")[1] == name.split(".")[1]:
                found[name].add(target)
    return found


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Sets of modules that import one another, directly or indirectly."""
    reached: dict[str, set[str]] = {}
    for start in graph:
        found, ahead = set(), list(graph[start])
        while ahead:
            one = ahead.pop()
            if one not in found:
                found.add(one)
                ahead += graph[one]
        reached[start] = found
    tangles = {frozenset(other for other in found if name in reached[other]) for name, found in reached.items()}
    return sorted(sorted(tangle) for tangle in tangles if tangle)


def test_imports_go_one_way_inside_rooms_too():
    """No exceptions: a module that needs one has two ideas in one file, or one idea in two."""
    sources = {module(file): [name for name, _ in imports(file)] for file in FILES if room(file)}
    assert cycles(inner_imports(sources)) == []


def test_cycles_inside_rooms_are_seen(tmp_path):
    (tmp_path / "a.py").write_text("from svdcompress.room._b import thing\n")
    (tmp_path / "b.py").write_text("def late():\n    from svdcompress.room import _c\n")
    (tmp_path / "c.py").write_text("if TYPE_CHECKING:\n    from svdcompress.room._a import Type\n")
    (tmp_path / "d.py").write_text("import svdcompress.room._a\nfrom svdcompress.other._e import outside\n")
    names = {f"svdcompress.room._{one}": [name for name, _ in imports(tmp_path / f"{one}.py")] for one in "abcd"}
    tangle = ["svdcompress.room._a", "svdcompress.room._b", "svdcompress.room._c"]
    assert cycles(inner_imports({**names, "svdcompress.other._e": ["svdcompress.room._a"]})) == [tangle]


def test_private_modules_are_imported_by_their_own_room_alone():
    for file in FILES:
        for name, line in imports(file):
            parts = name.split(".")
            if parts[0] == "svdcompress" and any(part.startswith("_") for part in parts[1:-1]) and room(file) != parts[1]:
                pytest.fail(f"{file.relative_to(ROOT)}:{line}: {name} is private to {parts[1]}")


@pytest.mark.parametrize(("package", "own"), ONE_ROOM.items())
def test_packages_of_one_room(package, own):
    users = {room(file) for file in FILES for name, _ in imports(file) if name.split(".")[0] == package}
    assert users <= {own}


def test_rooms_are_small():
    lines = {str(file.relative_to(ROOT)): len(file.read_text(encoding="utf-8").splitlines()) for file in PYTHON}
    assert {name: count for name, count in lines.items() if count > 400} == {}
    long = {name: count for name, count in lines.items() if count > 300}
    if long:
        warnings.warn(f"rooms that could be two (above 300 lines): {long}", pytest.PytestWarning)


def test_heavy_packages_are_imported_when_used():
    code = f"import sys, svdcompress; print(*[name for name in {LAZY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize(
    "arguments", [["--help"], ["sparsify", "--help"], ["recipes"], ["sparsfy"], ["sparsify", "no-such-recipe"]], ids=" ".join
)
def test_what_needs_no_torch_does_not_wait_for_it(arguments):
    code = (
        "import sys; from svdcompress.cli import main; sys.argv = ['svdc', *sys.argv[1:]]\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, "torch was imported"


def test_public_functions_are_not_hidden_by_rooms_of_the_same_name():
    code = (
        "import svdcompress.prune, svdcompress.convert, svdcompress.recipe._load, svdcompress as svdc\n"
        "assert callable(svdc.prune) and callable(svdc.convert) and callable(svdc.relevance)\n"
        "assert set(svdc.__all__) <= set(dir(svdc)) and all(hasattr(svdc, name) for name in svdc.__all__)\n"
        "assert not hasattr(svdc, 'no_such_name')"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


# Names


def modules() -> list[str]:
    """The names of all modules of the package."""
    return ["svdcompress", *(info.name for info in pkgutil.walk_packages([str(PACKAGE)], "svdcompress."))]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_modules_and_their_public_functions_and_classes_are_explained(file):
    tree = ast.parse(file.read_text(encoding="utf-8"))
    silent = [] if ast.get_docstring(tree) else ["the module"]
    for node in tree.body:
        named = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        if named and not node.name.startswith("_") and not ast.get_docstring(node):
            silent.append(node.name)
    assert silent == [], f"without a docstring in {file.relative_to(ROOT)}"


def test_exported_names_exist_and_their_methods_are_explained():
    silent = []
    for module in map(importlib.import_module, (name for name in modules() if not name.split(".")[-1].startswith("_"))):
        for name in getattr(module, "__all__", ()):
            value = getattr(module, name)
            if inspect.isclass(value) and value.__module__.startswith("svdcompress"):
                silent += [f"{module.__name__}.{name}.{method}" for method in _silent_methods(value)]
            elif inspect.isroutine(value) and not inspect.getdoc(value):
                silent.append(f"{module.__name__}.{name}")
    assert sorted(set(silent)) == []


def _silent_methods(value: type) -> list[str]:
    public = {name: item for name, item in vars(value).items() if not name.startswith("_")}
    routines = {
        n: i for n, i in public.items() if inspect.isfunction(i) or isinstance(i, property | classmethod | staticmethod)
    }
    fields = {name for name, item in routines.items() if getattr(item, "__name__", "") == "<lambda>"}  # from dataclasses
    silent = {name for name in routines if not inspect.getdoc(getattr(value, name))}
    return sorted(silent - fields - {"extra_repr"})


def test_all_of_the_front_is_there():
    missing = [name for name in svdcompress.__all__ if not hasattr(svdcompress, name)]
    assert missing == []


def test_what_the_api_returns_is_read_at_a_glance(tmp_path):
    import torch

    torch.manual_seed(0)
    model = svdcompress.convert(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))).eval()
    with torch.no_grad():
        model[0].log_sigma2[:3] = 20.0
    x = torch.randn(5, 4)
    small = svdcompress.prune(model, x)
    found = [
        svdcompress.plan(model)[0],
        small.pruning,
        svdcompress.mc_predict(small, x, 10),
        svdcompress.export_onnx(small, tmp_path / "model.onnx", x),
        svdcompress.relevance(model),
    ]
    names = ("PlanEntry", "PruneReport", "Prediction", "Exported", "Masks")
    for value, name in zip(found, names, strict=True):
        assert type(value) is getattr(svdcompress, name)
        assert repr(value).startswith(f"{name}(") and len(repr(value)) < 160, repr(value)
    assert "3 units removed" in repr(found[1]) and "mean of shape (5, 3)" in repr(found[2])
    assert issubclass(svdcompress.errors.UsageError, svdcompress.SvdcError)


def test_no_two_test_files_have_one_name():
    """Test folders are not packages: pytest would refuse the second file, but only if both are collected."""
    names = [file.name for file in (ROOT / "tests").rglob("test_*.py")]
    assert {name for name in names if names.count(name) > 1} == set()
