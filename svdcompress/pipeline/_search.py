"""The stage of the search: from a dense model and a budget to the small model that was the best of its trials."""

from __future__ import annotations

import math
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from rich.markup import escape
from torch import nn

from svdcompress import checkpoint, report
from svdcompress.errors import CheckpointError, OutputError, PruneError, RecipeError
from svdcompress.files import write_atomically
from svdcompress.pipeline._begin import Dense, Opened, Variational
from svdcompress.pipeline._choose_masks import masks_for
from svdcompress.pipeline._context import Context
from svdcompress.pipeline._cool import Ask, Cooled, begin, cooled, kept_file
from svdcompress.pipeline._figures import there
from svdcompress.pipeline._measure import Measure
from svdcompress.pipeline._path import COOLING_EPOCHS, START, Climb, epochs_of
from svdcompress.pipeline._search_cost import MOST, TIMES, cuts_of, levels_of, one_run, trained, trials_of
from svdcompress.pipeline._search_kept import Kept, keep, known_way
from svdcompress.pipeline._search_start import doubts, judged, objective_of
from svdcompress.pipeline._search_words import cut_by_rank, cut_short, error_of, other_machine, outcome, told_how, told_trial
from svdcompress.pipeline._select import bare, whole
from svdcompress.pipeline._smaller import Small, prune_stage, recover_stage
from svdcompress.pipeline._ways import FOLLOWS, Ways, ways
from svdcompress.recipe import MEASURES, Goal, parse_goal
from svdcompress.relevance import Masks
from svdcompress.search import CLOSE, Budget, Losses, Strategy, Trial
from svdcompress.selection import Selection, check_some_left
from svdcompress.sources import make_model

HOPELESS = 10.0
"""The path ends where masks lose, before any recovery, this many times what is allowed (and 10 points at least)."""


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
        for file in (kept_file(self.folder, trial.number) for trial in self.kept.trials):
            if not file.is_file():
                raise CheckpointError(f"{file}: missing, or of a former version; remove {self.folder} to search again")
        total = sum(prod(shape) for shape in variational.shapes.values())
        self.path = Climb(context, opened, dense, variational, self.folder, total)
        self.started = time.monotonic()
        self.before = self.kept.seconds
        self.judged = self._losses(dense.model)
        self.allowed = self.budget.allowed(self.judged.error, self.judged.probabilities)
        self.costs = self._dense_costs()

    def _dense_costs(self) -> dict[str, float]:
        """The dense model's, as they were measured first: another measure of its latency would make another search of it."""
        how = self.measure.how()
        if self.kept.dense is None or not {self.measure.name, FOLLOWS[self.measure.name]} <= set(self.kept.dense["costs"]):
            self.kept.dense = {"costs": self.measure.of(dense=self.dense.model)["dense"], "measured": how}
        costs, before = self.kept.dense["costs"], self.kept.dense["measured"]
        if before != how:
            self.context.warn(other_machine(before, how, costs["latency"]))
        self.measure = replace(self.measure, first=costs.get("latency"))
        return costs

    # In order

    def run(self) -> Found:
        """The whole search. Raises RecipeError for a budget that the dense model itself misses, and under several processes."""
        if self.context.place.world > 1:
            raise RecipeError("search: works in one process only; start it without `accelerate launch`")
        for line in doubts(self.context, self.opened, self.dense, self.budget, self.judged):
            self.context.warn(line)
        self.folder.mkdir(parents=True, exist_ok=True)  # from here on something was made
        self._spend()
        try:
            best, lines = self._searched()
        except BaseException:
            with suppress(OutputError, OSError):  # what stops it is to be told
                self._spend()
            raise
        self._report(best, lines)
        return self._found(best)

    def _searched(self) -> tuple[Trial, list[str]]:
        """The best of all trials, and a line where the time was up before they were done."""
        whole = self._climb()
        strategy = self._strategy()
        while (ask := strategy.next(self.kept.trials)) is not None and not self._over():
            self._trial(*ask)
        lines = []
        if ask is not None or not whole:
            wanted = None if ask is None else (self.path.beta(ask[0]), self._dense_size / ask[1])
            levels, trials = None if whole else len(self.path.rows), len(self.kept.trials)
            lines.append(cut_short(self.settings, self.kept.seconds, levels, trials, self._whole, wanted, self.measure.name))
        elif self._cut_off(strategy):
            made = len(self.kept.trials)
            trials = f"{made} trial{'s' * (made > 1)}"
            self._say(f"no more than {trials} fit into {TIMES:g} times the epochs of one run; --trials {2 * made} tries more")
        return strategy.best(self.kept.trials), lines

    def _cut_off(self, strategy: Strategy) -> bool:
        """Whether more trials were worth making than their epochs allow."""
        allowed = self.settings.trials is None and len(self.kept.trials) == self.trials < MOST
        return allowed and strategy.unbounded().next(self.kept.trials) is not None

    def _strategy(self) -> Strategy:
        rows = self.path.rows
        return Strategy(
            measure=self.measure.name,
            dense=self._dense_size,
            goal=None if self.goal is None else self._target,
            budget=self.budget.given,
            trials=self.trials,
            ratios=[self._natural(row) for row in rows],
            errors=[row["error"] for row in rows],
            error=self.judged.error,
            allowed=self._points(self.allowed),
            press=math.inf if self.cuts == 1 else START,
        )

    def _climb(self) -> bool:
        """The path, as far as anything on it may be within the budget; False where the time was up before."""
        hopeless = self.judged.error + max(10.0, HOPELESS * min(self.allowed, 100.0)) if self.judged.probabilities else math.inf
        limit = self.judged.error * (2 + HOPELESS * min(self.allowed, 100.0) / 100)
        for level in range(1, self.levels + 1):
            row = self.path.climb(level)
            self._say(
                f"level {level}: beta {row['beta']:.3g}, {int(row['nonzero']):,} non-zeros, "
                f"{error_of(row['error'], self.judged)} before recovery"
            )
            self._spend()
            lost = row["error"] > (hopeless if self.judged.probabilities else limit)
            small_enough = self.goal is not None and not self.budget.given and self._small_enough(row)
            if lost or small_enough:
                return True
            known = self.path.known(level + 1)  # of a search that was stopped later than this
            if self._late() and not known:
                return level == self.levels
        return True

    def _small_enough(self, row: dict[str, float]) -> bool:
        """Whether more pressure would go far beyond the goal: its size is reached twice over."""
        return self._natural(row) > 2 * self._dense_size / self._target

    @property
    def cuts(self) -> int:
        """In how many steps a trial comes to its size, where it cools for so many epochs."""
        return cuts_of(self.context.recipe, self.measure.name)

    @property
    def levels(self) -> int:
        """How many there may be."""
        return levels_of(self.context.recipe, self.measure.name)

    @property
    def trials(self) -> int:
        """How many there may be."""
        return trials_of(self.context.recipe, self.measure.name)

    @property
    def _whole(self) -> tuple[int, int]:
        return self.levels, self.trials

    @property
    def _dense_size(self) -> float:
        return self.costs[self.measure.name]

    def _natural(self, row: dict[str, float]) -> float:
        """How many times smaller a level of the path is by itself, in what the measure follows."""
        follows = FOLLOWS[self.measure.name]
        return self.costs[follows] / max(row[follows], 1.0)

    # One trial

    def _trial(self, pressure: float, target: float) -> None:
        """Cool, choose, prune, recover, judge; one that was done before is not done again."""
        number = len(self.kept.trials) + 1
        started = time.monotonic()
        ask = self._ask(number, pressure, target)
        folder = begin(ask, self.folder)
        model = self._cooled(ask)
        selection = self._masks(model, target, folder / "way.json")
        try:
            check_some_left(model.model, selection.masks, self.opened.data.validation)
        except PruneError:
            shutil.rmtree(folder)
            self._nothing_left(number, pressure, target, started, model.history)
            return
        small = prune_stage(self.context, self.opened, model.model, selection.masks, folder / "pruned.safetensors")
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
        costs = self.measure.of_small(small.model, self.dense.model)
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
            seconds=time.monotonic() - started,
        )
        self.kept.trials.append(trial)
        self.kept.pruning[number] = small.pruning
        self.kept.epochs[number] = [*model.history, *(fit.history if fit is not None else [])]
        self._spend()
        shutil.rmtree(folder)
        self._say(told_trial(trial, self.measure.name, self.costs, self.judged, self.budget.given))

    def _ask(self, number: int, pressure: float, target: float) -> Ask:
        return Ask(number, pressure, target, self.cuts)

    def _cooled(self, ask: Ask) -> Cooled:
        """The posterior of a trial, on its way to a size; with one cut the same for all trials of a pressure."""
        file = kept_file(self.folder, ask.number)
        alike = [one for one in self.kept.trials if one.pressure == ask.pressure] if ask.cuts == 1 else []
        if alike and not file.exists():
            source = kept_file(self.folder, alike[0].number)
            write_atomically(file, lambda path: path.write_bytes(source.read_bytes()))

        def to_size(model: nn.Module, masks: Masks | None) -> Ways:
            return ways(self.context, self.opened, self.dense, model, self.measure, ask.target, masks)

        return cooled(self.path, ask, to_size)

    def _masks(self, model: Cooled, target: float, file: Path) -> Selection:
        """The masks of a trial. file: how a stopped run came to them, else where that is kept until the trial is done."""
        known = known_way(file)
        selection = masks_for(self.context, self.opened, self.dense, model, self.measure, target, known)
        if known is None:
            keep(file, selection.way)
        return selection

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

    def _report(self, best: Trial, lines: list[str]) -> None:
        results, settings, measure = self.context.results, self.settings, self.measure.name
        target = self._target * (1 + CLOSE)
        epochs, how = self.context.recipe.train.epochs, self.measure.how()
        judged, budget = self.judged, self.budget.given
        steps = min(self.cuts, epochs_of(self.context.recipe.train, COOLING_EPOCHS))
        how_told = told_how(how)
        lines = lines + outcome(best, self.kept.trials, measure, self.goal, target, judged, budget, epochs, how_told, steps)
        unit, levels = MEASURES[FOLLOWS[measure]], len(self.path.rows)
        lines += cut_by_rank(best, levels, settings, unit, epochs, self.levels, steps)
        for line in lines:
            self.context.warn(line)
        results.search = {
            "objective": measure,
            **{name: getattr(settings, name) for name in ("goal", "max_drop", "max_error", "confidence")},
            **({"measured": how} if how else {}),
            "dense": {"error": judged.error, "costs": self.costs},
            "validation_examples": len(judged.parts),
            "path": self.path.rows,
            "trials": [trial.to_dict() for trial in self.kept.trials],
            "chosen": best.number,
            "met": best.met if budget else None,
            "reached": best.costs[measure] <= target if self.goal is not None else None,
            "epochs": {
                "search": trained(len(self.path.history), self.kept.epochs.values(), shared=self.cuts == 1),
                "one_run": one_run(self.context.recipe),
            },
            "seconds": self.kept.seconds,
            "notes": lines,
        }
        ratio = self._dense_size / max(best.costs[measure], 1e-12)
        self._say(f"chosen: trial {best.number}, {ratio:.3g}x fewer {MEASURES[measure]}{told_how(how)}")

    def _found(self, best: Trial) -> Found:
        context = self.context
        if best.number not in self.kept.pruning:
            raise PruneError(
                "search: every trial left a model of one answer to all inputs. Ask for less, or train longer: more "
                "train.epochs and recover.epochs"
            )
        file = self._model_file(best.number)
        stored = checkpoint.read_manifest(file)["extra"]
        pruning = self.kept.pruning[best.number]
        small = Small(whole(checkpoint.load(file, make_model(context.recipe.model)), pruning).eval(), pruning)
        target = stored["selection"]["target"]
        model = self._cooled(self._ask(best.number, best.pressure, target))
        selection = masks_for(context, self.opened, self.dense, model, self.measure, target, stored["selection"])
        context.history += [*self.path.history, *self.kept.epochs[best.number]]
        return Found(replace(self.variational, model=model.model), selection, small)

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
    return {"asked": selection.asked, "target": selection.target, **(selection.way or {})}
