"""Whether a state is being loaded strictly, which torch does not tell the modules."""

from __future__ import annotations

import sys


def loads_strictly() -> bool:
    """The `strict` that the current `load_state_dict` was given; True outside of one.

    torch passes `strict=True` to every module's `_load_from_state_dict`, whatever it was given itself, and looks for missing
    keys afterwards. So the value it was given is found only in its own frame.
    """
    frame = sys._getframe(1)
    while frame is not None:
        strict = frame.f_locals.get("strict") if frame.f_code.co_name == "load_state_dict" else None
        if isinstance(strict, bool):
            return strict
        frame = frame.f_back
    return True
