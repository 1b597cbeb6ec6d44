"""Progress bars of a terminal: epoch, loss, NLL, KL, beta, sparsity, validation error; nothing at all without one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

EVERY = 0.2
"""Seconds between updates within an epoch."""

WIDE = 100
"""Columns of a terminal from which a bar and the time left fit beside the figures; below, numbers have three digits."""


class Bars:
    """One bar per stage on a console; used as a context. It stays silent where the console is no terminal."""

    def __init__(self, console: Console | None = None, quiet: bool = False) -> None:
        console = console or Console(stderr=True)
        self._wide = console.width >= WIDE
        self._width = console.width
        columns: list[Any] = [TextColumn("{task.description} {task.fields[where]}{task.fields[figures]}")]
        if self._wide:
            bar = BarColumn(bar_width=10 if console.width < 130 else 24)
            told = TextColumn("{task.fields[where]}{task.fields[figures]}")
            columns = [TextColumn("{task.description:<9}"), bar, told, TimeRemainingColumn(compact=True)]
        self._progress = Progress(
            *columns,
            console=console,
            disable=quiet or not console.is_terminal,
        )
        self._task: Any = None
        self._epochs = 0
        self._next = 0.0

    def __enter__(self) -> Bars:
        self._progress.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._progress.__exit__(*error)

    def start(self, stage: str, epochs: int, done: int = 0) -> None:
        """Begin the bar of a stage."""
        self._epochs = epochs
        self._task = self._progress.add_task(stage, total=epochs, completed=done, where=self._where(done), figures="")

    def step(self, epoch: float) -> None:
        """Where the stage stands, in epochs; cheap enough to call at each step."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + EVERY
            self._progress.update(self._task, completed=epoch, where=self._where(int(epoch) + 1))

    def epoch(self, row: dict[str, Any]) -> None:
        """The figures of a finished epoch."""
        wide = self._wide
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
        where = self._where(row["epoch"])
        if not wide and len(f"{row.get('stage', '')} {where}{' '.join(figures)}") > self._width and len(figures) > 5:
            figures.pop()  # the validation's
        self._progress.update(self._task, completed=row["epoch"], where=where, figures=" ".join(figures))

    @contextmanager
    def working(self, stage: str) -> Iterator[None]:
        """A bar without an end, while a stage that has no epochs goes on."""
        task = self._progress.add_task(stage, total=None, where="", figures="")
        yield
        self._progress.update(task, total=1, completed=1)

    def _where(self, epoch: int) -> str:
        return f"{epoch:>3}/{self._epochs:<3} " if self._wide else f"{epoch}/{self._epochs} "


def _short(number: float) -> str:
    """A number in at most five characters from 0.001 to 1e12 (six if negative): 0.123, 12.3, 123, 1.23k, 123M."""
    for unit in ("", "k", "M", "G"):
        if abs(number) < 999.5 or unit == "G":
            break
        number /= 1000
    digits = 3 if abs(number) < 0.9995 else 2 if abs(number) < 9.995 else 1 if abs(number) < 99.95 else 0
    return f"{number:.{digits}f}{unit}"
