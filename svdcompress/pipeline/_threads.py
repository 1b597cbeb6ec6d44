"""How many of PyTorch's threads a run computes with: one number throughout its training, through stops too."""

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
    """number: those set now. chosen: what an earlier process of the run chose for its training. choose: whether to choose."""

    number: int
    chosen: int | None
    choose: bool


@contextmanager
def same_threads(folder: Path, first: bool, say: Callable[[str], None], choose: bool = False) -> Iterator[Threads]:
    """Within it PyTorch computes with as many threads as the run did before, since another number changes last bits.

    A new run begins with what is set, and keeps it, or chooses another number where it begins to train (choose: see
    `first_training`). A resumed one takes from `state/run.json` what it began with, and from its training on what it chose.
    """
    state = RunState(folder, writer=first)
    own = torch.get_num_threads()
    chosen, began = state.facts.get("torch_threads"), state.facts.get("torch_threads_first")
    choose = choose and chosen is None
    if chosen is None and began is None:
        state.put(**{"torch_threads_first" if choose else "torch_threads": own})
    elif chosen is None and not choose:  # it was stopped before it chose, and now a number is set
        began = own
        state.put(torch_threads=own)
    number = began or chosen or own
    if (goes_on := chosen or number) != own:
        say(f"goes on with {goes_on} threads of PyTorch, as it began (here {own} are set): another number changes the result")
    torch.set_num_threads(number)
    try:
        yield Threads(number, chosen if chosen != number else None, choose)
    finally:
        torch.set_num_threads(own)


@contextmanager
def first_training(threads: Threads, state: RunState, results: RunResults, say: Callable[[str], None]) -> Iterator[None]:
    """Within it the first training settles the number of threads, if that is to be chosen; it is stored before any epoch.

    results: gets `torch_threads`, for the report.
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
