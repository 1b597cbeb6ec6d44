"""What of a search is on disk while it goes on: each trial, so that a stop loses at most one."""

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
    """file: where. epochs, pruning: of each trial, by its number.

    seconds: that the search has taken, and said: its warnings and notes, over all sittings. dense: {costs, measured} of the
    dense model, as it was measured first and with what (`Measure.how`); None before. least: the size, in the search's measure,
    that no trial can go below; None before. doubted: warnings of how these two were measured.
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
        """The trials that were asked for, without the one that only recovered on."""
        return [trial for trial in self.trials if trial.continues is None]

    def read(self) -> Kept:
        """As it was stored, or empty."""
        if self.file.is_file():
            try:
                stored = parse_json(self.file.read_bytes())
                self.trials = [Trial.of(each) for each in stored["trials"]]
                self.epochs = {int(number): rows for number, rows in stored["epochs"].items()}
                self.pruning = {int(number): found for number, found in stored["pruning"].items()}
                self.said = {kind: [str(line) for line in lines] for kind, lines in stored.get("said", {}).items()}
                self.seconds = float(stored["seconds"])
                if (dense := stored.get("dense")) is not None:  # states of former versions have none
                    costs = {name: n if type(n) is int else float(n) for name, n in dense["costs"].items()}  # as they were told
                    self.dense = {"costs": costs, "measured": dict(dense["measured"])}
                if (least := stored.get("least")) is not None:  # nor this
                    self.least = float(least)
                self.doubted = [str(line) for line in stored.get("doubted", [])]
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                reason = shortened(f"{type(error).__name__}: {error}")
                folder = self.file.parent
                raise CheckpointError(f"{self.file}: damaged ({reason}); remove {folder} to search again") from error
        return self

    def write(self) -> None:
        """As it stands now."""
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
    """The values of those names that a trial keeps in a file of its folder until it is done; None where it has no such file."""
    if not file.is_file():
        return None
    try:
        stored = parse_json(file.read_bytes())
        return {name: stored[name] for name in names}
    except (ValueError, TypeError, KeyError) as error:
        reason = shortened(f"{type(error).__name__}: {error}")
        raise CheckpointError(f"{file}: damaged ({reason}); remove {file.parent} to make the trial again") from error


def keep(file: Path, content: dict[str, Any] | None) -> None:
    """What `known` reads: a latency that is measured again, say, would be another."""
    write_atomically(file, lambda path: path.write_text(json.dumps(report.plain(content))))


def known_way(file: Path) -> dict[str, Any] | None:
    """How a trial that was stopped came to its masks (`Selection.way`); None where it had not."""
    return known(file, ("way", "asked", "count", "mixture"))
