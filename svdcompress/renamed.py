"""Former names of public things, which work for one more release and say what to write instead."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
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
