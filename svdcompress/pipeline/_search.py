"""The stage of the search: from a dense model and a budget to the small model that was the best of its trials."""

from __future__ import annotations

import math
import shutil
import time
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from rich.markup import escape
from torch import nn

from svdcompress import checkpoint, report
from svdcompress.errors import PruneError, RecipeError
from svdcompress.pipeline._begin import Dense, Opened, Variational
from svdcompress.pipeline._choose_masks import FOLLOWS, masks_for
from svdcompress.pipeline._context import Context
from svdcompress.pipeline._figures import there
from svdcompress.pipeline._measure import Measure
from svdcompress.pipeline._path import Climb
from svdcompress.pipeline._search_kept import Kept
from svdcompress.pipeline._search_start import doubts, judged, objective_of
from svdcompress.pipeline._search_words import error_of, outcome, told_trial
from svdcompress.pipeline._select import bare, whole
from svdcompress.pipeline._smaller import Small, prune_stage, recover_stage
from svdcompress.recipe import MEASURES, Goal, parse_goal
from svdcompress.search import (
    LOWEST,
    Budget,
    Losses,
    Trial,
    better_pressure,
    next_ratio,
    pressure_of_size,
    smallest,
    start_ratio,
)
from svdcompress.selection import Selection, check_some_left
from svdcompress.sources import make_model

HOPELESS = 10.0
"""The path ends where masks lose, before any recovery, this many times what is allowed (and 10 points at least)."""

FURTHER = 0.85
"""The next size to try at a pressure that kept the budget."""

SHIFT = 0.8
"""By so many levels a posterior becomes sparser while it cools, until a trial tells."""

CLOSE = 0.02
"""A size within so much of the goal has reached it."""


@dataclass(frozen=True)
class Found:
    """What the search hands on: the posterior that was pruned (its shapes those before), what stayed, and the small model."""

    variational: Variational
    selection: Selection
    small: Small


class Search:
    """One search. `run` does it, or goes on with what a stopped one left in `state/search`."""

    def __init__(self, context: Context, opened: Opened, dense: Dense, variational: Variational) -> None:
        recipe = context.recipe
        settings = recipe.search
        self.context, self.opened, self.dense, self.variational = context, opened, dense, variational
        self.settings = settings
        self.budget = Budget(settings.max_drop, settings.max_error, settings.confidence)
        self.goal: Goal | None = None if settings.goal is None else parse_goal(settings.goal)
        self.measure = Measure(objective_of(recipe), recipe, opened.data, opened.inputs)
        self.folder = context.state.folder / "search"
        self.kept = Kept(self.folder / "trials.json").read()
        total = sum(prod(shape) for shape in variational.shapes.values())
        self.path = Climb(context, opened, dense, variational, self.folder, total)
        self.started = time.monotonic()
        self.before = self.kept.seconds
        self.judged = self._losses(dense.model)
        self.allowed = self.budget.allowed(self.judged.error, self.judged.probabilities)
        self.costs = self.measure.of(dense=dense.model)["dense"]

    # In order

    def run(self) -> Found:
        """The whole search. Raises RecipeError for a budget that the dense model itself misses, and under several processes."""
        if self.context.place.world > 1:
            raise RecipeError("search: works in one process only; start it without `accelerate launch`")
        for line in doubts(self.context, self.opened, self.dense, self.budget, self.judged):
            self.context.warn(line)
        self.folder.mkdir(parents=True, exist_ok=True)  # from here on something was made
        self._climb()
        if self.goal is not None:
            self._for_size(self._target)
        best = self._best_at_goal()
        if self.budget.given and (best is None or not best.met):
            self._for_drop()
            best = smallest(self.kept.trials, self.measure.name) or self._closest()
        assert best is not None
        self._report(best)
        return self._found(best)

    def _climb(self) -> None:
        """The path, as far as anything on it may be within the budget."""
        hopeless = self.judged.error + max(10.0, HOPELESS * min(self.allowed, 100.0)) if self.judged.probabilities else math.inf
        limit = self.judged.error * (2 + HOPELESS * min(self.allowed, 100.0) / 100)
        for level in range(1, self.settings.levels + 1):
            row = self.path.climb(level)
            self._say(
                f"level {level}: beta {row['beta']:.3g}, {int(row['nonzero']):,} non-zeros, "
                f"{error_of(row['error'], self.judged)} before recovery"
            )
            self._spend()
            lost = row["error"] > (hopeless if self.judged.probabilities else limit)
            small_enough = self.goal is not None and not self.budget.given and self._small_enough(row)
            known = self.path.known(level + 1)  # of a search that was stopped later than this
            if lost or small_enough or (self._late() and not known):
                break

    def _small_enough(self, row: dict[str, float]) -> bool:
        """Whether more pressure would go far beyond the goal: its size is reached twice over."""
        return self._natural(row) > 2 * self._dense_size / self._target

    @property
    def _dense_size(self) -> float:
        return self.costs[self.measure.name]

    def _natural(self, row: dict[str, float]) -> float:
        """How many times smaller a level of the path is by itself, in what the measure follows."""
        follows = FOLLOWS[self.measure.name]
        return self.costs[follows] / max(row[follows], 1.0)

    def _on_path(self, ratio: float) -> float:
        """Where on the path a model is so many times smaller by itself."""
        return pressure_of_size([1 / self._natural(row) for row in self.path.rows], 1 / ratio)

    def _pressure(self, size: float) -> float:
        """The pressure of which a size comes by itself once it is cooled, as far as the trials so far tell."""
        shifts = [self._on_path(trial.natural) - trial.pressure for trial in self.kept.trials]
        shift = sum(shifts) / len(shifts) if shifts else SHIFT
        return round(min(max(self._on_path(self._dense_size / size) - shift, LOWEST), float(len(self.path.rows))), 3)

    def _for_size(self, target: float) -> None:
        """Trials of the size wanted, at the pressures that lose least."""
        most = max(1, self.settings.trials // 2) if self.budget.given else self.settings.trials
        while len(self.kept.trials) < most and not self._over():
            pressure = better_pressure(self.kept.trials, self._pressure(target), len(self.path.rows))
            if pressure is None:
                break
            self._trial(round(pressure, 3), target)

    def _for_drop(self) -> None:
        """Sizes between what keeps the budget and what does not; then the next smaller one, pressed otherwise."""
        rows = self.path.rows
        errors, ratios = [row["error"] for row in rows], [self._natural(row) for row in rows]
        start = start_ratio(ratios, errors, self.judged.error, self._points(self.allowed))
        while not self._over() and self._left():
            ratio = next_ratio(self.kept.trials, start)
            if ratio is None:
                break
            size = self._dense_size * 2.0 ** -round(ratio, 3)
            self._trial(self._pressure(size), size)
        for step in (0.5, -0.5):
            best = smallest(self.kept.trials, self.measure.name)
            if best is None or self._over() or not self._left():
                break
            size = FURTHER * best.costs[self.measure.name]
            self._trial(round(max(self._pressure(size) + step, LOWEST), 3), size)

    # One trial

    def _trial(self, pressure: float, target: float) -> None:
        """Cool, choose, prune, recover, judge; one that was done before is not done again."""
        number = len(self.kept.trials) + 1
        started = time.monotonic()
        model, epochs = self.path.cooled(pressure)
        selection = masks_for(self.context, self.opened, self.dense, model, self.measure, target)
        try:
            check_some_left(model, selection.masks, self.opened.data.validation)
        except PruneError:
            self._nothing_left(number, pressure, target, started, epochs)
            return
        folder = self.folder / f"trial-{number}"
        folder.mkdir(exist_ok=True)
        small = prune_stage(self.context, self.opened, model, selection.masks, folder / "pruned.safetensors")
        fit = recover_stage(
            self.context,
            self.dense,
            self.variational,
            small,
            ended=self.path.beta(pressure),
            stage=f"trial {number}",
            state=folder / "recover.pt",
        )
        small.model.eval()
        pair = {"small": small.model} if self.measure.name != "latency" else {"dense": self.dense.model, "small": small.model}
        costs = self.measure.of(**pair)
        if "dense" in costs:  # in turns: as ratios of one run, on whatever machine this is now
            factor = self.costs["latency"] / costs["dense"]["latency"]
            costs["small"]["latency"] *= factor
        verdict = self.budget.judge(self.judged, self._losses(small.model))
        inputs = {name: small.pruning.get(name) for name in ("inputs_kept", "inputs_dim")}
        extra = {"inputs": inputs, "selection": _stored(selection)}  # no times: a stopped search ends in the same bytes
        checkpoint.save(bare(small.model), self._model_file(number), extra=report.plain(extra))
        trial = Trial(
            number=number,
            pressure=pressure,
            beta=self.path.beta(pressure),
            ratio=math.log2(self._dense_size / target),
            natural=self.costs[FOLLOWS[self.measure.name]] / max(selection.natural or 0.0, 1.0),
            threshold=selection.asked if isinstance(selection.asked, float) else None,
            costs=costs["small"],
            metrics=self.dense.trainer.validate(small.model),
            error=verdict.error,
            drop=verdict.drop,
            upper=verdict.upper,
            allowed=min(self.allowed, 1e9),
            met=verdict.met,
            estimate=verdict.estimate,
            at_most=verdict.at_most,
            seconds=time.monotonic() - started,
        )
        self.kept.trials.append(trial)
        self.kept.pruning[number] = small.pruning
        self.kept.epochs[number] = [*epochs, *(fit.history if fit is not None else [])]
        self._spend()
        shutil.rmtree(folder)
        self._say(told_trial(trial, self.measure.name, self.costs, self.judged, self.budget.given))

    def _nothing_left(self, number: int, pressure: float, target: float, started: float, epochs: list[dict[str, Any]]) -> None:
        """A trial whose size leaves one answer to all inputs: it is as large as the dense model, and always wrong."""
        lost = {
            "error": self.judged.error + 100,
            "drop": 100.0,
            "upper": 100.0,
            "allowed": min(self.allowed, 1e9),
            "met": False,
            "metrics": {"error": self.judged.error + 100, "nll": 1e9},
        }
        where = {"number": number, "pressure": pressure, "beta": self.path.beta(pressure)}
        sizes: dict[str, Any] = {"ratio": math.log2(self._dense_size / target), "natural": 1.0, "costs": dict(self.costs)}
        self.kept.trials.append(Trial(**where, **sizes, **lost, threshold=None, seconds=time.monotonic() - started))
        self.kept.epochs[number] = epochs
        self._spend()
        self._say(f"trial {number}: nothing but one answer is left at {target:,.4g} {MEASURES[self.measure.name]}")

    @property
    def _target(self) -> float:
        """The size of the goal; infinite without one."""
        return math.inf if self.goal is None else self.goal.target(self._dense_size)

    # What is found

    def _best_at_goal(self) -> Trial | None:
        """Of the trials that got to the goal the one of the least error; of none, the closest in size."""
        if self.goal is None or not self.kept.trials:
            return None
        target = self._target * (1 + CLOSE)
        there_ = [trial for trial in self.kept.trials if trial.costs[self.measure.name] <= target]
        if there_:
            return min(there_, key=lambda one: (one.lost, one.metrics["nll"], one.number))
        return min(self.kept.trials, key=lambda one: one.costs[self.measure.name])

    def _closest(self) -> Trial:
        return min(self.kept.trials, key=lambda one: (one.lost, one.number))

    def _report(self, best: Trial) -> None:
        results, settings, measure = self.context.results, self.settings, self.measure.name
        target = self._target * (1 + CLOSE)
        epochs = self.context.recipe.train.epochs
        lines = outcome(best, self.kept.trials, measure, self.goal, target, self.judged, self.budget.given, epochs)
        for line in lines:
            self.context.warn(line)
        results.search = {
            "objective": measure,
            **{name: getattr(settings, name) for name in ("goal", "max_drop", "max_error", "confidence")},
            "dense": {"error": self.judged.error, "costs": self.costs},
            "validation_examples": len(self.judged.parts),
            "path": self.path.rows,
            "trials": [trial.to_dict() for trial in self.kept.trials],
            "chosen": best.number,
            "met": best.met if self.budget.given else None,
            "reached": best.costs[measure] <= target if self.goal is not None else None,
            "seconds": self.kept.seconds,
            "notes": lines,
        }
        self._say(f"chosen: trial {best.number}")

    def _found(self, best: Trial) -> Found:
        context = self.context
        if best.number not in self.kept.pruning:
            raise PruneError(
                "search: every trial left a model of one answer to all inputs. Ask for less, or train longer: more "
                "train.epochs and recover.epochs"
            )
        model, _ = self.path.cooled(best.pressure)
        file = self._model_file(best.number)
        stored = checkpoint.read_manifest(file)["extra"]
        pruning = self.kept.pruning[best.number]
        small = Small(whole(checkpoint.load(file, make_model(context.recipe.model)), pruning).eval(), pruning)
        target = stored["selection"]["target"]
        selection = masks_for(context, self.opened, self.dense, model, self.measure, target)
        context.history += [*self.path.history, *self.kept.epochs[best.number]]
        return Found(replace(self.variational, model=model), selection, small)

    # Small things

    def _losses(self, model: nn.Module) -> Losses:
        device = self.context.place.device
        with there(device, model):
            return judged(model, self.opened.data.validation, self.opened.data, device)

    def _points(self, drop: float) -> float:
        """A drop in the units of the validation error: points, or the RMSE's."""
        return drop if self.judged.probabilities else drop / 100 * self.judged.error

    def _model_file(self, number: int) -> Path:
        folder = self.context.out / "trials"
        folder.mkdir(exist_ok=True)
        return folder / f"{number:02d}.safetensors"

    def _left(self) -> bool:
        return len(self.kept.trials) < self.settings.trials

    def _over(self) -> bool:
        """Whether the time is up; one trial there is always."""
        return bool(self.kept.trials) and self._late()

    def _late(self) -> bool:
        """Whether the time is up, trials or none."""
        limit = self.settings.max_minutes
        return limit is not None and self.kept.seconds > 60 * limit

    def _spend(self) -> None:
        self.kept.seconds = self.before + time.monotonic() - self.started
        self.kept.write()

    def _say(self, line: str) -> None:
        self.context.say(f"[dim]search:[/] {escape(line)}")


def _stored(selection: Selection) -> dict[str, Any]:
    return {"asked": selection.asked, "target": selection.target}
