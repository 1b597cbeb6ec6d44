"""What all stages of a run are given: its recipe, its folder, where it says things, and the report that is being written."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.markup import escape

from svdcompress.errors import Interrupted, OutputError
from svdcompress.pipeline._folder import RunState, Stop
from svdcompress.pipeline._results import RunResults
from svdcompress.recipe import Recipe
from svdcompress.train import Bars, Place

WITH_BARS = ("dense", "train", "recover", "search")
"""Stages that show bars of their own."""

BEAT = 10.0
"""Seconds between two notes of how long an unfinished stage has taken: a run that is killed loses the count of no more."""


@dataclass
class Context:
    """One run. results: what its stages found, for `report.json`; history: its epochs so far."""

    recipe: Recipe
    out: Path
    place: Place
    bars: Bars
    stop: Stop
    say: Callable[[str], None]
    state: RunState
    results: RunResults
    history: list[dict[str, Any]] = field(default_factory=list)
    _stage: str = ""
    _began: float = 0.0  # less what earlier sittings took
    _noted: float = 0.0

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Within it the stage's seconds are counted, over all sittings of the run. Raises Interrupted if asked to stop."""
        self.check(f"before the stage {name}")
        self._stage, self._noted = name, time.monotonic()
        self._began = self._noted - self._unfinished().get(name, 0.0)
        try:
            with nullcontext() if name in WITH_BARS else self.bars.working(name):
                yield
        except BaseException:
            with suppress(OutputError):  # why the stage failed is what matters
                self.beat(every=0)
            raise
        seconds = self.results.seconds
        seconds[name] = seconds.get(name, 0.0) + time.monotonic() - self._began
        self.state.put(seconds=seconds, unfinished={key: took for key, took in self._unfinished().items() if key != name})

    def check(self, where: str) -> None:
        """Raises Interrupted if asked to stop: for work of minutes that no training does. where: as in "while it chose"."""
        if self.stop():
            raise Interrupted(f"stopped by {self.stop.signal} {where}.")

    def beat(self, every: float = BEAT) -> None:
        """Note how long the stage under way has taken, if that was not done for `every` seconds: a sitting may end anywhere."""
        now = time.monotonic()
        if now - self._noted >= every:
            self._noted = now
            self.state.put(unfinished=self._unfinished() | {self._stage: now - self._began})

    def _unfinished(self) -> dict[str, float]:
        return self.state.facts.get("unfinished", {})

    def warn(self, line: str) -> None:
        """A warning, on the screen and in the report; once, if it is the same line again."""
        if line in self.results.warnings:
            return
        self.results.warnings.append(line)
        self.say(f"[yellow]warning:[/] {escape(line)}")

    def note(self, line: str) -> None:
        """What a user may want to know, on the screen and in the report; once."""
        if line in self.results.notes:
            return
        self.results.notes.append(line)
        self.say(f"[dim]note:[/] {escape(line)}")

    def said(self) -> dict[str, list[str]]:
        """All warnings and notes so far."""
        return {"warnings": list(self.results.warnings), "notes": list(self.results.notes)}

    def say_again(self, said: dict[str, list[str]]) -> None:
        """What an earlier sitting has said of work that is not done again."""
        for kind, tell in {"warnings": self.warn, "notes": self.note}.items():
            for line in said.get(kind, []):
                tell(line)

    def attempt(self, what: str, work: Callable[[], Any]) -> None:
        """Make figures. What fails in it is a warning, and under `failed` in the report: it must not cost a run its files."""
        try:
            work()
        except (Interrupted, OutputError):
            raise
        except Exception as error:  # of the test data, of other packages, of the user's model: a figure is never worth the rest
            reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            self.results.failed[what] = reason
            self.warn(f"no figures for {what} ({reason}); the files are not affected")
