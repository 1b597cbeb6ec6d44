"""The state of a search on disk: each finished trial, so that a stop loses at most one."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from svdcompress import report
from svdcompress.errors import CheckpointError, explained, shortened
from svdcompress.files import sealed, unsealed, write_atomically
from svdcompress.pipeline._damaged import resumable
from svdcompress.pipeline._search_schema import Stored
from svdcompress.search import Trial


@dataclass
class Kept:
    """The stored state of a search.

    file: where it is stored. epochs, pruning: of each trial, by its number. said: warnings and notes, and seconds: the time
    taken, both over all sittings. dense: {costs, measured} of the dense model: its costs as first measured, and what with
    (`Measure.how`); None until then. least: the size, in the search's measure, that no trial can go below; None until it is
    known. doubted: warnings about how these two were measured.
    """

    file: Path
    trials: list[Trial] = field(default_factory=list)
    epochs: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    pruning: dict[int, dict[str, Any]] = field(default_factory=dict)
    said: dict[str, list[str]] = field(default_factory=dict)
    seconds: float = 0.0
    dense: dict[str, dict[str, Any]] | None = None
    least: float | None = None
    doubted: list[str] = field(default_factory=list)

    @property
    def asked(self) -> list[Trial]:
        """The trials that the strategy asked for, without the one that only recovered further."""
        return [trial for trial in self.trials if trial.continues is None]

    def read(self, measure: str | None = None) -> Kept:
        """Fill in what is stored, if anything; returns itself. measure: that of the search, of which each trial must have a
        cost (None: what trials need besides their own fields is not checked). Raises CheckpointError for a damaged file."""
        if not self.file.is_file():
            return self
        try:
            stored = unsealed(self.file.read_bytes())
            if (wrong := Stored.model_validate(stored).contradiction(measure)) is not None:
                raise self._damaged(wrong)
        except ValidationError as error:
            raise self._damaged(explained(error)) from error
        except ValueError as error:
            raise self._damaged(shortened(f"{type(error).__name__}: {error}")) from error
        self.trials = [Trial.of(each) for each in stored["trials"]]
        self.epochs = {int(number): rows for number, rows in stored["epochs"].items()}
        self.pruning = {int(number): found for number, found in stored["pruning"].items()}
        self.said = stored.get("said", {})
        self.seconds = float(stored["seconds"])
        self.dense = stored.get("dense")  # its counts are whole numbers, as reported; absent in states of earlier versions
        self.least = stored.get("least")  # also absent there
        self.doubted = stored.get("doubted", [])
        return self

    def _damaged(self, reason: str) -> CheckpointError:
        return resumable(f"{self.file}: damaged ({reason}); remove {self.file.parent} to search again")

    def write(self) -> None:
        """Write the current state to the file."""
        stored = {
            "trials": [t.to_dict() for t in self.trials],
            "epochs": self.epochs,
            "pruning": self.pruning,
            "said": self.said,
            "seconds": self.seconds,
            "dense": self.dense,
            "least": self.least,
            "doubted": self.doubted,
        }
        write_atomically(self.file, lambda path: path.write_text(sealed(report.plain(stored))))


def known(file: Path, names: Collection[str]) -> dict[str, Any] | None:
    """The values of these names in a file that a trial keeps in its folder until it is done; None without the file."""
    if not file.is_file():
        return None
    try:
        stored = unsealed(file.read_bytes())
        return {name: stored[name] for name in names}
    except (ValueError, TypeError, KeyError) as error:
        reason = shortened(f"{type(error).__name__}: {error}")
        raise resumable(f"{file}: damaged ({reason}); remove {file.parent} to make the trial again") from error


def keep(file: Path, content: dict[str, Any] | None) -> None:
    """Write values for `known`, so that a resumed run reuses them: a second measurement of a latency would differ."""
    text = "null" if content is None else sealed(report.plain(content))
    write_atomically(file, lambda path: path.write_text(text))


def known_way(file: Path) -> dict[str, Any] | None:
    """How a stopped trial arrived at its masks (`Selection.way`); None if it had none yet."""
    return known(file, ("way", "asked", "count", "mixture"))
