"""Damaged files of a stopped run: the error that names one also says what to do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from svdcompress import checkpoint
from svdcompress.errors import CheckpointError, shortened


@contextmanager
def cured(file: Path, by: str) -> Iterator[None]:
    """Within it, an error about what a file holds ends with what to do: the run can be resumed then."""
    try:
        yield
    except CheckpointError as error:
        raise resumable(f"{str(error).rstrip('.')}; {by}") from error
    except (KeyError, TypeError) as error:
        raise resumable(f"{file}: damaged ({shortened(f'{type(error).__name__}: {error}')}); {by}") from error


def check_kept(files: Mapping[Path, int | None], search: Path) -> None:
    """Raises CheckpointError for a file of a finished trial that is missing, damaged or belongs to another trial: the
    trial isn't made again, so the search would fail at its end. files: with the number of the trial that each should hold
    (None: several may share it)."""
    by = f"remove {search} to search again"
    for file, number in files.items():
        if not file.is_file():
            raise resumable(f"{file}: missing, or from an earlier version; {by}")
        with cured(file, by):
            manifest = checkpoint.read_manifest(file)
            checkpoint.read_tensors(file, manifest)
            found = manifest.get("extra", {}).get("trial", number)  # earlier versions stored none
            if number is not None and found != number:
                raise CheckpointError(f"{file}: it holds trial {shortened(str(found), 20)}")


def resumable(text: str) -> CheckpointError:
    """An error after which the run can be resumed: the message that a user sees ends with the command for it."""
    error = CheckpointError(text)
    error.resumable = True
    return error
