"""The number of PyTorch's threads that a run uses: the same throughout its training, across stops as well."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.markup import escape

from svdcompress.pipeline._folder import RunState
from svdcompress.pipeline._results import RunResults
from svdcompress.train import Trial, choosing


@dataclass(frozen=True)
class Threads:
    """number: the one set now. chosen: the one that an earlier process of the run chose for training, if it is another; else
    None. choose: whether to choose one."""

    number: int
    chosen: int | None
    choose: bool


@contextmanager
def same_threads(folder: Path, first: bool, say: Callable[[str], None], choose: bool = False) -> Iterator[Threads]:
    """Within it, PyTorch uses as many threads as the run did before, because another number changes the last bits of results.

    A new run begins with the number that is set, and keeps it, or chooses another when training begins (choose: see
    `first_training`). A resumed run takes both numbers from `state/run.json`: the one it began with, and, from its training
    on, the one it chose.
    """
    state = RunState(folder, writer=first)
    own = torch.get_num_threads()
    chosen, began = state.facts.get("torch_threads"), state.facts.get("torch_threads_first")
    choose = choose and chosen is None
    if chosen is None and began is None:
        state.put(**{"torch_threads_first" if choose else "torch_threads": own})
    elif chosen is None and not choose:  # it was stopped before it chose; this time the number is set
        began = own
        state.put(torch_threads=own)
    number = began or chosen or own
    if (goes_on := chosen or number) != own:
        say(f"continues with {goes_on} PyTorch threads, as before ({own} are set here): another number changes the result")
    torch.set_num_threads(number)
    try:
        yield Threads(number, chosen if chosen != number else None, choose)
    finally:
        torch.set_num_threads(own)


@contextmanager
def first_training(threads: Threads, state: RunState, results: RunResults, say: Callable[[str], None]) -> Iterator[None]:
    """Within it, the first training determines the number of threads, if that is to be chosen; it is stored before any epoch.

    results: `torch_threads` is set for the report.
    """
    results.torch_threads = threads.chosen or threads.number

    def tell(trial: Trial) -> None:
        state.put(torch_threads=trial.threads)
        results.torch_threads = trial.threads
        if trial.seconds or trial.failed:
            say(f"[dim]{escape(str(trial))}[/]")

    if not (threads.choose or threads.chosen):
        yield
        return
    with choosing(tell, threads.chosen):
        yield
