"""What a user can get wrong, one exit code each.

Every error the package raises on purpose is an `SvdcError`: its message names the file and the field and says what to do.
The command line prints that message alone and exits with the class's `exit_code`; `--debug` adds the traceback.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Any

LONGEST = 4000
"""Characters to which messages are cut: what they quote may come from a file of any size."""


class SvdcError(Exception):
    """Base of all errors that are the caller's to mend. A message of more than LONGEST characters loses its middle."""

    exit_code = 1
    resumable = False
    """Whether a run can go on after it once its cause is mended: what was trained is kept."""

    def __init__(self, message: object = "") -> None:
        super().__init__(shortened(str(message), LONGEST))


class UsageError(SvdcError):
    """Options or arguments that do not go together (the same code that Typer uses)."""

    exit_code = 2


class RecipeError(SvdcError):
    """A recipe that cannot be read: unknown field, wrong value, no such file."""

    exit_code = 3


class ModelError(SvdcError):
    """A model that cannot be made, converted or run."""

    exit_code = 4


class CheckpointError(SvdcError):
    """Weights that are missing, truncated, unsafe to read, or made for another model."""

    exit_code = 5


class DataError(SvdcError):
    """Data that is missing, empty, out of range or not finite."""

    exit_code = 6


class OutputError(SvdcError):
    """A place that cannot be written, or that holds something else already."""

    exit_code = 7


class TrainingError(SvdcError):
    """Training that cannot go on, such as a loss that is not finite."""

    exit_code = 8


class PruneError(SvdcError):
    """Masks or example inputs that do not fit the model to be pruned."""

    exit_code = 9


class ExportError(SvdcError):
    """A model that ONNX cannot hold, or an exported file that disagrees with PyTorch."""

    exit_code = 10


class DependencyError(SvdcError):
    """An optional package that this command needs and that is not installed."""

    exit_code = 11


class TrustError(SvdcError):
    """A file that names code to be run, which needs your word: --trust-code."""

    exit_code = 12


class VerifyError(SvdcError):
    """A run's files that are not what its report says of them."""

    exit_code = 13
    resumable = True


class Interrupted(SvdcError):
    """Stopped by a signal; what was done is saved and can be resumed."""

    exit_code = 130


_MEMORY = re.compile(
    r"not enough memory|can't allocate memory|cannot allocate memory|out of memory|failed to allocate memory|bad_alloc",
    re.IGNORECASE,
)


def out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that there is no memory left, on the processor or an accelerator."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    foreign = isinstance(error, RuntimeError) or type(error).__module__.startswith("onnxruntime")
    return foreign and bool(_MEMORY.search(str(error)))


def shortened(text: str, length: int = 200) -> str:
    """A text of at most so many characters: a longer one loses its middle, and says how much."""
    if len(text) <= length:
        return text
    note = f" ... ({len(text) - length:,} characters left out) ... "
    head = max(0, length - len(note)) * 2 // 3
    return text[:head] + note + text[len(text) - max(0, length - len(note) - head) :]


def explained(error: Any, most: int = 3) -> str:
    """The first complaints of a pydantic ValidationError in one line: field, what is wrong, what was there."""
    problems = error.errors(include_url=False, include_context=False)
    lines = []
    for each in problems[:most]:
        field = shortened(".".join(map(str, each["loc"])), 80) or "all of it"
        lines.append(f"{field}: {shortened(each['msg'])} (got {shortened(repr(each['input']), 60)})")
    return "; ".join(lines) + (f" (and {len(problems) - most} more)" if len(problems) > most else "")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that was probably meant, for a message; None where none is like it."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)), None)
