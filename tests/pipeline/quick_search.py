"""A search whose levels and trials are computed by a formula instead of training, to test its order in milliseconds."""

import time
from dataclasses import replace
from functools import lru_cache
from types import SimpleNamespace

import torch

from svdcompress.pipeline import _search
from svdcompress.pipeline._measure import Measure
from svdcompress.pipeline._results import RunResults
from svdcompress.pipeline._search_kept import Kept
from svdcompress.recipe import load_recipe, parse_goal
from svdcompress.search import NOTHING, Budget, Losses, Trial

DENSE = 1000.0

recipe_of = lru_cache(lambda *settings: load_recipe(None, ["search.objective=auto", *settings]))


class Killed(Exception):
    """Ends a search in a test."""


class Path:
    """A path on which each level is twice as small and twice as bad as the one before. takes: called at each level."""

    def __init__(self, levels=6, takes=lambda: None):
        self.rows, self.history, self.levels, self.takes = [], [], levels, takes

    def climb(self, level):
        self.takes()
        row = {"level": float(level), "beta": self.beta(level), "error": 2 + 0.1 * 2**level, "nonzero": DENSE / 2**level}
        self.rows.append(row)
        return row

    def beta(self, pressure):
        return 0.01 * 2.0**pressure

    def known(self, level):
        return False


class Quick(_search.Search):
    """kill: after this many trials in one run. A trial is worse the smaller it is and the farther from the best pressure."""

    def __init__(self, folder, *settings, kill=None, path=None):
        recipe = recipe_of(*settings)
        self.said, self.warned, self.kill, self.made = [], [], kill, 0
        self.context = SimpleNamespace(
            place=SimpleNamespace(world=1),
            recipe=recipe,
            say=self.said.append,
            warn=self.warned.append,
            said=lambda: {"warnings": list(self.warned), "notes": []},
            say_again=lambda said: self.warned.extend(line for line in said.get("warnings", []) if line not in self.warned),
            results=RunResults(),
            state=SimpleNamespace(folder=folder),
        )
        self.opened = self.dense = None
        self.settings, self.measure = recipe.search, Measure("nonzero", recipe, None, None)
        self.budget = Budget(recipe.search.max_drop, recipe.search.max_error, recipe.search.confidence)
        self.goal = None if recipe.search.goal is None else parse_goal(recipe.search.goal)
        self.folder = folder / "search"
        self.path = path or Path()
        self.judged = Losses(torch.arange(1000) < 20, torch.ones(1000), True)
        self.allowed = self.budget.allowed(self.judged.error)
        self.costs = {"nonzero": DENSE}
        self.collapses = 0  # so many of the first trials have nothing left
        self.begin()

    def begin(self):
        self.kept = Kept(self.folder / "trials.json").read()
        self.started, self.before = time.monotonic(), self.kept.seconds

    def judge(self, error, probabilities):
        """Search as if the dense model had this validation error: a percentage, or an RMSE."""
        parts = torch.arange(1000) < 10 * error if probabilities else torch.full((1000,), error**2)
        self.judged = Losses(parts, torch.ones(1000), probabilities)
        self.allowed = self.budget.allowed(self.judged.error, probabilities)

    def _trial(self, pressure, target):
        number, ratio = len(self.kept.trials) + 1, DENSE / target
        drop = 0.02 * ratio + 0.15 * abs(pressure - 2.1 - 0.3 * number)
        trial = Trial(
            number=number,
            pressure=pressure,
            beta=self.path.beta(pressure),
            ratio=float(torch.tensor(ratio, dtype=torch.double).log2()),
            natural=2.0 ** (pressure + 0.7 + 0.2 * number),
            threshold=3.0,
            costs={"nonzero": target},
            metrics={"error": 2 + drop, "nll": 0.1},
            error=2 + drop,
            drop=drop,
            upper=drop,
            allowed=min(self.allowed, 1e9),
            met=drop <= self.allowed,
            seconds=1.0,
        )
        self.path.takes()
        if number <= self.collapses:
            trial = replace(trial, natural=1.0, costs=dict(self.costs), metrics={"error": 102.0, "nll": NOTHING}, met=False)
        self.kept.trials.append(trial)
        self._spend()
        self.made += 1
        if self.made == self.kill:
            raise Killed

    def _found(self, best):
        return best


def asked_for(trials):
    """The pressure and size of each trial."""
    return [(trial.pressure, trial.costs["nonzero"]) for trial in trials]
