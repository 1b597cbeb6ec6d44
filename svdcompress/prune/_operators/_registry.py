"""The one table of operators; the files beside this one fill it.

To teach the tracer an operator, write a handler in one of these files (or in a new one that `__init__` imports) and put
`@operator("its_name")` over it, the name without namespace, overload and the `_` of being in place. A handler says of each
result, by `trace.put`, which unit each element belongs to and whether the input reaches it (what it does not reach is a
constant); and of what entered, by `trace.fix`, `trace.pin` and `trace.seal`, what has to stay and why. It raises `Unfollowed`
for a case that it does not know: what enters is then pinned, and what it has said by then (it can only hold more) stays said.
Anything else it raises is a bug.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from svdcompress.prune._trace import Trace

Handler = Callable[[Trace, str, tuple, dict, Any], None]
"""From a trace, an operator's name, its arguments and what it returned."""


class Unfollowed(Exception):
    """A case of an operator through which units cannot be followed."""


@dataclass(frozen=True)
class Operator:
    """What is known of an operator. factors: where the factors of a product are among its arguments, () if it is none."""

    handler: Handler
    factors: tuple[int, ...] = ()


OPERATORS: dict[str, Operator] = {}
"""By name."""

TAGGED: dict[torch.Tag, Operator] = {}
"""For operators that are not in the table by name, by a tag that torch gives them."""


def operator(*names: str, factors: tuple[int, ...] = (), tag: torch.Tag | None = None) -> Callable[[Handler], Handler]:
    """Enter a handler under these names, and for all others with this tag."""

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
    """What is known of an operator, None for nothing."""
    return OPERATORS.get(name) or next((entry for tag, entry in TAGGED.items() if tag in func.tags), None)


# Bugs


class HandlerBug(BaseException):
    """A handler raised something else than `Unfollowed`, where bugs are to be seen.

    Not an Exception: a model's forward pass, and `prune` around it, may catch these and go on.
    """


_raising = False


@contextmanager
def bugs_raised() -> Iterator[None]:
    """Within it a handler's own bug is raised; otherwise what enters the operator stays, with a note in the report."""
    global _raising
    before, _raising = _raising, True
    try:
        yield
    finally:
        _raising = before


def note_bug(trace: Trace, name: str, handler: Handler, error: Exception) -> None:
    """A handler failed: for the tests an error, for users a note and units that stay.

    Raises HandlerBug within `bugs_raised`.
    """
    what = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:120]}"
    if _raising:
        raise HandlerBug(f"{handler.__name__}, which follows {name}: {what}") from error
    note = (
        f"units that enter {name} in {trace.stack[-1] or 'the model'} stay, by a bug of svdcompress ({what}): please report it"
    )
    if note not in trace.bugs:
        trace.bugs.append(note)
