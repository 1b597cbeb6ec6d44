"""What a user can get wrong, one exit code each.

Every error the package raises on purpose is an `SvdcError`: its message names the file and the field and says what to do.
The command line prints that message alone and exits with the class's `exit_code`; `--debug` adds the traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class SvdcError(Exception):
    """Base of all errors that are the caller's to mend."""

    exit_code = 1


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


class Interrupted(SvdcError):
    """Stopped by a signal; what was done is saved and can be resumed."""

    exit_code = 130


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that was probably meant, for a message; None where none is like it."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)), None)
