"""A posterior of the path, trained on at falling rates and cut down towards a size in steps, so that what stays learns to do
without what went."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from svdcompress import checkpoint, report
from svdcompress.layers import variational_layers
from svdcompress.pipeline._path import COOLING_EPOCHS, Climb, epochs_of
from svdcompress.pipeline._ways import Ways
from svdcompress.recipe import LrSchedule
from svdcompress.relevance import Masks, as_masks, hold
from svdcompress.sources import make_model


@dataclass(frozen=True)
class Cooled:
    """model: nothing of it is held. held: what the cuts left; None where there were none. natural: the size that it had by
    itself before the first cut; None where it is the one that it has now. history: the epochs of that."""

    model: nn.Module
    held: Masks | None
    natural: float | None
    history: list[dict[str, Any]]


def cooled(climb: Climb, pressure: float, number: int, target: float, cuts: int, ways: Callable[..., Ways]) -> Cooled:
    """The posterior of a trial, made once and kept in a file of the search's folder.

    The epochs of cooling fall into as many parts as there are cuts, of one epoch at least each. After each part but the last,
    what is least needed goes until the model is on the way to its size, in equal ratios from what it is by itself; it is held
    at that from then on, and the next part learns without it. What is left to go after the last part is chosen by `masks_for`.

    number: of the trial. target: the size, in what the search's measure follows. cuts: the last one included. ways: of a model
    and of what is held, the ways to a size.
    """
    file = kept_file(climb.folder, number)
    if not file.exists():
        _cool(climb, pressure, number, target, cuts, ways, file)
    model = checkpoint.load(file, make_model(climb.context.recipe.model)).eval()
    stored = checkpoint.read_manifest(file)["extra"]["cooled"]
    layers = dict(variational_layers(model))
    held = None
    if any(layer.mask is not None for layer in layers.values()):
        held = as_masks(model, {name: layer.relevant() for name, layer in layers.items()})
        hold(model, None)
    return Cooled(model, held, stored["natural"], stored["history"])


def kept_file(folder: Path, number: int) -> Path:
    """Where the posterior of a trial lies while a search goes on."""
    return folder / f"cooled-{number}.safetensors"


def _cool(climb: Climb, pressure: float, number: int, target: float, cuts: int, ways: Callable[..., Ways], file: Path) -> None:
    recipe = climb.context.recipe
    model = climb.posterior(min(max(1, int(pressure)), len(climb.rows)))
    epochs = epochs_of(recipe.train, COOLING_EPOCHS)
    parts = min(cuts, epochs)
    held: Masks | None = None
    natural: float | None = None
    history: list[dict[str, Any]] = []
    states = []
    for part in range(parts):
        last = part == parts - 1
        schedule = LrSchedule(name="linear", start="0%") if last else LrSchedule(name="constant")
        count = epochs * (part + 1) // parts - epochs * part // parts
        settings = recipe.train.model_copy(update={"epochs": count, "schedule": schedule, "keep": "last"})
        states.append(climb.folder / f"cooling-{number}-{part}.pt")
        fit = climb.fit(model, f"pressure {pressure:.3f}, part {part + 1}", settings, climb.beta(pressure), states[-1])
        history += fit.history
        if last:
            break
        hold(model, None)
        way = ways(model, held)
        natural = way.natural if natural is None else natural
        if (found := way.part(natural * min(target / natural, 1.0) ** ((part + 1) / parts))) is not None:
            held = found
        hold(model, held)
    extra = {"cooled": {"natural": None if held is None else natural, "history": history}}
    checkpoint.save(model, file, extra=json.loads(json.dumps(report.plain(extra))))
    for state in states:
        state.unlink(missing_ok=True)
