"""A way to a size, and what all kinds of ways share: what is left of the model, its ranking, and the rules for masks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from svdcompress.layers import Threshold
from svdcompress.pipeline._begin import Dense, Opened
from svdcompress.pipeline._context import Context
from svdcompress.pipeline._measure import Measure
from svdcompress.pipeline._some import mixed, some
from svdcompress.pipeline._stays import protecting
from svdcompress.prune import count_means
from svdcompress.recipe import Recipe
from svdcompress.relevance import Masks, as_masks
from svdcompress.selection import Ranking, Rule, rule

PROJECTIONS = 128
"""The number of batches from which the sensitivities of units are estimated: their standard error is a sixteenth."""

LEAST, MOST, SHARE = 2, 4, 0.05
"""The least and the most examples in each of these batches; between these, all batches together are SHARE of the training
examples."""

CORRECTIONS = 3
"""The most times that a mixture is made again because its size is not the expected one."""


@dataclass(frozen=True)
class Way:
    """A way to a size. name: a key of `EVENNESS` (perhaps with `WITHIN` and `BY_OUTPUTS`) or `SHARES`. size: that of the model,
    in the measure of the search; None: not measured yet. asked: the threshold for single weights. count: how much the ranking
    of units was asked to leave (weights, parameters or multiply-accumulates); None: no unit had to go for it. free: whether
    nothing alive had to go."""

    name: str
    masks: Masks
    size: float | None
    asked: Threshold | None
    count: float | None = None
    free: bool = False

    def stored(self) -> dict[str, Any]:
        """JSON-able; `Ways.again` makes the same masks from it."""
        return {"way": self.name, "asked": self.asked, "count": self.count}


def pruning_of(recipe: Recipe) -> dict[str, Any]:
    """The pruning settings of a recipe that determine how small a model becomes, as arguments for `Ranking` and counts."""
    return {name: getattr(recipe.prune, name) for name in ("remove_inputs", "protect", "round_to")}


class Ways:
    """Ways to one size; `ways_for` says which class.

    natural: the size if nothing alive is removed, in the count that the measure follows. left: `masks`.

    target: the size to reach, in the measure. masks: what earlier cuts have left of the model, which holds no masks itself;
    None: all of it. by_outputs: whether the usual way also ranks units by how far the outputs move with them, because
    variances that were trained without pressure tell little.
    """

    natural: float

    def __init__(
        self,
        context: Context,
        opened: Opened,
        dense: Dense,
        model: nn.Module,
        measure: Measure,
        target: float,
        masks: Masks | None = None,
        *,
        by_outputs: bool = False,
    ) -> None:
        recipe, self.opened, self.dense = context.recipe, opened, dense
        self.model, self.measure, self.target = model, measure, target
        self.context, self.by_outputs, self.left = context, by_outputs, masks
        reach = context.results.reach
        self.untold = reach is not None and not reach.enough  # variances that could not learn tell little about units
        judged: Rule = rule(model, recipe.relevance, opened.inputs)
        self.own: Rule = lambda threshold: self._both(masks, judged(threshold))
        self.asked = recipe.relevance.threshold
        self.found = self.own(self.asked)
        self.others = count_means(model) - self.found.total
        self.time_budget = recipe.prune.time_budget
        self.pruning = pruning_of(recipe)
        self._rankings: dict[bool, Ranking] = {}

    @property
    def ranking(self) -> Ranking:
        """The ranking of the living units in the usual way."""
        return self._ranked_by(self.by_outputs)

    def _ranked_by(self, outputs: bool) -> Ranking:
        """The ranking, by the outputs as well or not; made on first use."""
        if outputs not in self._rankings:
            self._rankings[outputs] = self._by_outputs() if outputs else self._made()
        return self._rankings[outputs]

    def _made(self, **more: Any) -> Ranking:
        given = self.model, self.opened.inputs, self.found
        return Ranking(*given, **more, **protecting(self.context, *given, self.pruning, self.time_budget))

    def _by_outputs(self) -> Ranking:
        train, device = self.opened.data.train, self.context.place.device
        size = min(MOST, max(LEAST, round(SHARE * len(train) / PROJECTIONS)))
        batches = mixed(some(train, size * PROJECTIONS)).batches(size, device=device)  # a batch of one class estimates worse
        return self._made(examples=(inputs for inputs, _ in batches), device=device)

    def usual(self) -> Way:
        """The way that is used if there is no choice."""
        raise NotImplementedError

    def aim(self) -> float | None:
        """The count to aim at, in what the measure follows, as far as this model tells; None if nothing alive has to go."""
        return self.target if self.target < self.natural else None

    def aim_of(self, way: Way) -> float | None:
        """The same for the steps on a way."""
        return self.aim()

    def least(self) -> float:
        """The size that no masks can go below, in the measure of the search; 0 if it is not known in advance."""
        return 0.0

    def part(self, size: float, name: str) -> Masks | None:
        """Masks for an intermediate size, in what the measure follows. name: that of the way. None if no living unit has to
        go for it."""
        return None

    def others_than(self, usual: Way) -> Iterator[Way]:
        """Other ways to the target, or no larger than the usual way if that misses it; if only a file can tell their size, they
        probably are not (see `fitted`)."""
        raise NotImplementedError

    def fitted(self, way: Way, usual: Way) -> Way | None:
        """The way adjusted to the size of the usual one, up to `CLOSE` larger, with its size measured; if that is not met,
        the largest version below it, or None without one."""
        return way

    def again(self, stored: Mapping[str, Any]) -> Masks:
        """The masks of a stored way, without measuring anything."""
        raise NotImplementedError

    def small(self, masks: Masks) -> nn.Module | None:
        """The model as it is now, pruned with these masks; None if the measure ignores the shapes, or if pruning fails."""
        return None

    def _both(self, one: Masks | None, other: Masks) -> Masks:
        if one is None:
            return other
        return as_masks(self.model, {name: mask & one[name] for name, mask in other.items()})
