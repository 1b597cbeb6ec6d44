"""Results of the stages after training, kept in `state/` until the run is done, so that a resumed run does not repeat them."""

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
from svdcompress.files import digest_of, sealed, unsealed, write_atomically
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
"""Sections of the recipe that a stage does not read, besides `out` and `description`; all others are part of its key."""

BEFORE = ("pruning", "calibrate", "promises", "dense", "sparse", "changes", "layers")
"""Results of earlier stages that a stage may read."""

LINES = ("seconds", "warnings", "notes", "failed")
"""Results that are stored separately, or that belong to one process only."""


class Late:
    """The late stages of one run. Each is stored under a key, a digest of all that it reads (the dense and the small model,
    the data, the recipe, earlier results, device, threads and versions), with digests of its results and of the files that it
    wrote. A stage in which a figure failed is not stored, so that it is tried again."""

    def __init__(self, context: Context, data: Data, dense: nn.Module) -> None:
        self.context = context
        fixed = {"versions": versions(), "device": str(context.place.device), "threads": torch.get_num_threads()}
        self._fixed = report.plain({**fixed, "data": seen(data), "dense": digest(dense)})

    def known(self, stage: str, small: nn.Module) -> dict[str, Any] | None:
        """Restore what `keeping` stored for a stage done before a stop, and return its dict; None: run the stage."""
        try:
            stored = unsealed(self._file(stage).read_bytes())
            if stored["key"] != self._key(stage, small) or report.altered(self.context.out, stored["files"]):
                return None
            found = {name: _decoded(name, value) for name, value in stored["results"].items()}
            lines = [(self.context.note, stored["notes"]), (self.context.warn, stored["warnings"])]
            more = dict(stored["more"])
        except (OSError, ValueError, TypeError, KeyError, AttributeError):  # missing or damaged: the stage is run again
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
        """Run a stage in the body, and store its results. Yields a dict for what else to store, JSON-able; with the key
        "unfinished" in it nothing is stored. files: returns those that the stage wrote."""
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
        write_atomically(self._file(stage), lambda path: path.write_text(sealed(stored)))

    def forget(self) -> None:
        """Make a resumed run repeat all stages, because the run's own checks found something wrong."""
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
        return digest_of(report.plain(read))


def digest(model: nn.Module) -> str:
    """A digest of a model's tensors and of its likelihood."""
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
    """The results as JSON types, except LINES."""
    return {one.name: report.plain(getattr(results, one.name)) for one in fields(results) if one.name not in LINES}


def _decoded(name: str, value: Any) -> Any:
    """One of the results as a stage leaves it. Raises KeyError for an unknown name."""
    if name not in {one.name for one in fields(RunResults)} - set(LINES):
        raise KeyError(name)
    if name not in ("dense", "sparse"):
        return value
    counts = value["counts"]
    return Side(**{**value, "counts": None if counts is None else Cost(**counts)})
