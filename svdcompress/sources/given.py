"""Models, data and losses that were handed over in Python, under names that a recipe can hold.

`svdcompress.sources.given:model` is looked up as any factory of the user's is; here it stands for the object of the call that
is under way. A recipe in a finished run's folder names it still: hand the same objects over again to open it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_GIVEN: dict[str, Any] = {}


def __getattr__(name: str) -> Any:
    """A factory of what is under a name. Raises AttributeError for what was not given."""
    if name not in _GIVEN:
        raise AttributeError(f"{name}: handed over in Python, by a call that is over; hand it over again (svdcompress.given)")
    found = _GIVEN[name]
    if name == "loss":
        return found
    if isinstance(found, nn.Module):
        return lambda: copy.deepcopy(found)  # each maker gets a fresh one, as from a factory
    return lambda: found


@contextmanager
def given(**objects: Any) -> Iterator[dict[str, str]]:
    """Within it, objects can be named; gives {key: name}. None is left out.

    Raises RuntimeError inside another one: two calls cannot share a process at once.
    """
    if _GIVEN:
        raise RuntimeError("another call with objects of its own is under way in this process; wait until it is done")
    _GIVEN.update({key: value for key, value in objects.items() if value is not None})
    try:
        yield {key: f"{__name__}:{key}" for key in _GIVEN}
    finally:
        _GIVEN.clear()
