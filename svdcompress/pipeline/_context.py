"""What every stage of a run is given: its recipe, its folder, its output to the user, and the report so far."""

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
from svdcompress.recipe import Recipe, RecoverSection
from svdcompress.train import Bars, Place

WITH_BARS = ("dense", "train", "recover", "search")
"""Stages that show their own progress bars."""

BEAT = 10.0
"""Seconds between two records of how long an unfinished stage has taken: a killed run loses count of no more than that."""


@dataclass
class Context:
    """One run. results: what its stages found, for `report.json`; history: its epochs so far.

    steady: how recovery trains where running statistics stay, if the recipe leaves the optimizer open (see `_recovery.steady`).
    """

    recipe: Recipe
    out: Path
    place: Place
    bars: Bars
    stop: Stop
    say: Callable[[str], None]
    state: RunState
    results: RunResults
    history: list[dict[str, Any]] = field(default_factory=list)
    steady: RecoverSection | None = None
    _stage: str = ""
    _began: float = 0.0  # minus what the stage took before a stop
    _noted: float = 0.0

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count the stage's seconds while the body runs, added to those before a stop. Raises Interrupted if asked to stop."""
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

    @property
    def stage_now(self) -> str:
        """The name of the stage under way, or of the last one; "" before the first."""
        return self._stage

    def check(self, where: str) -> None:
        """Raises Interrupted if asked to stop: for minutes of work outside training. where: such as "while it chose"."""
        if self.stop():
            raise Interrupted(f"stopped by {self.stop.signal} {where}.")

    def beat(self, every: float = BEAT) -> None:
        """Record how long the current stage has taken, unless done in the last `every` seconds: a run may be killed
        anywhere."""
        now = time.monotonic()
        if now - self._noted >= every:
            self._noted = now
            self.state.put(unfinished=self._unfinished() | {self._stage: now - self._began})

    def _unfinished(self) -> dict[str, float]:
        return self.state.facts.get("unfinished", {})

    def warn(self, line: str) -> None:
        """Show a warning and add it to the report, unless the same line is there already."""
        if line in self.results.warnings:
            return
        self.results.warnings.append(line)
        self.say(f"[yellow]warning:[/] {escape(line)}")

    def note(self, line: str) -> None:
        """Show a note that a user may want to know and add it to the report, unless it is there already."""
        if line in self.results.notes:
            return
        self.results.notes.append(line)
        self.say(f"[dim]note:[/] {escape(line)}")

    def said(self) -> dict[str, list[str]]:
        """All warnings and notes so far."""
        return {"warnings": list(self.results.warnings), "notes": list(self.results.notes)}

    def say_again(self, said: dict[str, list[str]]) -> None:
        """Repeat what was said, before a stop, about work that is not done again."""
        for kind, tell in {"warnings": self.warn, "notes": self.note}.items():
            for line in said.get(kind, []):
                tell(line)

    def attempt(self, what: str, work: Callable[[], Any]) -> None:
        """Compute figures. A failure becomes a warning and part of `failed` in the report: it must not cost a run its files."""
        try:
            work()
        except (Interrupted, OutputError):
            raise
        except Exception as error:  # from test data, other packages, the user's model: no figure is worth the rest of the run
            reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            self.results.failed[what] = reason
            self.warn(f"no figures for {what} ({reason}); the files are not affected")
