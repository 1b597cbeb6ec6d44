"""What the processes of a launch find, in all of them; an error of one, too, for which the others would wait."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Timer
from typing import Any, TypeVar

import torch
from torch.distributed import distributed_c10d

from svdcompress.errors import SvdcError, TrainingError, UsageError

Value = TypeVar("Value")

PATIENCE = 30.0
"""Seconds that a process waits for the others of its launch before it says so."""

EYEBLINK = 0.05
"""Seconds between two looks for the others."""

MET = "svdcompress"
"""What the names begin with by which processes tell each other, in their group's store, that they have arrived."""

_met = 0  # how often this process has met the others


def launched() -> bool:
    """Whether this process was started by `accelerate launch` or torchrun."""
    return "RANK" in os.environ


@contextmanager
def telling_of_waits() -> Iterator[None]:
    """Say that this process waits for the others of its launch, if the body takes longer than PATIENCE."""
    rank, world = (os.environ.get(name, "?") for name in ("RANK", "WORLD_SIZE"))
    line = (
        f"process {rank} of {world} waits for the others: all of them have to make the same call, such as svdcompress.sparsify"
    )
    timer = Timer(PATIENCE, sys.stderr.write, [f"{line}\n"])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def meet(call: str) -> None:
    """Wait until all processes of a launch have come here. Raises UsageError, when their group's time is up, if some did not.

    They tell each other through the store of their group: a barrier would take another one, of the caller's own code, for ours.
    call: what all processes have to call.
    """
    global _met
    if not launched() or not torch.distributed.is_initialized():
        return
    store = distributed_c10d._get_default_store()
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    names = [f"{MET}/{_met}/{each}" for each in range(world)]
    store.set(names[rank], "here")
    up = time.monotonic() + store.timeout.total_seconds()  # type: ignore[attr-defined] (its stub lacks it)
    with telling_of_waits():
        for other, name in enumerate(names):
            while not store.check([name]):  # store.wait could not be interrupted, and leaves its connection unusable
                if time.monotonic() > up:
                    store.delete_key(names[rank])
                    raise UsageError(
                        f"{call} was called in process {rank} of {world}, but not in process {other}: call it in all of them, "
                        "or outside of torchrun and accelerate launch"
                    )
                time.sleep(EYEBLINK)
    _met += 1


def gathered(value: Value) -> list[Value]:
    """The values of all processes of a launch, by rank, in all of them; [value] in a run of one process."""
    if not launched():
        return [value]
    from accelerate.utils import gather_object

    return gather_object([value])


def tried(work: Callable[[], Value], tell: Callable[[SvdcError], Any], who: str) -> tuple[Value | None, SvdcError | None]:
    """The result, or the SvdcError, of doing something. Any other exception is raised here, once `tell` has passed a
    TrainingError that names it, of `who`, to the other processes."""
    try:
        return work(), None
    except SvdcError as error:
        return None, error
    except (Exception, SystemExit) as error:  # the latter may come from a user's function
        tell(TrainingError(f"{who} failed ({type(error).__name__}: {error}); its output has the details"))
        raise


def in_all(work: Callable[[], Value]) -> Value:
    """Do something in every process of a launch; returns each one's own result. The SvdcError of one is raised in all; of any
    other exception, the others get a TrainingError that names it."""
    found, failed = tried(work, gathered, "it")
    errors = gathered(failed)
    if failed is not None:
        raise failed
    for rank, error in enumerate(errors):
        if error is not None:
            error.args = (f"process {rank}: {error}",)
            raise error
    return found  # type: ignore[return-value]
