"""How many of PyTorch's threads a fit trains fastest with, by a short trial of its own steps."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace

import torch

from svdcompress.errors import shortened
from svdcompress.objective import ELBO
from svdcompress.train._epoch import forward, train_mode
from svdcompress.train._network import Network
from svdcompress.train._steps import Steps
from svdcompress.train._work import Work

ROUNDS = 3
"""Times that each number gets its turn, so that a burst of others' work does not hit one alone."""

TURN = 0.1
"""Seconds of a turn, at least one step."""

MOST = 3.0
"""Seconds after which no further turn begins: where steps take as long as that, waiting threads are little beside them."""

GAIN = 1.1
"""More threads must be faster by this factor: they take more of a shared machine, and wait for each other once it is busy."""

HOPELESS = 2.0
"""A number that is slower than the best one by this factor after a round gets no further turn."""


@dataclass(frozen=True)
class Trial:
    """What a trial found.

    threads: the number that is used. seconds: of a step, by number of threads; empty where none were tried. failed: why not.
    """

    threads: int
    seconds: dict[int, float] = field(default_factory=dict)
    failed: str = ""

    def __str__(self) -> str:
        """One line with all figures."""
        if self.failed:
            return f"{self.threads} threads of PyTorch, as set: the trial of others failed ({self.failed})"
        if not self.seconds:
            return f"{self.threads} threads of PyTorch, as set"
        steps = ", ".join(f"{1000 * time:.3g} ms with {number}" for number, time in sorted(self.seconds.items()))
        return f"threads of PyTorch: {self.threads} (a step takes {steps})"


@dataclass
class _Choice:
    """What the first fit within `choosing` is to settle."""

    tell: Callable[[Trial], None]
    known: int | None
    set_before: int
    made: bool = False


_choice: ContextVar[_Choice | None] = ContextVar("choice of threads", default=None)
# Not an argument of `fit`: the number is the process's, set once for all that follows, whichever fit is the first.


@contextmanager
def choosing(tell: Callable[[Trial], None], known: int | None = None) -> Iterator[None]:
    """Within it the first fit that has an epoch to train settles how many threads PyTorch uses from then on.

    It tries its own steps, on a copy of its model, with 1, 2, 4, ... threads up to the number that is set. That number stays on
    another device than the CPU, among other processes, and where somebody sets one meanwhile (a model's own code).

    tell: called with the `Trial` before anything is trained. known: what an earlier process settled; there is no trial then.
    """
    token = _choice.set(_Choice(tell, known, torch.get_num_threads()))
    try:
        yield
    finally:
        _choice.reset(token)


def settle(work: Work, trains: bool) -> None:
    """Set the number of threads for a fit, where `choosing` asks for it and nobody did yet.

    trains: whether the fit has an epoch to train; else only a number that is known is set.
    """
    choice = _choice.get()
    if choice is None or choice.made or not (trains or choice.known):
        return
    choice.made = True
    now = torch.get_num_threads()
    if choice.known is not None:
        torch.set_num_threads(choice.known)
    elif now == 1 or now != choice.set_before or work.device.type != "cpu" or work.world > 1:
        choice.tell(Trial(now))
    else:
        found = _tried(work, now)
        torch.set_num_threads(found.threads)
        choice.tell(found)


def _tried(work: Work, most: int) -> Trial:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the training says it all again
            return fastest(_step_of(work), most)
    except Exception as error:  # of the user's model or data: training will meet it too, and say whose it is
        return Trial(most, failed=shortened(f"{type(error).__name__}: {error}"))


def fastest(step: Callable[[], object], most: int) -> Trial:
    """The number of threads, up to `most`, with which a step is fastest, or fewer where that makes little difference."""
    numbers = [*(2**power for power in range(most.bit_length()) if 2**power < most), most]
    spent, steps, started = dict.fromkeys(numbers, 0.0), dict.fromkeys(numbers, 0), time.perf_counter()
    left = list(reversed(numbers))  # the largest first: it is what a large model needs
    for _ in range(ROUNDS):
        for number in left:
            if steps[most] and time.perf_counter() - started > MOST:
                break
            torch.set_num_threads(number)
            step()  # threads are made, and others left behind
            begun, done = time.perf_counter(), 0
            while not done or time.perf_counter() - begun < TURN:
                step()
                done += 1
            spent[number] += time.perf_counter() - begun
            steps[number] += done
        best = min(spent[number] / steps[number] for number in numbers if steps[number])
        left = [number for number in left if steps[number] and spent[number] / steps[number] < HOPELESS * best]
    seconds = {number: spent[number] / steps[number] for number in numbers if steps[number]}
    chosen = min(seconds)
    for number, time_of_step in seconds.items():
        chosen = number if time_of_step * GAIN < seconds[chosen] else chosen
    return Trial(chosen, seconds)


def _step_of(work: Work) -> Callable[[], None]:
    """A step of a fit as it is at its end (with the KL), on a copy of the model and always the same batch."""
    settings, elbo, model = work.settings, work.elbo, copy.deepcopy(work.model)
    if elbo is not None:
        elbo = ELBO(model, elbo.nll, elbo.num_examples, elbo.schedule)
    trial = replace(work, model=model, elbo=elbo, compiled=False)
    x, y = work.first_batch("threads")
    network, steps = Network(trial), Steps(trial)
    train_mode(trial, settings.norms == "keep")

    def step() -> None:
        loss, _, _ = forward(trial, network, x, y, settings.epochs)
        steps.backward(loss)
        steps.step(settings.epochs, settings.accumulate)

    return step
