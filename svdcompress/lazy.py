"""Packages that import their public names on first use (PEP 562), so that `svdc --help` need not wait for torch."""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any


def import_when_used(package: str, homes: Mapping[str, Sequence[str]]) -> None:
    """Make a package import its public names from its modules on first use. homes: {module: names}.

    A name takes precedence over a module of the same name: `svdcompress.prune` is the function.
    """
    home = {name: f"{package}.{module}" for module, names in homes.items() for name in names}

    class Front(ModuleType):
        def __setattr__(self, name: str, value: Any) -> None:
            # The import system binds each loaded module in its package; that would hide a function of the same name.
            if not (name in home and isinstance(value, ModuleType)):
                super().__setattr__(name, value)

        def __getattr__(self, name: str) -> Any:
            if name not in home:
                raise AttributeError(f"module {package!r} has no attribute {name!r}")
            state = random.getstate()  # some packages draw numbers as they are imported (rich)
            value = getattr(importlib.import_module(home[name]), name)
            random.setstate(state)
            super().__setattr__(name, value)
            return value

        def __dir__(self) -> list[str]:
            return sorted({*super().__dir__(), *home})

    sys.modules[package].__class__ = Front
