"""Whether a state is being loaded strictly, which torch does not tell the modules."""

from __future__ import annotations

import sys


def loads_strictly() -> bool:
    """What the `load_state_dict` that is under way was given as `strict`; True outside of one.

    torch hands `strict=True` to every module's `_load_from_state_dict`, whatever it was given itself, and looks at the keys
    that are missing afterwards. So what it was given stands nowhere but in its own frame.
    """
    frame = sys._getframe(1)
    while frame is not None:
        strict = frame.f_locals.get("strict") if frame.f_code.co_name == "load_state_dict" else None
        if isinstance(strict, bool):
            return strict
        frame = frame.f_back
    return True
