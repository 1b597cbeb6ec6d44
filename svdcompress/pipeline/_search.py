"""The search stage: from a dense model and a budget or goal to the small model of the best trial."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, replace

from svdcompress.errors import OutputError, PruneError, RecipeError
from svdcompress.pipeline._begin import Variational
from svdcompress.pipeline._choose_masks import masks_for
from svdcompress.pipeline._levels import COOLING_EPOCHS, epochs_of
from svdcompress.pipeline._path import FEW, PART, START, UNPRESSED
from svdcompress.pipeline._search_cost import MOST, TIMES, left_for, levels_of, one_run, trials_of
from svdcompress.pipeline._search_start import doubts
from svdcompress.pipeline._search_trials import Trials
from svdcompress.pipeline._search_words import (
    at_floor,
    cut_by_rank,
    cut_short,
    error_of,
    left_alone,
    outcome,
    told_how,
    told_size,
    untaught,
)
from svdcompress.pipeline._smaller import Small
from svdcompress.pipeline._unit_ways import FOLLOWS
from svdcompress.recipe import MEASURES, smaller
from svdcompress.search import CLOSE, Ask, Strategy, Trial
from svdcompress.selection import Selection

HOPELESS = 10.0
"""With a budget, the path ends at a level whose masks lose this many times what is allowed (at least 10 points, or the dense
model's RMSE), before any recovery."""


@dataclass(frozen=True)
class Found:
    """The result of a search: the posterior that was pruned (in its shapes before that), what stayed, and the small model."""

    variational: Variational
    selection: Selection
    small: Small


class Search(Trials):
    """One search. `run` carries it out, or resumes a stopped one from `state/search`."""

    # The steps, in order

    def run(self) -> Found:
        """Run the whole search. Raises RecipeError for a budget that the dense model itself misses, for a goal that it has
        reached already, and without epochs of training if no layer can be reconstructed."""
        if not self.context.recipe.train.epochs and self._reconstructor is None:
            raise RecipeError(
                "train.epochs: 0: no layer of this model can be reconstructed, so a search needs 1 or more to train what stays"
            )
        if self.goal is not None and self.goal.size is not None and self.goal.size >= self._dense_size:
            told = (
                f"search.goal: {self.goal.text}: the dense model is no larger: it has {self._dense_size:,.4g} "
                f"{MEASURES[self.measure.name]}. Ask for less, or for a factor, as in {self.measure.name}=2x"
            )
            if self.measure.name != "latency":  # which is never measured twice the same
                raise RecipeError(told)
            self.context.warn(told)
        for line in doubts(self.context, self.opened, self.dense, self.budget, self.judged):
            self.context.warn(line)
        self._find_least()
        self.said_before = self.context.said()
        self.context.say_again(self.kept.said)
        self.folder.mkdir(parents=True, exist_ok=True)  # from here on there are results to keep
        self._spend()
        try:
            best, lines = self._searched()
        except BaseException:
            with suppress(OutputError, OSError):  # the original error is the one to report
                self._spend()
            raise
        self._report(best, lines)
        return self._found(best)

    def _searched(self) -> tuple[Trial, list[str]]:
        """The best of all trials, and a line to report if the time was up before they were done."""
        whole = self._climb()
        strategy = self._strategy()
        ask = self._made(strategy)
        lines = []
        if ask is not None or not whole:
            wanted = None if ask is None else (self.path.beta(ask[0]), self._dense_size / ask[1])
            levels, trials = None if whole else len(self.path.rows), len(self.kept.asked)
            lines.append(cut_short(self.settings, self.kept.seconds, levels, trials, self._whole, wanted, self.measure.name))
            return strategy.best(self.kept.trials), lines
        if self._cut_off(strategy):
            made = len(self.kept.asked)
            trials = f"{made} trial{'s' * (made > 1)}"
            rest = "" if self.budget.given else ", besides the recovery of the best"
            more = f"--trials {2 * made} tries more (and skips that recovery)" if rest else f"--trials {2 * made} tries more"
            self._say(f"no more than {trials} fit into {TIMES:g} times the epochs of one run{rest}; {more}")
        if not self._over():
            self._recover_on(strategy.best(self.kept.trials))
        elif left_for(self.context.recipe, self._trained) and len(self.kept.asked) == len(self.kept.trials):
            self._say("the time was up before the best trial could recover further; use a larger --max-minutes")
        return strategy.best(self.kept.trials), lines

    def _made(self, strategy: Strategy) -> Ask | None:
        """Make the trials for which there is time, and return the one to make next, if any. If the time is up and nothing is
        left of any trial, one more is made, which the strategy presses or cuts less: a model a little late is worth more than
        none."""
        spare = 1
        while (ask := strategy.next(self.kept.asked)) is not None:
            if self._over():
                if not spare or not all(trial.empty for trial in self.kept.trials):
                    break
                spare -= 1
            self._trial(*ask)
        return ask

    def _cut_off(self, strategy: Strategy) -> bool:
        """Whether more trials would have been worth making than the limit on epochs allows."""
        allowed = self.settings.trials is None and len(self.kept.asked) == self.trials < MOST
        return allowed and strategy.unbounded().next(self.kept.asked) is not None

    def _strategy(self) -> Strategy:
        rows = self.path.rows
        if self._empties_nothing:
            why = "training is too short for the variances" if self._too_short else f"{self.path.steps} steps per level"
            self.context.note(
                f"pressure removes hardly any unit ({why}), so the search begins without it, from the dense weights; "
                "docs/search.md says when that pays off"
            )
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
            least=self._floor,
            unpressed=UNPRESSED if self._empties_nothing else None,
        )

    @property
    def _empties_nothing(self) -> bool:
        """Whether pressure removes hardly any of the units that determine the size, within few steps: then its noise costs
        accuracy and tells little."""
        if self._too_short:
            return True
        ratio = max((self._natural(row) for row in self.path.rows), default=math.inf)
        wanted = 2.0 if self.goal is None else self._dense_size / self._target
        alive = wanted > 1 and math.log(ratio) < PART * math.log(wanted)
        return alive and self.cuts > 1 and self.path.known(0) and self.path.steps < FEW

    @property
    def _too_short(self) -> bool:
        """Whether training is too short for the variances to reach the threshold, while reconstruction can make up for cuts:
        then the epochs of the path are better spent on recovery."""
        reach = self.context.results.reach
        short = reach is not None and not (reach.enough and self.context.recipe.train.epochs)
        return self.cuts > 1 and short and self._reconstructor is not None

    def _climb(self) -> bool:
        """Train the path as far as models on it may be within the budget; False if the time was up before that."""
        if self._too_short:
            self.path.start()
            once = self.trials == 1 and self.goal is not None
            if (once or not self.context.recipe.train.epochs) and not self.path.known(1):  # no trial would start there
                return True
        for level in range(1, self.levels + 1):
            row = self.path.climb(level)
            self._say(
                f"level {level}: beta {row['beta']:.3g}, {int(row['nonzero']):,} non-zeros, "
                f"{error_of(row['error'], self.judged)} before recovery"
            )
            self._spend()
            lost = row["error"] > self._hopeless
            small_enough = self.goal is not None and not self.budget.given and self._small_enough(row)
            no_further = self.trials == 1 and self.goal is not None and self._empties_nothing  # no trial would start there
            if lost or small_enough or no_further:
                return True
            known = self.path.known(level + 1)  # an earlier sitting went further
            if self._late() and not known:
                return level == self.levels
        return True

    @property
    def _hopeless(self) -> float:
        """The validation error beyond which a level of the path is the last; infinite without a budget: nothing is too much."""
        if not self.budget.given:
            return math.inf
        error = self.judged.error
        return error + max(10.0 if self.judged.probabilities else error, HOPELESS * self._points(self.allowed))

    def _small_enough(self, row: dict[str, float]) -> bool:
        """Whether more pressure would go far beyond the goal: the model is less than half of the goal's size already."""
        return self._natural(row) > 2 * self._dense_size / self._target

    @property
    def levels(self) -> int:
        """The most levels that the path may have."""
        return levels_of(self.context.recipe, self.measure.name)

    @property
    def trials(self) -> int:
        """The most trials that may be made."""
        return trials_of(self.context.recipe, self.measure.name)

    @property
    def _whole(self) -> tuple[int, int]:
        return self.levels, self.trials

    def _natural(self, row: dict[str, float]) -> float:
        """How many times smaller a level of the path is by itself, in the count that stands in for the measure (`FOLLOWS`)."""
        follows = FOLLOWS[self.measure.name]
        return self.costs[follows] / max(row[follows], 1.0)

    # Results

    def _report(self, best: Trial, lines: list[str]) -> None:
        results, settings, measure = self.context.results, self.settings, self.measure.name
        target = self._wanted * (1 + CLOSE)
        epochs, how = self.context.recipe.train.epochs, self.measure.how()
        judged, budget = self.judged, self.budget.given
        at_once = best.pressure <= UNPRESSED and self._reconstructor is not None
        steps = 1 if at_once else min(self.cuts, epochs_of(self.context.recipe.train, COOLING_EPOCHS))
        how_told = told_how(how)
        asked = best, self.kept.trials, measure, self.goal, target, judged, budget, epochs, how_told
        aimed = 0.0 if self.goal is None else self._target
        lines = lines + outcome(*asked, self.cuts if at_once else steps, aimed)
        unit, levels = MEASURES[FOLLOWS[measure]], len(self.path.rows)
        if self.goal is None and best.met and self.kept.least and best.costs[measure] <= self._floor * (1 + CLOSE):
            lines += at_floor(best, measure, self.kept.least, self._dense_size, how_told)
        lines += untaught(self.context.recipe) if at_once else []
        recovery = self.context.recipe.recover.epochs
        ratio = self._dense_size / max(best.costs[measure], 1e-12)
        reached = told_size(ratio, measure, unit)
        lines += cut_by_rank(best, levels, settings, unit, reached, epochs, self.levels, steps, recovery)
        for line in lines:
            self.context.warn(line)
        for line in left_alone(best):
            self.context.note(line)
        results.search = {
            "objective": measure,
            **{name: getattr(settings, name) for name in ("goal", "max_drop", "max_error", "confidence")},
            **({"measured": how} if how else {}),
            "dense": {"error": judged.error, "costs": self.costs},
            "least": self.kept.least or None,
            "validation_examples": len(judged.parts),
            "path": self.path.rows,
            "trials": [trial.to_dict() for trial in self.kept.trials],
            "chosen": best.number,
            "met": best.met if budget else None,
            "reached": best.costs[measure] <= target if self.goal is not None else None,
            "epochs": {
                "search": self._trained,
                "one_run": one_run(self.context.recipe),
            },
            "seconds": self.kept.seconds,
            "notes": lines,
        }
        self._say(f"chosen: trial {best.number}, {ratio:.3g}x {smaller(measure)}{told_how(how)}")

    def _found(self, best: Trial) -> Found:
        context = self.context
        if best.number not in self.kept.pruning:
            raise PruneError(
                "search: every trial left a model that gives the same answer to all inputs. Ask for less, or train longer: "
                "more train.epochs and recover.epochs"
            )
        small, stored = self._small(best)
        target = stored["selection"]["target"]
        model = self._cooled(self._ask(best.root, best.pressure, target))
        selection = masks_for(context, self.opened, self.dense, model, self.measure, target, stored["selection"])
        numbers = dict.fromkeys((best.root, best.number))
        context.results.recover_lr = best.recover_lr
        context.history += [*self.path.history, *(row for number in numbers for row in self.kept.epochs[number])]
        return Found(replace(self.variational, model=model.model), selection, small)

    # Helpers

    def _points(self, drop: float) -> float:
        """Convert a drop to the units of the validation error: points, or those of the RMSE."""
        return drop if self.judged.probabilities else drop / 100 * self.judged.error

    def _over(self) -> bool:
        """Whether the time is up; never before the first trial is done."""
        return bool(self.kept.trials) and self._late()
