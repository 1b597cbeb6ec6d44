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
from svdcompress.errors import RecipeError
from svdcompress.likelihoods import likelihood_for
from svdcompress.pipeline._begin import Dense, Opened, Variational
from svdcompress.pipeline._choose_masks import masks_for
from svdcompress.pipeline._context import Context
from svdcompress.pipeline._figures import there
from svdcompress.pipeline._measure import Measure
from svdcompress.pipeline._path import Climb
from svdcompress.pipeline._search_kept import Kept
from svdcompress.pipeline._search_words import error_of, outcome, told_trial
from svdcompress.pipeline._select import bare, whole
from svdcompress.pipeline._smaller import Small, prune_stage, recover_stage
from svdcompress.recipe import MEASURES, Goal, Recipe, parse_goal
from svdcompress.search import Budget, Losses, Trial, better_pressure, next_pressure, pressure_of_size, smallest, start_pressure
from svdcompress.selection import Selection
from svdcompress.sources import make_model
from svdcompress.train import losses

HOPELESS = 10.0
"""The path ends where masks lose, before any recovery, this many times what is allowed (and 10 points at least)."""

FURTHER = 0.85
"""The next size to try at a pressure that kept the budget."""

RECOVERY = 0.05
"""Of a trial's beta, what its recovery goes on with where the recipe says auto. With the masks held all that is left is needed,
and what pressed for sparsity is only noise (recipes tuned by hand have 0.01 to 0.04 of it)."""

UNITS = {"weight": 0.8, "input": 0.1, "output": 0.1}
"""Shares of a search for shapes where the recipe asks single weights alone."""

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
        self.folder.mkdir(parents=True, exist_ok=True)
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
        """The whole search. Raises RecipeError for a budget that the dense model itself misses."""
        self._check()
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

    def _check(self) -> None:
        settings, judged = self.settings, self.judged
        unit = "%" if judged.probabilities else ""
        if self.allowed < 0:
            raise RecipeError(
                f"search.max_error: {settings.max_error:g}: the dense model itself has {judged.error:.4g}{unit} on the "
                "validation data; allow more, or start from a better one"
            )
        count, needed = len(judged.parts), self.budget.needed(judged)
        if self.budget.given and count < needed:
            drop = f"{self.allowed:.3g} points" if judged.probabilities else f"{self.allowed:.3g}% of the RMSE"
            self.context.warn(
                f"{count:,} validation examples cannot tell a drop of {drop} from chance: about {needed:,} would. The drop "
                "that is measured decides, in whole examples; set data.validation, or allow more"
            )
        if (line := self._seen()) is not None:
            self.context.warn(line)

    def _seen(self) -> str | None:
        """A warning where weights that were trained elsewhere know the validation examples by heart, as it seems."""
        recipe, data = self.context.recipe, self.opened.data
        if not recipe.weights.file or isinstance(recipe.data.validation, str) or not self.judged.probabilities:
            return None
        count = min(len(data.train), len(data.validation))
        with there(self.context.place.device, self.dense.model):
            wrong = _judged(self.dense.model, data.train.subset(range(count)), data, self.context.place.device)
        fewer = self.judged.error <= max(1.5 * wrong.error, wrong.error + 0.2)
        if not (fewer and self.judged.error < 1.0):
            return None
        return (
            f"the weights have {wrong.error:.2g}% error on training and {self.judged.error:.2g}% on validation examples: they "
            "were probably trained on both, and a drop on such examples says little. Name others: --validation SOURCE, or "
            "--validation test:50% for a part of the test data"
        )

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
            if lost or small_enough or self._over():
                break

    def _small_enough(self, row: dict[str, float]) -> bool:
        """Whether more pressure would go far beyond the goal: its size is reached twice over."""
        return self.measure.name == "nonzero" and row["nonzero"] < self._target / 2

    def _for_size(self, target: float) -> None:
        """Trials of the size wanted, at the pressure that gives it by itself and beside it."""
        levels = len(self.path.rows)
        if self.measure.name == "nonzero":
            near = pressure_of_size([row["nonzero"] for row in self.path.rows], target)
        else:
            near = start_pressure([row["error"] for row in self.path.rows], self.judged.error, min(self.allowed, 1.0))
        most = max(1, self.settings.trials // 2) if self.budget.given else self.settings.trials
        while len(self.kept.trials) < most and not self._over():
            pressure = better_pressure(self.kept.trials, near, levels)
            if pressure is None:
                break
            self._trial(round(pressure, 3), target)

    def _for_drop(self) -> None:
        """Trials between what keeps the budget and what does not; then smaller ones at the best of them."""
        levels = len(self.path.rows)
        errors = [row["error"] for row in self.path.rows]
        start = start_pressure(errors, self.judged.error, self._points(self.allowed))
        while not self._over() and self._left():
            own = [trial for trial in self.kept.trials if not trial.ranked]
            pressure = next_pressure(own, start, levels)
            if pressure is None:
                break
            self._trial(round(pressure, 3), None)
        while not self._over() and self._left():
            best = smallest(self.kept.trials, self.measure.name)
            if best is None:
                break
            target = FURTHER * best.costs[self.measure.name]
            if any(t.pressure == best.pressure and t.ranked and not t.met for t in self.kept.trials):
                break  # smaller ones were lost already
            self._trial(best.pressure, target)

    # One trial

    def _trial(self, pressure: float, target: float | None) -> None:
        """Cool, choose, prune, recover, judge; one that was done before is not done again."""
        number = len(self.kept.trials) + 1
        started = time.monotonic()
        model, epochs = self.path.cooled(pressure)
        selection = masks_for(self.context, self.opened, self.dense, model, self.measure, target, self._points(self.allowed))
        folder = self.folder / f"trial-{number}"
        folder.mkdir(exist_ok=True)
        small = prune_stage(self.context, self.opened, model, selection.masks, folder / "pruned.safetensors")
        fit = recover_stage(
            self.context,
            self.dense,
            self.variational,
            small,
            ended=RECOVERY * self.path.beta(pressure),
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
        extra = {"pruning": small.pruning, "selection": _stored(selection)}
        checkpoint.save(bare(small.model), self._model_file(number), extra=report.plain(extra))
        trial = Trial(
            number=number,
            pressure=pressure,
            beta=self.path.beta(pressure),
            threshold=selection.asked if isinstance(selection.asked, float) else None,
            ranked=target is not None,
            costs=costs["small"],
            metrics=self.dense.trainer.validate(small.model),
            error=verdict.error,
            drop=verdict.drop,
            upper=verdict.upper,
            allowed=min(self.allowed, 1e9),
            met=verdict.met,
            seconds=time.monotonic() - started,
        )
        self.kept.trials.append(trial)
        self.kept.epochs[number] = [*epochs, *(fit.history if fit is not None else [])]
        self._spend()
        shutil.rmtree(folder)
        self._say(told_trial(trial, self.measure.name, self.costs, self.judged, self.budget.given))

    @property
    def _target(self) -> float:
        """The size of the goal; infinite without one."""
        return math.inf if self.goal is None else self.goal.target(self.costs[self.measure.name])

    # What is found

    def _best_at_goal(self) -> Trial | None:
        """Of the trials that got to the goal the one of the least error; of none, the closest in size."""
        if self.goal is None or not self.kept.trials:
            return None
        target = self._target * (1 + CLOSE)
        there_ = [trial for trial in self.kept.trials if trial.costs[self.measure.name] <= target]
        if there_:
            return min(there_, key=lambda one: (one.error, one.metrics["nll"], one.number))
        return min(self.kept.trials, key=lambda one: one.costs[self.measure.name])

    def _closest(self) -> Trial:
        return min(self.kept.trials, key=lambda one: (one.drop, one.number))

    def _report(self, best: Trial) -> None:
        results, settings, measure = self.context.results, self.settings, self.measure.name
        target = self._target * (1 + CLOSE)
        epochs = self.context.recipe.train.epochs
        lines = outcome(best, self.kept.trials, measure, self.goal, target, self.judged, self.budget.given, epochs)
        for line in lines:
            self.context.warn(line)
        results["search"] = {
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
        model, _ = self.path.cooled(best.pressure)
        file = self._model_file(best.number)
        stored = checkpoint.read_manifest(file)["extra"]
        small = Small(
            whole(checkpoint.load(file, make_model(context.recipe.model)), stored["pruning"]).eval(), stored["pruning"]
        )
        target = stored["selection"]["target"]
        selection = masks_for(context, self.opened, self.dense, model, self.measure, target, self._points(self.allowed))
        context.history += [*self.path.history, *self.kept.epochs[best.number]]
        return Found(replace(self.variational, model=model), selection, small)

    # Small things

    def _losses(self, model: nn.Module) -> Losses:
        device = self.context.place.device
        with there(device, model):
            return _judged(model, self.opened.data.validation, self.opened.data, device)

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
        limit = self.settings.max_minutes
        return limit is not None and bool(self.kept.trials) and self.kept.seconds > 60 * limit

    def _spend(self) -> None:
        self.kept.seconds = self.before + time.monotonic() - self.started
        self.kept.write()

    def _say(self, line: str) -> None:
        self.context.say(f"[dim]search:[/] {escape(line)}")


def objective_of(recipe: Recipe) -> str:
    """What a search makes small: what is set, else what the goal measures, else what the shares of the layers ask for."""
    if recipe.search.goal is not None:
        return parse_goal(recipe.search.goal).measure
    if recipe.search.objective != "auto":
        return recipe.search.objective
    return "macs" if _asks_units(recipe) else "nonzero"


def for_objective(recipe: Recipe) -> tuple[Recipe, str | None]:
    """The recipe that a search for shapes begins with, and what to say of it: units are asked whether they are needed too.

    Of single weights alone hardly a unit loses all that it has, and what is asked for would have to be taken from the living.
    """
    measure = objective_of(recipe)
    if not recipe.search.wanted or measure in ("nonzero", "bytes") or _asks_units(recipe):
        return recipe, None
    convert = recipe.convert.model_copy(update={"share": dict(UNITS)})
    parts = ", ".join(f"{name} {part:g}" for name, part in UNITS.items())
    note = (
        f"{MEASURES[measure]} follow the shapes, so whole units are asked whether they are needed too (convert.share: {parts})"
    )
    return recipe.model_copy(update={"convert": convert}), note


def _asks_units(recipe: Recipe) -> bool:
    shares = [recipe.convert.share, *(rule.share for rule in recipe.convert.layers if rule.share is not None)]
    return any(not {"input", "output"}.isdisjoint([share] if isinstance(share, str) else share) for share in shares)


def _judged(model: nn.Module, examples: Any, data: Any, device: Any) -> Losses:
    likelihood = likelihood_for(data.task, data.dim)
    first, _, numbers = losses(model, examples, likelihood, device=device)
    some = numbers > 0
    scale = 1.0 if likelihood.probabilities or data.target_scale is None else data.target_scale[1] ** 2
    return Losses(first[some] * scale, numbers[some], likelihood.probabilities)


def _stored(selection: Selection) -> dict[str, Any]:
    return {"asked": selection.asked, "target": selection.target}
