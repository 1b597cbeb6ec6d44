"""Progress of a run: bars on a terminal, otherwise a line every few seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

EVERY = 0.2
"""Seconds between updates within an epoch."""

LINE_EVERY = 10.0
"""Seconds between lines where there is no terminal."""

WIDE = 108
"""Columns of a terminal from which all figures fit next to a bar and the time; with fewer, numbers have three digits."""

FIXED = 23
"""Columns of a line besides the bar, the number of epochs and the figures: the mark, the stage, the time, spaces."""

LEAST = ("beta", "KL", "NLL", "sparse", "val")
"""Figures that are dropped, in this order, if a line has no room for all."""


class Mark(ProgressColumn):
    """A check mark for finished stages."""

    def render(self, task: Task) -> Text:
        """The mark of one stage."""
        return Text("✓" if task.finished else " ", style="green")


class Passed(ProgressColumn):
    """The time that a stage has taken and, while it runs, the time left: 0:12<0:23, 1h02<2h30."""

    def render(self, task: Task) -> Text:
        """The times of one stage."""
        passed = (task.finished_time if task.finished else task.elapsed) or 0.0
        left = None if task.finished or task.total is None else task.time_remaining
        if left is None:
            return Text(_time(passed), style="dim" if task.finished else "cyan")
        told = [
            f"{each // 3600:.0f}h{each % 3600 // 60:02.0f}" if max(passed, left) >= 3600 else _time(each)
            for each in (passed, left)
        ]
        return Text("<".join(told), style="cyan")


class Bars:
    """One bar per stage on a console; used as a context manager.

    If the console is not a terminal, it gets lines instead: one every LINE_EVERY seconds while a stage runs, with the last
    figures and the time left, and one with the figures at the end of each stage of training.
    """

    def __init__(self, console: Console | None = None, quiet: bool = False) -> None:
        console = console or Console(stderr=True)
        self._console = console
        self._lines = not quiet and not console.is_terminal
        self._wide = self._lines or console.width >= WIDE
        self._width = console.width
        self._bar = 24 if console.width >= 130 else 10 if self._wide else 6
        told = TextColumn("{task.fields[where]}{task.fields[figures]}")
        columns: list[Any] = [Mark(), TextColumn("{task.description:<9}"), BarColumn(bar_width=self._bar), told, Passed()]
        self._progress = Progress(
            *columns,
            console=console,
            disable=quiet or not console.is_terminal,
        )
        self._task: Any = None
        self._stage = ""
        self._epochs = 0
        self._done = 0.0
        self._figures = ""
        self._started = self._next = 0.0

    def __enter__(self) -> Bars:
        self._progress.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._progress.__exit__(*error)

    def start(self, stage: str, epochs: int, done: int = 0) -> None:
        """Begin the bar of a stage."""
        self._stage, self._epochs, self._done, self._figures = stage, epochs, done, ""
        self._started = time.monotonic()
        self._next = self._started + (LINE_EVERY if self._lines else 0.0)
        self._task = self._progress.add_task(stage, total=epochs, completed=done, where=self._where(done), figures="")

    def step(self, epoch: float, loss: Callable[[], float] | None = None) -> None:
        """Update the progress of the stage, in epochs; cheap enough to call at each step. loss: returns the last batch's."""
        now = time.monotonic()
        if now < self._next:
            return
        if self._lines:
            self._next = now + LINE_EVERY
            last = f"loss {loss():.3f}" if not self._figures and loss is not None else self._figures
            self._line(f"{self._where(int(epoch) + 1)}{last}", self._left(now, epoch))
            return
        self._next = now + EVERY
        self._progress.update(self._task, completed=epoch, where=self._where(int(epoch) + 1))

    def epoch(self, row: dict[str, Any]) -> None:
        """Show the figures of a finished epoch."""
        figures, where = _figures(row, self._wide), self._where(row["epoch"])
        if not self._lines:
            figures = _fitting(figures, self._width - FIXED - self._bar - len(where))
        self._figures = " ".join(figures)
        now = time.monotonic()
        if self._lines and (row["epoch"] >= self._epochs or now >= self._next):
            self._next = now + LINE_EVERY
            self._line(f"{where}{self._figures}", self._left(now, row["epoch"]))
        self._progress.update(self._task, completed=row["epoch"], where=where, figures=self._figures)

    @contextmanager
    def working(self, stage: str, stays: bool = True) -> Iterator[None]:
        """Show a bar without an end while the body runs, for a stage without epochs. stays: whether it remains afterwards."""
        task = self._progress.add_task(stage, total=None, where="", figures="")
        done, started = threading.Event(), time.monotonic()

        def tell() -> None:
            while not done.wait(LINE_EVERY):
                self._console.print(f"{stage:<9} {_time(time.monotonic() - started)} so far", highlight=False)

        teller = threading.Thread(target=tell, daemon=True) if self._lines else None
        if teller is not None:
            teller.start()
        try:
            yield
        finally:
            done.set()
            if teller is not None:
                teller.join()
            if not stays:
                self._progress.remove_task(task)
        if stays:
            self._progress.update(task, total=1, completed=1)

    def _line(self, text: str, left: str) -> None:
        self._console.print(f"{self._stage:<9} {text}{left}", highlight=False, soft_wrap=True)

    def _left(self, now: float, epoch: float) -> str:
        """The time left in the stage, or at its end the time taken; "" if nothing is known yet."""
        passed = epoch - self._done
        if passed <= 0 or epoch >= self._epochs:
            return f" in {_time(now - self._started)}" if epoch >= self._epochs else ""
        return f" {_time((now - self._started) / passed * (self._epochs - epoch))} left"

    def _where(self, epoch: int) -> str:
        return f"{epoch:>3}/{self._epochs:<3} " if self._wide else f"{epoch}/{self._epochs} "


def _fitting(figures: list[str], room: int) -> list[str]:
    """The figures that there is room for."""
    for name in LEAST:
        if len(" ".join(figures)) <= room:
            break
        figures = [figure for figure in figures if not figure.startswith(f"{name} ")]
    return figures


def _figures(row: dict[str, Any], wide: bool) -> list[str]:
    figures = [f"loss {row['loss']:.3f}" if wide else f"loss {_short(row['loss'])}"]  # it is NLL + beta KL / N
    figures.append(f"NLL {row['nll']:.4f}" if wide else f"NLL {_short(row['nll'])}")
    if row.get("kl") is not None:
        figures.append(f"KL {row['kl']:,.0f}" if wide else f"KL {_short(row['kl'])}")
    if row.get("beta") is not None:
        figures.append(f"beta {row['beta']:.2f}" if wide else f"beta {row['beta']:.2g}")
    if row.get("sparsity") is not None:
        figures.append(f"sparse {100 * row['sparsity']:.1f}%")
    if row.get("val_error") is not None:
        figures.append(f"val {row['val_error']:.2f}%")
    elif row.get("val_rmse") is not None:
        figures.append(f"val {row['val_rmse']:.4g}")
    return figures


def _time(seconds: float) -> str:
    """A time as 0:07, 12:30 or 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _short(number: float) -> str:
    """A number in at most five characters from 0.001 to 1e12 (six if negative): 0.123, 12.3, 123, 1.23k, 123M."""
    for unit in ("", "k", "M", "G"):
        if abs(number) < 999.5 or unit == "G":
            break
        number /= 1000
    digits = 3 if abs(number) < 0.9995 else 2 if abs(number) < 9.995 else 1 if abs(number) < 99.95 else 0
    return f"{number:.{digits}f}{unit}"
