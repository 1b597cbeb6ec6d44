"""What the processes of a launch find, in all of them; an error of one, too, for which the others would wait."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

from svdcompress.errors import SvdcError, TrainingError

Value = TypeVar("Value")


def launched() -> bool:
    """Whether this process was started by `accelerate launch` or torchrun."""
    return "RANK" in os.environ


def gathered(value: Value) -> list[Value]:
    """The values of all processes of a launch, by rank, in all of them; [value] in a run of one process."""
    if not launched():
        return [value]
    from accelerate.utils import gather_object

    return gather_object([value])


def in_all(work: Callable[[], Value]) -> Value:
    """Do something in every process of a launch; returns each one's own result. The SvdcError of one is raised in all; of any
    other exception, the others get a TrainingError that names it."""
    found: Value | None = None
    failed: SvdcError | None = None
    try:
        found = work()
    except SvdcError as error:
        failed = error
    except (Exception, SystemExit) as error:  # the latter may come from a user's function
        gathered(TrainingError(f"it failed ({type(error).__name__}: {error}); its output has the details"))
        raise
    errors = gathered(failed)
    if failed is not None:
        raise failed
    for rank, error in enumerate(errors):
        if error is not None:
            error.args = (f"process {rank}: {error}",)
            raise error
    return found  # type: ignore[return-value]
