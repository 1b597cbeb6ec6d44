"""The trials of a search: how one is made, judged and kept, and how the best one recovers further."""

from __future__ import annotations

import math
import shutil
import time
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from rich.markup import escape
from torch import nn

from svdcompress import checkpoint, report
from svdcompress.errors import ExportError, PruneError, VerifyError
from svdcompress.files import write_atomically
from svdcompress.pipeline._begin import Dense, Opened, Variational
from svdcompress.pipeline._busy import watched
from svdcompress.pipeline._choose_masks import chosen_for, masks_for
from svdcompress.pipeline._context import Context
from svdcompress.pipeline._cool import Ask, Cooled, begin, cooled, kept_file
from svdcompress.pipeline._damaged import check_kept
from svdcompress.pipeline._judged import on_validation
from svdcompress.pipeline._measure import THREADS, Measure
from svdcompress.pipeline._path import UNPRESSED, Climb
from svdcompress.pipeline._reconstruct import Reconstructor, examples_for
from svdcompress.pipeline._recover import recover_stage
from svdcompress.pipeline._search_cost import cuts_of, left_for, objective_of, reconstructs, recovery_of, trained
from svdcompress.pipeline._search_kept import Kept, keep, known_way
from svdcompress.pipeline._search_start import levels_and_trials
from svdcompress.pipeline._search_words import below_least, busy_machine, no_least, other_machine, told_trial
from svdcompress.pipeline._select import bare, whole
from svdcompress.pipeline._smaller import Small, prune_stage
from svdcompress.pipeline._unit_ways import FOLLOWS
from svdcompress.pipeline._way import Way, Ways
from svdcompress.pipeline._ways import ways_for
from svdcompress.recipe import MEASURES, Goal, parse_goal
from svdcompress.reconstruction import Reconstruction, fits_any
from svdcompress.relevance import Masks
from svdcompress.search import CLOSE, NOTHING, Budget, Losses, Trial
from svdcompress.selection import Selection, check_some_left
from svdcompress.sources import make_model

ABOVE = 1.1
"""The size to aim at if the goal is out of reach, as a multiple of the least possible one: the last units cost the most
accuracy and save next to nothing."""


class Trials:
    """The trials of one search, and the means to judge them, including trials that a stopped search left in `state/search`."""

    said_before: dict[str, list[str]]  # before the first trial; every sitting says that again

    def __init__(self, context: Context, opened: Opened, dense: Dense, variational: Variational) -> None:
        recipe = context.recipe
        settings = recipe.search
        self.context, self.opened, self.dense, self.variational = context, opened, dense, variational
        self.settings = settings
        self.budget = Budget(settings.max_drop, settings.max_error, settings.confidence)
        self.goal: Goal | None = None if settings.goal is None else parse_goal(settings.goal)
        self.measure = Measure(objective_of(recipe), recipe, opened.data, opened.inputs)
        self.folder = context.state.folder / "search"
        self.kept = Kept(self.folder / "trials.json").read(self.measure.name)
        cooled_files = [kept_file(self.folder, trial.root) for trial in self.kept.trials]
        models = {self._model_file(number): number for number in self.kept.pruning}
        check_kept({**dict.fromkeys(cooled_files), **models}, self.folder)
        self.fitted_to = 0  # before the path makes the model smaller: a resumed search has to take as many
        if reconstructs(recipe, self.measure.name):
            self.fitted_to = examples_for(variational.model, opened.inputs)
        total = sum(prod(shape) for shape in variational.shapes.values())
        self.path = Climb(context, opened, dense, variational, self.folder, total, unpressed=self.cuts > 1)
        self.started = time.monotonic()
        self.before = self.kept.seconds
        with self._working("judging the dense model"):
            self.judged = self._losses(dense.model)
        self.allowed = self.budget.allowed(self.judged.error, self.judged.probabilities)
        for line in self.kept.doubted:
            context.warn(line)
        self.costs = self._dense_costs()

    def _dense_costs(self) -> dict[str, float]:
        """The dense model's costs, as first measured: a second measurement of its latency would change the search."""
        how = self.measure.how()
        if self.kept.dense is None or not {self.measure.name, FOLLOWS[self.measure.name]} <= set(self.kept.dense["costs"]):
            with self._working("measuring"), watched() as load:
                self.kept.dense = {"costs": self.measure.of(dense=self.dense.model)["dense"], "measured": how}
            if how and self.goal is not None and self.goal.size is not None and load.crowded(THREADS):
                self._doubt(busy_machine(self.goal, self.kept.dense["costs"]["latency"], load, how))
        costs, before = self.kept.dense["costs"], self.kept.dense["measured"]
        if before != how:
            self._doubt(other_machine(before, how, costs["latency"]))
        self.measure = replace(self.measure, first=costs.get("latency"))
        return costs

    def _find_least(self) -> None:
        """Measure the least possible size, once, before anything is trained; warn of a goal below it."""
        if self.kept.least is None and (self.kept.trials or self.measure.name == "nonzero"):
            self.kept.least = 0.0  # trials of an earlier version aimed at the goal itself; or single weights count
        if self.kept.least is None:
            found = ways_for(self.measure)(self.context, self.opened, self.dense, self.variational.model, self.measure, 0.0)
            try:
                with self._working("measuring"):
                    self.kept.least = min(found.least(), self._dense_size)
            except (
                PruneError,
                ExportError,
                VerifyError,
            ) as error:  # too few units are left for what the model does with them
                self.kept.least = 0.0
                self._doubt(no_least(self.measure.name, error))
        if self.goal is not None and self._target > self._wanted:
            self.context.warn(
                below_least(self.goal, self.measure.name, self._dense_size, self.kept.least, self._target, self.measure.how())
            )

    def _doubt(self, line: str) -> None:
        """Warn about a measurement, and store the warning: later sittings rely on the measurement without repeating it."""
        self.context.warn(line)
        if line not in self.kept.doubted:
            self.kept.doubted.append(line)

    # One trial

    def _trial(self, pressure: float, target: float) -> None:
        """Make one trial: cool, choose masks, prune, recover, judge."""
        number = len(self.kept.trials) + 1
        started = time.monotonic()
        ask = self._ask(number, pressure, target)
        folder = begin(ask, self.folder)
        model = self._cooled(ask)
        with self._working("choosing"):
            selection = self._masks(model, target, folder / "way.json")
        try:
            check_some_left(model.model, selection.masks, self.opened.data.validation)
        except PruneError:
            shutil.rmtree(folder)
            self._nothing_left(number, pressure, target, started, model.history)
            return
        rebuilt = self._reconstruct(model, selection)
        file = folder / "pruned.safetensors"
        small = prune_stage(self.context, self.opened, model.model, selection.masks, file)
        fit = recover_stage(
            self.context,
            self.dense,
            self.variational,
            small,
            file,
            ended=self.path.recovery(pressure),
            stage=f"trial {number}",
            state=folder / "recover.pt",
            epochs=recovery_of(self.context.recipe, at_once=model.at_once),
            again=lambda: not self._late(),
            shared=levels_and_trials(self.context.recipe)[1] > 1,
        )
        small.model.eval()
        with self._working("measuring"):
            costs = self.measure.of_small(small.model, self.dense.model)
            verdict = self.budget.judge(self.judged, self._losses(small.model))
        inputs = {name: small.pruning.get(name) for name in ("inputs_kept", "inputs_dim")}
        # no times: a resumed search ends in the same bytes
        extra = {"trial": number, "inputs": inputs, "selection": _stored(selection)}
        checkpoint.save(bare(small.model), self._model_file(number), extra=report.plain(extra))
        trial = Trial(
            number=number,
            pressure=pressure,
            beta=self.path.beta(pressure),
            ratio=math.log2(self._dense_size / target),
            natural=self.costs[FOLLOWS[self.measure.name]] / max(selection.natural or 0.0, 1.0),
            threshold=selection.asked if isinstance(selection.asked, float) else None,
            costs=costs,
            metrics=self.dense.trainer.validate(small.model),
            error=verdict.error,
            drop=verdict.drop,
            upper=verdict.upper,
            allowed=min(self.allowed, 1e9),
            met=verdict.met,
            estimate=verdict.estimate,
            at_most=verdict.at_most,
            mixture=(selection.way or {}).get("mixture"),
            reconstruction=None if rebuilt is None else rebuilt.to_dict(),
            seconds=time.monotonic() - started,
            recover_lr=None if fit is None else fit.lr_instead,
        )
        self._done(trial, small, [*model.history, *(fit.history if fit is not None else [])], folder)

    def _recover_on(self, best: Trial) -> None:
        """Let the best trial's small model recover further with the epochs that are left: one more trial, with the same
        masks."""
        epochs = left_for(self.context.recipe, self._trained)
        if epochs < 1 or best.number not in self.kept.pruning or len(self.kept.asked) < len(self.kept.trials):
            return
        number, started = len(self.kept.trials) + 1, time.monotonic()
        folder = self.folder / f"trial-{number}-of-{best.number}-{epochs}"
        folder.mkdir(parents=True, exist_ok=True)
        small, extra = self._small(best)
        before = self._losses(small.model)
        fit = recover_stage(
            self.context,
            self.dense,
            self.variational,
            small,
            self._model_file(best.number),
            ended=self.path.recovery(best.pressure),
            stage=f"trial {number}",
            state=folder / "recover.pt",
            epochs=epochs,
            rate=min(best.recover_lr or math.inf, self.context.recipe.recover.lr),
            again=lambda: False,  # the epochs of a search are limited, and there is a good model already
        )
        small.model.eval()
        checkpoint.save(bare(small.model), self._model_file(number), extra={**extra, "trial": number})
        verdict = self.budget.judge(self.judged, self._losses(small.model).held_out(before))
        judged = {name: getattr(verdict, name) for name in ("error", "drop", "upper", "met", "estimate", "at_most")}
        judged |= {"metrics": self.dense.trainer.validate(small.model), "seconds": time.monotonic() - started}
        trial = replace(best, number=number, continues=best.number, **judged)
        self._done(trial, small, [] if fit is None else fit.history, folder)

    def _done(self, trial: Trial, small: Small, epochs: list[dict[str, Any]], folder: Path) -> None:
        finite = trial.finite
        if not finite:  # JSON has no such numbers, and a resumed search has to go on with the same
            trial = replace(trial, **_lost_all(self.judged), estimate=None, at_most=None)
        self.kept.trials.append(trial)
        self.kept.pruning[trial.number] = small.pruning
        self.kept.epochs[trial.number] = epochs
        self._spend()
        shutil.rmtree(folder)
        told = f"trial {trial.number}: answers that are not finite, so it counts as a trial of which nothing is left"
        self._say(told_trial(trial, self.measure.name, self.costs, self.judged, self.budget.given) if finite else told)

    def _ask(self, number: int, pressure: float, target: float) -> Ask:
        at_once = pressure <= UNPRESSED and self._reconstructor is not None
        return Ask(number, pressure, target, self.cuts, at_once)

    def _cooled(self, ask: Ask) -> Cooled:
        """The cooled posterior of a trial, cut towards its size; with a single cut, trials of equal pressure share it."""
        file = kept_file(self.folder, ask.number)
        alike = [one for one in self.kept.trials if one.pressure == ask.pressure] if ask.cuts == 1 else []
        if alike and not file.exists():
            source = kept_file(self.folder, alike[0].number)
            write_atomically(file, lambda path: path.write_bytes(source.read_bytes()))

        def to_size(model: nn.Module, masks: Masks | None) -> Ways:
            given = self.context, self.opened, self.dense, model, self.measure, ask.target, masks
            return ways_for(self.measure)(*given, by_outputs=ask.unpressed)

        return cooled(self.path, ask, to_size, self._way)

    def _way(self, to_size: Ways) -> Way:
        """The way that a trial follows in its steps."""
        return chosen_for(self.context, self.opened.data, to_size)[0]

    @cached_property
    def _reconstructor(self) -> Reconstructor | None:
        if not reconstructs(self.context.recipe, self.measure.name) or not fits_any(self.variational.model):
            return None
        return Reconstructor(self.opened, self.fitted_to, self.context.place.device)

    def _reconstruct(self, model: Cooled, selection: Selection) -> Reconstruction | None:
        """Fit what stays to make up for what goes, if the trial is cut at once and living units have to go; else None."""
        if self._reconstructor is None or not model.at_once or (selection.way or {}).get("count") is None:
            return None
        with self._working("reconstructing"):
            return self._reconstructor.cut(model.model, selection.masks, model.masks)

    def _masks(self, model: Cooled, target: float, file: Path) -> Selection:
        """The masks of a trial. file: holds how a stopped run arrived at them; else that is written to it."""
        known = known_way(file)
        given = self.context, self.opened, self.dense, model, self.measure, target, known
        selection = masks_for(*given, self._reconstructor if model.at_once else None)
        if known is None:
            keep(file, selection.way)
        return selection

    def _nothing_left(self, number: int, pressure: float, target: float, started: float, epochs: list[dict[str, Any]]) -> None:
        """Record a trial that was left with one and the same answer to all inputs: dense model's size, drop of 100."""
        where = {"number": number, "pressure": pressure, "beta": self.path.beta(pressure)}
        sizes: dict[str, Any] = {"ratio": math.log2(self._dense_size / target), "natural": 1.0, "costs": dict(self.costs)}
        lost = {**_lost_all(self.judged), "allowed": min(self.allowed, 1e9), "seconds": time.monotonic() - started}
        self.kept.trials.append(Trial(**where, **sizes, **lost, threshold=None))
        self.kept.epochs[number] = epochs
        self._spend()
        self._say(
            f"trial {number}: at {target:,.4g} {MEASURES[self.measure.name]} the model gives the same answer to all inputs"
        )

    @property
    def _wanted(self) -> float:
        """The size that the goal asks for; infinite without a goal."""
        return math.inf if self.goal is None else self.goal.target(self._dense_size)

    @property
    def _target(self) -> float:
        """The size that trials aim at: that of the goal if it is within reach, else `_floor`."""
        least = self.kept.least or 0.0
        within = self._wanted * (1 + CLOSE) >= least
        return self._wanted if within else self._floor

    @property
    def _floor(self) -> float:
        """The smallest size that is worth a trial."""
        return min((self.kept.least or 0.0) * ABOVE, self._dense_size)

    @property
    def cuts(self) -> int:
        """The number of steps in which a trial is cut to its size, if it cools for that many epochs."""
        return cuts_of(self.context.recipe, self.measure.name)

    # Helpers

    @property
    def _dense_size(self) -> float:
        return self.costs[self.measure.name]

    def _small(self, trial: Trial) -> tuple[Small, dict[str, Any]]:
        """The small model of a trial, and the extra data stored with it."""
        file, pruning = self._model_file(trial.number), self.kept.pruning[trial.number]
        model = whole(checkpoint.load(file, make_model(self.context.recipe.model)), pruning).eval()
        return Small(model, pruning), checkpoint.read_manifest(file)["extra"]

    @property
    def _trained(self) -> int:
        return trained(len(self.path.history), self.kept.epochs.values(), shared=self.cuts == 1)

    def _losses(self, model: nn.Module) -> Losses:
        return on_validation(self.context, self.opened.data, model)

    def _model_file(self, number: int) -> Path:
        folder = self.context.out / "trials"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{number:02d}.safetensors"

    def _spend(self) -> None:
        self.kept.said = {kind: lines[len(self.said_before[kind]) :] for kind, lines in self.context.said().items()}
        self.kept.seconds = self._seconds
        self.kept.write()

    @property
    def _seconds(self) -> float:
        """How long the search has taken, over all sittings."""
        return self.before + time.monotonic() - self.started

    def _late(self) -> bool:
        """Whether the time is up, with or without trials."""
        limit = self.settings.max_minutes
        return limit is not None and self._seconds > 60 * limit

    def _working(self, what: str) -> AbstractContextManager[None]:
        """Show that work without epochs is in progress: it can take minutes with a large model."""
        return self.context.bars.working(what, stays=False)

    def _say(self, line: str) -> None:
        self.context.say(f"[dim]search:[/] {escape(line)}")


def _stored(selection: Selection) -> dict[str, Any]:
    return {"asked": selection.asked, "target": selection.target, **(selection.way or {})}


def _lost_all(judged: Losses) -> dict[str, Any]:
    """How a trial of which nothing is left is judged. judged: the dense model's losses."""
    error = judged.error + 100 if judged.probabilities else 2 * judged.error
    return {"error": error, "drop": 100.0, "upper": 100.0, "met": False, "metrics": {"error": error, "nll": NOTHING}}
