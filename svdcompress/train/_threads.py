"""Finds the number of PyTorch threads with which a fit trains fastest, by a short trial of its own steps."""

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
"""Turns for each number of threads, so that a burst of other work on the machine does not slow down only one of them."""

TURN = 0.1
"""Seconds that a turn lasts; it has at least one step."""

MOST = 3.0
"""Seconds after which no further turn begins: compared with steps that long, the time lost to waiting threads is small."""

GAIN = 1.1
"""More threads must be faster by this factor: they take more of a shared machine, and wait for each other once it is busy."""

HOPELESS = 2.0
"""A number of threads that is slower than the best one by this factor after a round gets no further turn."""


@dataclass(frozen=True)
class Trial:
    """The result of a trial.

    threads: the number to use. seconds: of a step, by number of threads; empty if none were tried. failed: why the trial
    failed; "" if it did not.
    """

    threads: int
    seconds: dict[int, float] = field(default_factory=dict)
    failed: str = ""

    def __str__(self) -> str:
        """One line with all figures."""
        if self.failed:
            return f"{self.threads} PyTorch threads, as set: the trial of other numbers failed ({self.failed})"
        if not self.seconds:
            return f"{self.threads} PyTorch threads, as set"
        steps = ", ".join(f"{1000 * time:.3g} ms with {number}" for number, time in sorted(self.seconds.items()))
        return f"PyTorch threads: {self.threads} (a step takes {steps})"


@dataclass
class _Choice:
    """The choice that the first fit within `choosing` has to make."""

    tell: Callable[[Trial], None]
    known: int | None
    set_before: int
    made: bool = False


_choice: ContextVar[_Choice | None] = ContextVar("choice of threads", default=None)
# Not an argument of `fit`: the number belongs to the process, and whichever fit comes first sets it for all that follows.


@contextmanager
def choosing(tell: Callable[[Trial], None], known: int | None = None) -> Iterator[None]:
    """While the body runs, the first fit that has an epoch to train settles how many threads PyTorch uses from then on.

    It tries its own steps, on a copy of its model, with 1, 2, 4, ... threads up to the number that is set. That number stays on
    devices other than the CPU, with several processes, and if other code (such as the model's) has changed it in the meantime.

    tell: called with the `Trial` before anything is trained. known: the number that an earlier process chose; it is used
    without a trial.
    """
    token = _choice.set(_Choice(tell, known, torch.get_num_threads()))
    try:
        yield
    finally:
        _choice.reset(token)


def settle(work: Work, trains: bool) -> None:
    """Set the number of threads for a fit, if `choosing` asks for it and no fit has done so yet.

    trains: whether the fit has an epoch to train; if not, only a known number is set.
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
            warnings.simplefilter("ignore")  # training will repeat them
            return fastest(_step_of(work), most)
    except Exception as error:  # from the user's model or data: training will meet it too, and explain it
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
            step()  # warm-up: new threads start, and others become idle
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
    """A step of a fit as at its end (with the KL), on a copy of the model and always with the same batch."""
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
