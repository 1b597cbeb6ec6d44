"""The single table of operators, which the other files in this folder fill.

To teach the tracer an operator, write a handler in one of these files (or in a new one that `__init__` imports) and decorate
it with `@operator("its_name")`: the name without namespace, overload and the trailing `_` of in-place operators. For each
result, the handler states with `trace.put` which unit each element belongs to and whether the input reaches it (if not, it is
a constant). For each operand, it states with `trace.fix`, `trace.pin` and `trace.seal` what must be kept and why. It raises
`Unfollowed` for a case that it does not know: the operands are then pinned, and what it has stated so far remains valid (it
can only keep more). Anything else that it raises is a bug.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from svdcompress.prune._trace import Trace

Handler = Callable[[Trace, str, tuple, dict, Any], None]
"""Takes a trace, an operator's name, its arguments (positional, keyword) and its result."""


class Unfollowed(Exception):
    """A case of an operator through which units cannot be followed."""


@dataclass(frozen=True)
class Operator:
    """What is known about an operator. factors: positions of a product's factors among its arguments, () for others."""

    handler: Handler
    factors: tuple[int, ...] = ()


OPERATORS: dict[str, Operator] = {}
"""Operators by name."""

TAGGED: dict[torch.Tag, Operator] = {}
"""Operators by a tag that torch gives them, for those that are not in the table by name."""


def operator(*names: str, factors: tuple[int, ...] = (), tag: torch.Tag | None = None) -> Callable[[Handler], Handler]:
    """Register a handler under these names, and for all other operators with this tag."""

    def enter(handler: Handler) -> Handler:
        known = Operator(handler, factors)
        for name in names:
            if name in OPERATORS:
                raise ValueError(f"{name} has two handlers: {OPERATORS[name].handler.__name__} and {handler.__name__}")
            OPERATORS[name] = known
        if tag is not None:
            TAGGED[tag] = known
        return handler

    return enter


def known(func: Any, name: str) -> Operator | None:
    """What is known about an operator, or None."""
    return OPERATORS.get(name) or next((entry for tag, entry in TAGGED.items() if tag in func.tags), None)


# Bugs


class HandlerBug(BaseException):
    """A handler raised something other than `Unfollowed`, within `bugs_raised`.

    Not an Exception: a model's forward pass, and `prune` around it, may catch those and go on.
    """


_raising = False


@contextmanager
def bugs_raised() -> Iterator[None]:
    """Raise bugs of handlers within this context; otherwise they pin the operands, with a note in the report."""
    global _raising
    before, _raising = _raising, True
    try:
        yield
    finally:
        _raising = before


def note_bug(trace: Trace, name: str, handler: Handler, error: Exception) -> None:
    """Deal with a handler that failed: raise an error in tests; leave a note for users, whose units are kept.

    Raises HandlerBug within `bugs_raised`.
    """
    what = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:120]}"
    if _raising:
        raise HandlerBug(f"{handler.__name__}, which follows {name}: {what}") from error
    note = (
        f"units that enter {name} in {trace.stack[-1] or 'the model'} are kept because of a bug in svdcompress ({what}): "
        "please report it"
    )
    if note not in trace.bugs:
        trace.bugs.append(note)
