"""The state of a search on disk: each finished trial, so that a stop loses at most one."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from svdcompress import report
from svdcompress.errors import CheckpointError, shortened
from svdcompress.files import parse_json, write_atomically
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

    def read(self) -> Kept:
        """Fill in what is stored, if anything; returns itself. Raises CheckpointError for a damaged file."""
        if self.file.is_file():
            try:
                stored = parse_json(self.file.read_bytes())
                self.trials = [Trial.of(each) for each in stored["trials"]]
                self.epochs = {int(number): rows for number, rows in stored["epochs"].items()}
                self.pruning = {int(number): found for number, found in stored["pruning"].items()}
                self.said = {kind: [str(line) for line in lines] for kind, lines in stored.get("said", {}).items()}
                self.seconds = float(stored["seconds"])
                if (dense := stored.get("dense")) is not None:  # absent in states of earlier versions
                    costs = {name: n if type(n) is int else float(n) for name, n in dense["costs"].items()}  # as reported
                    self.dense = {"costs": costs, "measured": dict(dense["measured"])}
                if (least := stored.get("least")) is not None:  # also absent there
                    self.least = float(least)
                self.doubted = [str(line) for line in stored.get("doubted", [])]
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                reason = shortened(f"{type(error).__name__}: {error}")
                folder = self.file.parent
                raise CheckpointError(f"{self.file}: damaged ({reason}); remove {folder} to search again") from error
        return self

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
        write_atomically(self.file, lambda path: path.write_text(json.dumps(report.plain(stored))))


def known(file: Path, names: Collection[str]) -> dict[str, Any] | None:
    """The values of these names in a file that a trial keeps in its folder until it is done; None without the file."""
    if not file.is_file():
        return None
    try:
        stored = parse_json(file.read_bytes())
        return {name: stored[name] for name in names}
    except (ValueError, TypeError, KeyError) as error:
        reason = shortened(f"{type(error).__name__}: {error}")
        raise CheckpointError(f"{file}: damaged ({reason}); remove {file.parent} to make the trial again") from error


def keep(file: Path, content: dict[str, Any] | None) -> None:
    """Write values for `known`, so that a resumed run reuses them: a second measurement of a latency would differ."""
    write_atomically(file, lambda path: path.write_text(json.dumps(report.plain(content))))


def known_way(file: Path) -> dict[str, Any] | None:
    """How a stopped trial arrived at its masks (`Selection.way`); None if it had none yet."""
    return known(file, ("way", "asked", "count", "mixture"))
