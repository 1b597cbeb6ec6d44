"""Explains, in the user's terms, training steps that fail because of the user's own model, loss or machine."""

from __future__ import annotations

import os
import traceback
from pathlib import Path

from svdcompress.errors import ModelError, SvdcError, TrainingError, out_of_memory, shortened

_LIBRARIES = ("site-packages", "dist-packages", os.path.dirname(os.__file__))
_PACKAGE = str(Path(__file__).resolve().parent.parent)


def explained_failure(error: Exception, names: tuple[str, str], batch_size: int, kept: str) -> SvdcError | None:
    """The error in the user's terms, or None if only the package itself can be at fault. names: of the stage, and of its
    section of the recipe. kept: a sentence on what is left of the training."""
    stage, section = names
    reason = f"{type(error).__name__}: {shortened(str(error).strip().partition(chr(10))[0])}"
    frames = traceback.extract_tb(error.__traceback__)
    kind: type[SvdcError] = TrainingError
    if out_of_memory(error):
        text = (
            f"out of memory in a batch of {batch_size}: lower {section}.batch_size, and raise {section}.accumulate by the same "
            "factor to keep as many examples per step"
        )
    elif "Expected more than 1 value per channel" in str(error):
        text = (
            "batch normalization needs at least two examples per batch, but one batch had a single example: set "
            f"{section}.batch_size to 2 or more, and make sure that there is more than one training example ({reason})"
        )
    elif (own := [f for f in frames if _of_user(f.filename)]) and not frames[-1].filename.startswith(_PACKAGE):
        kind, text = ModelError, f"{own[-1].filename}, line {own[-1].lineno}, in {own[-1].name}: {reason}"
    elif any(frame.name == "_call_impl" for frame in frames) and not frames[-1].filename.startswith(_PACKAGE):
        kind, text = ModelError, f"the model failed on a batch: {reason}"
    else:
        return None
    found = kind(f"{stage}: {text}. {kept}")
    found.resumable = True
    return found


def _of_user(file: str) -> bool:
    return not file.startswith((_PACKAGE, "<")) and not any(part in file for part in _LIBRARIES)
