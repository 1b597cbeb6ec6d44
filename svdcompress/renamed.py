"""Former names of public functions and arguments, which work for one more release and warn with the present name."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def renamed_arguments(**names: str) -> Callable[[Function], Function]:
    """Let a function take arguments by former names too, with a DeprecationWarning. names: {former: present}.

    Example:
        >>> @renamed_arguments(keep="mask")
        ... def kl(mask=None): ...
    """

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def with_former_names(*args: Any, **kwargs: Any) -> Any:
            for former in names.keys() & kwargs.keys():
                told = f"{function.__qualname__}: the argument {former!r} is called {names[former]!r} now"
                warnings.warn(told, DeprecationWarning, stacklevel=2)
                kwargs[names[former]] = kwargs.pop(former)
            return function(*args, **kwargs)

        return with_former_names  # type: ignore[return-value]

    return decorate


def former_names(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """A `__getattr__` for a module in which names have changed; a former name warns. names: {former: present}.

    Example:
        >>> __getattr__ = former_names(__name__, {"draw": "plot"})
    """

    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warnings.warn(f"{module}.{name} is now {names[name]}", DeprecationWarning, stacklevel=2)
        return getattr(sys.modules[module], names[name])

    return find
