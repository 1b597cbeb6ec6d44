"""Trains a posterior of the path on while cutting it to a size in steps, so that what stays learns to do without the rest."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from svdcompress import checkpoint, report
from svdcompress.layers import variational_layers
from svdcompress.pipeline._damaged import cured
from svdcompress.pipeline._levels import COOLING_EPOCHS, epochs_of
from svdcompress.pipeline._path import UNPRESSED, Climb
from svdcompress.pipeline._search_kept import keep, known
from svdcompress.pipeline._way import Way, Ways
from svdcompress.recipe import LrSchedule
from svdcompress.relevance import Masks, as_masks, hold
from svdcompress.sources import make_model


@dataclass(frozen=True)
class Ask:
    """What a trial is asked for. target: the size, in the search's measure. cuts: steps to it, the last one included. at_once:
    whether everything is cut in one step, without cooling, and the rest is reconstructed (see `Reconstructor`)."""

    number: int
    pressure: float
    target: float
    cuts: int
    at_once: bool = False

    @property
    def unpressed(self) -> bool:
        """Whether the trial begins from the dense weights."""
        return self.pressure <= UNPRESSED

    def folder(self, search: Path) -> Path:
        """The trial's folder, which exists until the trial is done."""
        return search / f"trial-{self.number}"


@dataclass(frozen=True)
class Cooled:
    """The posterior of a trial.

    model: with no masks held. masks: what the cuts have kept; None if nothing was cut. natural: the size before the first cut;
    None if nothing was cut. history: the rows of its epochs. unpressed, at_once: as in `Ask`.
    """

    model: nn.Module
    masks: Masks | None
    natural: float | None
    history: list[dict[str, Any]]
    unpressed: bool = False
    at_once: bool = False


def kept_file(search: Path, number: int) -> Path:
    """The file that holds a trial's posterior until the search is done."""
    return search / f"cooled-{number}.safetensors"


def begin(ask: Ask, search: Path) -> Path:
    """The folder of a trial. Leftovers of another trial, for instance after a change of `search.trials`, are removed."""
    folder = ask.folder(search)
    about = {"pressure": ask.pressure, "target": ask.target, "cuts": ask.cuts}
    file = folder / ("at-once.json" if ask.at_once else "ask.json")  # begun the other way, it is another trial
    if known(file, about) != about:
        shutil.rmtree(folder, ignore_errors=True)
        kept_file(search, ask.number).unlink(missing_ok=True)
        folder.mkdir(parents=True)
        keep(file, about)
    return folder


def cooled(
    climb: Climb,
    ask: Ask,
    ways: Callable[[nn.Module, Masks | None], Ways],
    choose: Callable[[Ways], Way],
) -> Cooled:
    """The posterior of a trial; made once, then read from its file.

    The epochs of cooling are divided into as many parts as there are cuts, each of one epoch at least; the learning rate falls
    in the last part. After each part but the last, the units of the lowest rank are cut, such that the size falls in equal
    ratios from its natural value to the target; the masks are held from then on, and the next part learns without these units.
    What remains to be cut after the last part is chosen by `masks_for`. If nothing has to be cut after the first part, the
    others become one.

    ways: maps a model and the masks of what is left of it to the ways to the size. choose: picks the way that all steps take,
    by name; called after the first part. A trial that is cut at once is not cooled: its recovery gets these epochs.
    """
    file = kept_file(climb.folder, ask.number)
    if not file.exists() and ask.at_once:
        _keep(climb.begin(ask.pressure), file, None, [])
    elif not file.exists():
        _cool(climb, ask, ways, choose, file)
    model = make_model(climb.context.recipe.model)
    with cured(file, "remove it to make it again"):
        stored = {name: checkpoint.read_manifest(file)["extra"]["cooled"][name] for name in ("natural", "history")}
        checkpoint.load(file, model).eval()
    layers = dict(variational_layers(model))
    masks = None
    if any(layer.mask is not None for layer in layers.values()):
        masks = as_masks(model, {name: layer.relevant() for name, layer in layers.items()})
        hold(model, None)
    return Cooled(model, masks, stored["natural"], stored["history"], ask.unpressed, ask.at_once)


def _cool(
    climb: Climb,
    ask: Ask,
    ways: Callable[[nn.Module, Masks | None], Ways],
    choose: Callable[[Ways], Way],
    file: Path,
) -> None:
    recipe, folder = climb.context.recipe, ask.folder(climb.folder)
    model = climb.begin(ask.pressure)
    epochs = epochs_of(recipe.train, COOLING_EPOCHS)
    parts = min(ask.cuts, epochs)
    ends = [epochs * (part + 1) // parts for part in range(parts)]
    masks: Masks | None = None
    natural: float | None = None
    history: list[dict[str, Any]] = []
    done = 0
    while done < epochs:
        part = ends.index(next(end for end in ends if end > done))
        if part and masks is None:  # nothing has to be cut
            part = parts - 1
        last = part == parts - 1
        schedule = LrSchedule(name="linear", start="0%") if last else LrSchedule(name="constant")
        settings = recipe.train.model_copy(update={"epochs": ends[part] - done, "schedule": schedule, "keep": "last"})
        stage, state = f"pressure {ask.pressure:.3f}, part {part + 1}", folder / f"cooling-{part}.pt"
        history += climb.fit(model, stage, settings, climb.beta(ask.pressure), state).history
        done = ends[part]
        if last:
            break
        hold(model, None)
        with climb.context.bars.working("choosing", stays=False):
            way = ways(model, masks)
            natural, aim, name = _way_to(way, choose, folder / "cooling.json")
            if aim is not None and (found := way.part(natural * (aim / natural) ** ((part + 1) / parts), name)) is not None:
                masks = found
        hold(model, masks)
    _keep(model, file, None if masks is None else natural, history)


def _keep(model: nn.Module, file: Path, natural: float | None, history: list[dict[str, Any]]) -> None:
    extra = {"cooled": {"natural": natural, "history": history}}
    checkpoint.save(model, file, extra=json.loads(json.dumps(report.plain(extra))))


def _way_to(way: Ways, choose: Callable[[Ways], Way], file: Path) -> tuple[float, float | None, str]:
    """A model's natural size, the size to reach (None: nothing has to be cut), and the name of the way to it; found after the
    first part and kept in the file."""
    names = ("natural", "aim", "way")
    if (found := known(file, names)) is None:
        aim, name = way.aim(), ""
        if aim is not None:
            taken = choose(way)
            aim, name = way.aim_of(taken), taken.name
        keep(file, {"natural": way.natural, "aim": aim, "way": name})
        found = known(file, names) or {}
    return found["natural"], found["aim"], found["way"]
