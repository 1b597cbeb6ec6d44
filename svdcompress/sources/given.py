"""Models, data and losses that were handed over in Python, under names that a recipe can hold.

`svdcompress.sources.given:model` is looked up like any factory of the user's; here it stands for the object passed to the
current call. The recipe in a finished run's folder still names it: `svdcompress.load_run` takes the same objects again.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

from torch import nn

from svdcompress.errors import UsageError

_GIVEN: dict[str, Any] = {}
_LOCK = Lock()

AGAIN = {
    "model": "open a finished run with svdcompress.load_run(folder, model=...), or on the command line with --model "
    "FILE.py:FACTORY; ",
    "data": "open a finished run with svdcompress.load_run(folder, data=...); ",
    "loss": "",
}
"""What can be handed over, and how to do so again for a finished run."""

RESUME = "resume a stopped one with svdcompress.sparsify(..., resume=True)"


def is_given(name: str | None) -> bool:
    """Whether a name in a recipe stands for an object that was handed over in Python."""
    module, _, key = (name or "").partition(":")
    return module == __name__ and key in AGAIN


def named(key: str) -> str:
    """The name, as in a recipe, of what was handed over under a key of `AGAIN`."""
    return f"{__name__}:{key}"


def shown(name: str | None) -> str:
    """A recipe's name for messages: "the model object" and the like if it was handed over in Python."""
    return f"the {str(name).partition(':')[2]} object" if is_given(name) else str(name)


def gone(key: str) -> str:
    """The message about an object whose call is over."""
    return f"passed in Python, to a call that has ended: {AGAIN.get(key, '')}{RESUME}"


def __getattr__(name: str) -> Any:
    """A factory that returns the object under a name, or the loss itself. Raises AttributeError if none was given."""
    if name not in _GIVEN:
        raise AttributeError(f"{name}: {gone(name)}")
    found = _GIVEN[name]
    if name == "loss":
        return found
    if isinstance(found, nn.Module):
        return lambda: copy.deepcopy(found)  # each call returns a fresh one, as from a factory
    return lambda: found


@contextmanager
def given(**objects: Any) -> Iterator[dict[str, str]]:
    """Within this context, objects can be named in a recipe; yields {key: name}, without objects that are None.

    Raises UsageError inside another such context: two calls cannot share a process at once.
    """
    with _LOCK:
        if _GIVEN:
            raise UsageError("another call with objects of its own is under way in this process; wait until it is done")
        _GIVEN.update({key: value for key, value in objects.items() if value is not None})
    try:
        yield {key: named(key) for key in _GIVEN}
    finally:
        _GIVEN.clear()
