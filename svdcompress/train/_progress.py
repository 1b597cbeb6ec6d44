"""Progress bars of a terminal: epoch, loss, NLL, KL, beta, sparsity; nothing at all without one."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

EVERY = 0.2
"""Seconds between updates within an epoch."""


class Bars:
    """One bar per stage on a console; used as a context. It stays silent where the console is no terminal."""

    def __init__(self, console: Console | None = None, quiet: bool = False) -> None:
        console = console or Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description:<9}"),
            BarColumn(bar_width=24),
            TextColumn("epoch {task.fields[epoch]:>3.0f}/{task.fields[epochs]}"),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(compact=True),
            console=console,
            disable=quiet or not console.is_terminal,
        )
        self._task: Any = None
        self._next = 0.0

    def __enter__(self) -> Bars:
        self._progress.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.__exit__(*error)

    def start(self, stage: str, epochs: int, done: int = 0) -> None:
        """Begin the bar of a stage."""
        self._task = self._progress.add_task(stage, total=epochs, completed=done, epoch=done, epochs=epochs, figures="")

    def step(self, epoch: float) -> None:
        """Where the stage stands, in epochs; cheap enough to call at each step."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + EVERY
            self._progress.update(self._task, completed=epoch, epoch=int(epoch) + 1)

    def epoch(self, row: dict[str, Any]) -> None:
        """The figures of a finished epoch."""
        figures = [f"loss {row['loss']:.4f}", f"NLL {row['nll']:.4f}"]
        if row.get("kl") is not None:
            figures.append(f"KL {row['kl']:,.0f}")
        if row.get("beta") is not None:
            figures.append(f"beta {row['beta']:.2f}")
        if row.get("sparsity") is not None:
            figures.append(f"sparsity {100 * row['sparsity']:.1f}%")
        if row.get("val_error") is not None:
            figures.append(f"val. error {row['val_error']:.2f}%")
        elif row.get("val_rmse") is not None:
            figures.append(f"val. RMSE {row['val_rmse']:.4g}")
        self._progress.update(self._task, completed=row["epoch"], epoch=row["epoch"], figures="  ".join(figures))
