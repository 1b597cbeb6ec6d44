"""Names of Python objects in a recipe: `package.module:factory` and `./file.py:factory`."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import sys
import warnings
import zlib
from pathlib import Path
from typing import Any

from svdcompress.errors import SvdcError
from svdcompress.sources.given import gone, is_given

HOW = "if you know and trust it, pass --trust-code (in Python: trust_code=True)"
"""Advice on code that a file names."""


def is_python_name(name: str) -> bool:
    """Whether a name has the form of a Python object's: `package.module:object` or `path/file.py:object`."""
    module, colon, attribute = name.rpartition(":")
    if not colon or not attribute.isidentifier():
        return False
    return module.endswith(".py") or all(part.isidentifier() for part in module.split("."))


def check_folder(place: str, error: type[SvdcError], field: str) -> None:
    """Raises `error` if a name can only be a folder, by its form, but does not exist, so that the hub is not asked for it."""
    if (place.startswith((".", "/", "~")) or place.count("/") > 1) and not os.path.exists(Path(place).expanduser()):
        raise error(f"{field}: {place}: no such folder")


def import_name(name: str, error: type[SvdcError], field: str) -> Any:
    """The object that a name stands for; modules are also looked up in the current folder, and a file's imports next to it.

    Raises `error`, naming the field, if the module or the object does not exist or if the module fails on import.
    """
    module_name, _, attribute = name.rpartition(":")
    try:
        module = _from_file(Path(module_name)) if module_name.endswith(".py") else _from_path(module_name)
    except FileNotFoundError as cause:
        raise error(f"{field}: {name}: no such file: {module_name}") from cause
    except Exception as cause:  # whatever the user's module raises on import
        raise error(f"{field}: {name}: importing {module_name} failed: {type(cause).__name__}: {cause}") from cause
    if not hasattr(module, attribute):
        if is_given(name):
            raise error(f"{field}: {gone(attribute)}")
        known = ", ".join(sorted(n for n in vars(module) if not n.startswith("_"))[:12])
        raise error(f"{field}: {name}: {module_name} has no {attribute!r}; it has {known}")
    return getattr(module, attribute)


def _from_path(name: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    return importlib.import_module(name)


def _from_file(path: Path) -> Any:
    """A module from a file, under a name of its own, once per path (so that its classes keep their identity).

    Like a script, it may import the files next to it, even later, from its functions and in loader processes. So its folder
    stays in `sys.path`, at the end, where it hides nothing that is installed.
    """
    path = path.resolve()
    if not os.path.isfile(path):
        raise FileNotFoundError(path)
    name = f"_svdc_{path.stem}_{zlib.crc32(str(path).encode()):x}"
    if name in sys.modules:
        return sys.modules[name]
    spec: Any = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    beside = str(path.parent)
    added = beside not in sys.path
    if added:
        sys.path.append(beside)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        if added and beside in sys.path:
            sys.path.remove(beside)
        raise
    _tell_of_others(path)
    return module


def _tell_of_others(path: Path) -> None:
    """Warn if a file imports the name of a file next to it but got another module, installed or from another folder."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the user's syntax, which the import has shown
        nodes = list(ast.walk(ast.parse(path.read_bytes())))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level}
    for name in sorted({name.partition(".")[0] for name in names}):
        own = [file for file in (path.parent / f"{name}.py", path.parent / name / "__init__.py") if file.is_file()]
        got = getattr(sys.modules.get(name), "__file__", None)
        if own and got and Path(got).resolve() not in [file.resolve() for file in own]:
            warnings.warn(f"{path.name}: import {name} loaded {got} instead of {own[0]}: rename the latter", stacklevel=2)
