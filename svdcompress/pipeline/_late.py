"""What the stages after training found, kept in `state/` until the run is done: a resumed run does not find it again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from svdcompress import report
from svdcompress.cost import Cost
from svdcompress.files import parse_json, write_atomically
from svdcompress.likelihoods import likelihood_of
from svdcompress.pipeline._context import Context
from svdcompress.pipeline._figures import versions
from svdcompress.pipeline._results import RunResults, Side
from svdcompress.pipeline._same_data import seen
from svdcompress.sources import Data

NOT_READ = {
    "calibrate": ("export", "uncertainty", "report"),
    "evaluate": ("export", "uncertainty", "report"),
    "export": ("uncertainty",),
    "figures": ("export", "report"),
}
"""Sections of the recipe, beside `out` and `description`, that a stage does not read; all others are part of its key."""

BEFORE = ("pruning", "calibrate", "promises", "dense", "sparse", "changes", "layers")
"""What a stage may read of what earlier ones found."""

LINES = ("seconds", "warnings", "notes", "failed")
"""What is told apart, or is of this sitting."""


class Late:
    """The late stages of one run. Each is kept under a key: a digest of all that it reads (the dense and the small model, the
    data, the recipe, what was found before, device, threads and versions), with digests of the files that it wrote. A stage in
    which a figure failed is not kept, and is tried again."""

    def __init__(self, context: Context, data: Data, dense: nn.Module) -> None:
        self.context = context
        fixed = {"versions": versions(), "device": str(context.place.device), "threads": torch.get_num_threads()}
        self._fixed = report.plain({**fixed, "data": seen(data), "dense": digest(dense)})

    def known(self, stage: str, small: nn.Module) -> dict[str, Any] | None:
        """What `keeping` kept of a stage that a stopped run has finished, the results filled in; None: it is to be done."""
        try:
            stored = parse_json(self._file(stage).read_bytes())
            if stored["key"] != self._key(stage, small) or report.altered(self.context.out, stored["files"]):
                return None
            found = {name: _decoded(name, value) for name, value in stored["results"].items()}
            lines = [(self.context.note, stored["notes"]), (self.context.warn, stored["warnings"])]
            more = dict(stored["more"])
        except (OSError, ValueError, TypeError, KeyError, AttributeError):  # none, or a damaged one: it is done again
            return None
        for name, value in found.items():
            setattr(self.context.results, name, value)
        self.context.say(f"[dim]{stage}: done before the stop[/]")
        for tell, texts in lines:
            for text in texts:
                tell(str(text))
        return more

    @contextmanager
    def keeping(self, stage: str, small: nn.Module, files: Callable[[], Sequence[Path]] = tuple) -> Iterator[dict[str, Any]]:
        """Within it a stage is done. Gives a dict for what else is to be kept of it, JSON-able; with "unfinished" in it nothing
        is kept. files: those that the stage wrote."""
        results, more = self.context.results, {}
        key, before = self._key(stage, small), _encoded(results)
        counts = {name: len(getattr(results, name)) for name in LINES[1:]}
        yield more
        if len(results.failed) > counts["failed"] or "unfinished" in more or not self.context.state.writer:
            return
        stored = {
            "key": key,
            "files": {path.name: report.digest(path) for path in files()},
            "results": {name: value for name, value in _encoded(results).items() if value != before[name]},
            **{name: getattr(results, name)[counts[name] :] for name in ("warnings", "notes")},
            "more": more,
        }
        write_atomically(self._file(stage), lambda path: path.write_text(json.dumps(stored)))

    def forget(self) -> None:
        """Do all of them again when the run goes on: its own checks found something wrong."""
        for stage in NOT_READ:
            self._file(stage).unlink(missing_ok=True)

    def _file(self, stage: str) -> Path:
        return self.context.state.folder / f"{stage}.json"

    def _key(self, stage: str, small: nn.Module) -> str:
        recipe = self.context.recipe.model_dump(mode="json", exclude={"out", "description", *NOT_READ[stage]})
        found = _encoded(self.context.results)
        read = {
            "stage": stage,
            **self._fixed,
            "recipe": recipe,
            "small": digest(small),
            "found": [found[name] for name in BEFORE],
        }
        return hashlib.sha256(json.dumps(report.plain(read), sort_keys=True).encode()).hexdigest()


def digest(model: nn.Module) -> str:
    """Of a model's tensors and of its likelihood."""
    found, own = hashlib.sha256(), likelihood_of(model)
    found.update(json.dumps(None if own is None else [own.name, report.plain(own.settings())]).encode())
    for name, value in sorted(model.state_dict().items()):
        found.update(name.encode())
        if isinstance(value, torch.Tensor):
            found.update(f"{value.dtype}{tuple(value.shape)}".encode())
            found.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            found.update(repr(value).encode())
    return found.hexdigest()


def _encoded(results: RunResults) -> dict[str, Any]:
    """The results in JSON's types, but for LINES."""
    return {one.name: report.plain(getattr(results, one.name)) for one in fields(results) if one.name not in LINES}


def _decoded(name: str, value: Any) -> Any:
    """One of the results as a stage leaves it. Raises KeyError for one that there is not."""
    if name not in {one.name for one in fields(RunResults)} - set(LINES):
        raise KeyError(name)
    if name not in ("dense", "sparse"):
        return value
    counts = value["counts"]
    return Side(**{**value, "counts": None if counts is None else Cost(**counts)})
