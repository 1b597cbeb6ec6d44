"""The errors that a user can fix, each class with its own exit code.

Every error the package raises on purpose is an `SvdcError`: its message names the file and the field and says what to do.
The command line prints that message alone and exits with the class's `exit_code`; `--debug` adds the traceback.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Any

LONGEST = 4000
"""Most characters in a message; longer ones are cut, as what they quote may come from a file of any size."""


class SvdcError(Exception):
    """Base of all errors that the caller can fix. A message of more than LONGEST characters loses its middle."""

    exit_code = 1
    resumable = False
    """Whether a run can be resumed once the cause is fixed: what was trained is kept."""

    def __init__(self, message: object = "") -> None:
        super().__init__(shortened(str(message), LONGEST))


class UsageError(SvdcError):
    """Options or arguments that are wrong, or don't go together."""

    exit_code = 2


class RecipeError(SvdcError):
    """Recipe: unknown field, wrong value, or no such file."""

    exit_code = 3


class ModelError(SvdcError):
    """Model: can't be made, converted or run."""

    exit_code = 4


class CheckpointError(SvdcError):
    """Weights: missing, truncated, unsafe, or made for another model."""

    exit_code = 5


class DataError(SvdcError):
    """Data: missing, empty, out of range or not finite."""

    exit_code = 6


class OutputError(SvdcError):
    """Output: can't be written, or already holds something else."""

    exit_code = 7


class TrainingError(SvdcError):
    """Training can't continue, e.g. the loss is not finite."""

    exit_code = 8


class PruneError(SvdcError):
    """Pruning: masks or example inputs don't fit the model."""

    exit_code = 9


class ExportError(SvdcError):
    """ONNX can't represent the model, or the file disagrees with PyTorch."""

    exit_code = 10


class DependencyError(SvdcError):
    """An optional package is needed and not installed."""

    exit_code = 11


class TrustError(SvdcError):
    """A file names code to run: allow it with --trust-code."""

    exit_code = 12


class VerifyError(SvdcError):
    """A run's files are not what its report says."""

    exit_code = 13
    resumable = True


class Interrupted(SvdcError):
    """Stopped by a signal; continue with --resume."""

    exit_code = 130


_MEMORY = re.compile(
    r"not enough memory|can't allocate memory|cannot allocate memory|out of memory|failed to allocate memory|bad_alloc",
    re.IGNORECASE,
)


def out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that the CPU or an accelerator is out of memory."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    foreign = isinstance(error, RuntimeError) or type(error).__module__.startswith("onnxruntime")
    return foreign and bool(_MEMORY.search(str(error)))


def shortened(text: str, length: int = 200) -> str:
    """A text cut to at most `length` characters: a longer one loses its middle, and says how much."""
    if len(text) <= length:
        return text
    note = f" ... ({len(text) - length:,} characters left out) ... "
    head = max(0, length - len(note)) * 2 // 3
    return text[:head] + note + text[len(text) - max(0, length - len(note) - head) :]


def counted(number: int, what: str) -> str:
    """A number of things, for a message.

    >>> counted(1, "example"), counted(1200, "example")
    ('1 example', '1,200 examples')
    """
    return f"{number:,} {what}{'s' * (number != 1)}"


def cause(error: BaseException) -> str:
    """The first line of another library's error, for a message; shapes that don't match are put into words.

    >>> cause(RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x64 and 8x4)"))
    'a Linear layer takes 8 features and got 64'
    """
    line = shortened(str(error).strip().partition("\n")[0])
    found = re.search(r"mat1 and mat2 shapes cannot be multiplied \((\d+)x(\d+) and (\d+)x(\d+)\)", line)
    if found:
        return f"a Linear layer takes {found[3]} features and got {found[2]}"
    return line


def explained(error: Any, most: int = 3) -> str:
    """The first complaints of a pydantic ValidationError in one line: field, what is wrong, what was there."""
    problems = error.errors(include_url=False, include_context=False)
    lines = []
    for each in problems[:most]:
        field = shortened(".".join(map(str, each["loc"])), 80) or "all of it"
        lines.append(f"{field}: {shortened(each['msg'])} (got {shortened(repr(each['input']), 60)})")
    return "; ".join(lines) + (f" (and {len(problems) - most} more)" if len(problems) > most else "")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that was probably meant, for a message; None if none is similar."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)), None)
