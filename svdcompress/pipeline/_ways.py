"""Ways from a cooled posterior to one size: which whole units go, how they are ranked, and how much goes as single weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from svdcompress.errors import PruneError
from svdcompress.layers import Threshold
from svdcompress.pipeline._begin import Dense, Opened
from svdcompress.pipeline._context import Context
from svdcompress.pipeline._measure import Measure
from svdcompress.pipeline._select import whole
from svdcompress.pipeline._some import some
from svdcompress.pipeline._stays import protecting
from svdcompress.prune import count_means, prune
from svdcompress.recipe import Recipe
from svdcompress.relevance import Masks, as_masks
from svdcompress.search import CLOSE
from svdcompress.selection import Ranked, Ranking, Rule, count_nonzero, rule, whole_units

STEPS = 24
"""Bisection steps in the search for a threshold: after these, it is closer than any two weights are."""

LOWEST, HIGHEST = -12.0, 30.0

FOLLOWS = {"nonzero": "nonzero", "parameters": "parameters", "bytes": "parameters", "macs": "macs", "latency": "macs"}
"""The count that stands in for each measure while no file is written."""

EVENNESS = {"global": 0.0, "half-even": 0.5, "mostly-even": 0.75, "even": 1.0}
"""The ways if the size follows the shapes, with their `evenness` for `Ranking.at`; the first is the usual way."""

BY_OUTPUTS = "-by-outputs"
"""The suffix of ways that also rank units by how far the outputs move with them, if the usual way does not. They are tried
only if training is too short for the variances: with well-trained variances such a rank is better before recovery, but not
after."""

SHARES = {"weights": 0.0, "units-25%": 0.25, "units-50%": 0.5, "units-100%": 1.0}
"""The ways if single weights count, with the share of what has to go that goes as whole units; the first is the usual way."""

HALVINGS = 12
"""Bisection steps in the search for the number of weights to keep that gives the requested non-zeros."""

GUESSES, MORE, FAR = 3, 6, 0.8
"""The most files to measure on the way to a size in bytes or milliseconds, in addition to that of the model as it is:
GUESSES, or MORE while the best size found is below FAR times the target, because latency is not linear in the count."""

SURE = 1.05
"""Two measured sizes count as different only if they are at least this factor apart."""

PROJECTIONS = 128
"""The number of batches from which the sensitivities of units are estimated: their standard error is a sixteenth."""

LEAST, MOST, SHARE = 2, 4, 0.05
"""The least and the most examples in each of these batches; between these, all batches together are SHARE of the training
examples."""

FEWEST = 1.5
"""The count to ask a ranking for to get the least possible size, with one unit in each layer and the units that cannot go. A
number up to 1 would be a share."""

CORRECTIONS = 3
"""The most times that a mixture is made again because its size is not the expected one."""


@dataclass(frozen=True)
class Way:
    """A way to a size. name: a key of `EVENNESS` (perhaps with `BY_OUTPUTS`) or `SHARES`. size: that of the model, in the
    measure of the search; None: not measured yet. asked: the threshold for single weights. count: how much the ranking of
    units was asked to leave (weights, parameters or multiply-accumulates); None: no unit had to go for it. free: whether
    nothing alive had to go."""

    name: str
    masks: Masks
    size: float | None
    asked: Threshold | None
    count: float | None = None
    free: bool = False

    def stored(self) -> dict[str, Any]:
        """JSON-able; `ways(...).again` makes the same masks from it."""
        return {"way": self.name, "asked": self.asked, "count": self.count}


def ways(
    context: Context,
    opened: Opened,
    dense: Dense,
    model: nn.Module,
    measure: Measure,
    target: float,
    masks: Masks | None = None,
    *,
    by_outputs: bool = False,
) -> Ways:
    """The ways for a measure. target: the size to reach, in that measure. masks: what earlier cuts have left of the model,
    which holds no masks itself; None: all of it. by_outputs: whether the usual way also ranks units by how far the outputs
    move with them, because variances that were trained without pressure tell little."""
    kind = Weights if measure.name == "nonzero" else Units
    return kind(context, opened, dense, model, measure, target, masks, by_outputs)


def next_count(seen: list[tuple[float, float]], target: float) -> float:
    """How many parameters or multiply-accumulates to leave for a file size or a latency.

    seen: (count, size) of each measurement; at least one size is above the target. If there are sizes on both sides of the
    target, the count is interpolated. Else size is taken as proportional to the count or, with two sizes that differ by more
    than chance, as linear, because a part of it doesn't depend on the count. One step leaves at least a quarter.
    """
    count, size = min(each for each in seen if each[1] > target)
    below = [each for each in seen if each[1] <= target and each[0] < count]
    if below:
        fewer, smaller = max(below)
        return fewer + (target * (1 - CLOSE / 2) - smaller) * (count - fewer) / (size - smaller)
    guess = count * target / size
    others = [each for each in seen if each[0] > count and each[1] > SURE * size]
    if others:
        more, larger = min(others)
        guess = min(guess, count - (size - target) * (more - count) / (larger - size))
    return max(guess, count / 4, FEWEST)


def pruning_of(recipe: Recipe) -> dict[str, Any]:
    """The pruning settings of a recipe that determine how small a model becomes, as arguments for `Ranking` and counts."""
    return {name: getattr(recipe.prune, name) for name in ("remove_inputs", "protect", "round_to")}


class Ways:
    """Ways to one size. natural: the size if nothing alive is removed, in the count that the measure follows. left: the masks
    of what is left of the model so far; None: all of it."""

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
        batches = some(train, size * PROJECTIONS).batches(size, device=device)
        return self._made(examples=(inputs for inputs, _ in batches), device=device)

    def usual(self) -> Way:
        """The way that is used if there is no choice."""
        raise NotImplementedError

    def aim(self) -> float | None:
        """The count to aim at, in what the measure follows, as far as this model tells; None if nothing alive has to go."""
        return self.target if self.target < self.natural else None

    def least(self) -> float:
        """The size that no masks can go below, in the measure of the search; 0 if it is not known in advance."""
        return 0.0

    def part(self, size: float, name: str) -> Masks | None:
        """Masks for an intermediate size, in what the measure follows. name: that of the way. None if no living unit has to
        go for it."""
        return None

    def others_than(self, usual: Way) -> Iterator[Way]:
        """Mixtures no larger than the usual way; if only a file can tell their size, they probably are not (see `fitted`)."""
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


class Weights(Ways):
    """Ways to a number of non-zeros: single weights by one threshold on all shares, and a part of what has to go as units."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.natural = float(self.found.kept + self.others)

    def usual(self) -> Way:
        low, high = self.target - self.others, float(self.found.kept)
        asked, masks = self._lowered(low)
        if masks.kept >= self.found.kept:
            return Way("weights", masks, None, asked, free=True)
        found = Way("weights", masks, self._size(masks), asked)
        for _ in range(HALVINGS):  # biases of units that go leave room for more weights
            if (found.size or 0.0) > self.target * (1 - CLOSE / 4):
                break
            middle = (low + high) / 2
            asked, masks = self._lowered(middle)
            size = self._size(masks)
            low, high = (middle, high) if size <= self.target else (low, middle)
            if (found.size or 0.0) < size <= self.target:
                found = Way("weights", masks, size, asked)
        return found

    def others_than(self, usual: Way) -> Iterator[Way]:
        for name, share in SHARES.items():
            if share and (way := self._mixed(name, share, usual.size or 0.0)) is not None:
                yield way

    def again(self, stored: Mapping[str, Any]) -> Masks:
        count, asked = stored["count"], stored["asked"]
        return self.own(asked) if count is None else self._both(self.ranking.keeping(count).masks, self.own(asked))

    def _mixed(self, name: str, share: float, size: float) -> Way | None:
        """A mixture with at most as many non-zeros, once pruned, as the usual way (`size`); None if that is not met."""
        room, found = self.target - self.others, None
        for _ in range(CORRECTIONS + 1):
            count = self.found.kept - share * (self.found.kept - room)
            units = self.ranking.keeping(count).masks
            asked, masks = self._lowered(room, units)
            now = self._size(masks)
            if now <= size and (found is None or now > (found.size or 0.0)):
                found = Way(name, masks, now, asked, count)
            if size * (1 - CLOSE / 4) <= now <= size:
                break
            room += size - now
        return found

    def _lowered(self, kept: float, units: Masks | None = None) -> tuple[Threshold | None, Masks]:
        """The highest threshold that keeps at most `kept` weights, and its masks; the recipe's own threshold if the units
        that stay have no more than that."""
        if units is not None and units.kept <= kept:
            return self.asked, units
        low, high = LOWEST, HIGHEST
        for _ in range(STEPS):
            middle = (low + high) / 2
            low, high = (middle, high) if self._both(units, self.own(middle)).kept <= kept else (low, middle)
        return low, self._both(units, self.own(low))

    def _size(self, masks: Masks) -> float:
        return count_nonzero(self.model, self.opened.inputs, masks, **self.pruning)


class Units(Ways):
    """Ways to a size that follows the shapes: units go by their rank. Where shapes alone count, no single weights of units
    that stay are masked. Bytes and latency follow parameters and multiply-accumulates, by `next_count`."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._usual: Way | None = None  # kept because files are measured for it
        self._prunes = True
        self.follows = FOLLOWS[self.measure.name]
        self.natural = float(getattr(self.ranking.at({self.follows: 1.0}), self.follows))

    def usual(self) -> Way:
        if self._usual is None:
            self._usual = self._to_target()
        return self._usual

    def _to_target(self) -> Way:
        if self.measure.name == self.follows:
            count = max(self.target, FEWEST)
            found = self.ranking.at({self.follows: count})
            size = float(getattr(found, self.follows))
            free = not found.units
            return Way("global", self._finished(found.masks), size, self.asked, None if free else count, free=free)
        now = self._costs(self.found)
        seen = [(now[self.follows], now[self.measure.name])]
        made = [Way("global", self._finished(self.found), seen[0][1], self.asked, free=True)]
        while seen[0][1] > self.target and len(made) <= MORE:
            best = max((size for _, size in seen if size <= self.target), default=0.0)
            if best >= self.target * (1 - CLOSE) or (best >= self.target * FAR and len(made) > GUESSES):
                break
            count = next_count(seen, self.target)
            masks = self.ranking.at({self.follows: count}).masks
            now = self._costs(masks)
            made.append(Way("global", self._finished(masks), now[self.measure.name], self.asked, count))
            if now[self.follows] in (left for left, _ in seen):  # the same units as before: no others will go
                break
            seen.append((now[self.follows], now[self.measure.name]))
        there = [way for way in made if (way.size or 0.0) <= self.target]
        return max(there, key=lambda way: way.size or 0.0) if there else min(made, key=lambda way: way.size or 0.0)

    def aim(self) -> float | None:
        return super().aim() if self.measure.name == self.follows else self.usual().count

    def least(self) -> float:
        found = self.ranking.at({self.follows: FEWEST})
        if self.measure.name == self.follows:
            return float(getattr(found, self.follows))
        return self._costs(found.masks)[self.measure.name]

    def part(self, size: float, name: str) -> Masks | None:
        found = self._at(name, max(size, FEWEST))
        return whole_units(self.model, found.masks) if found.units else None

    def others_than(self, usual: Way) -> Iterator[Way]:
        counted = self.measure.name == self.follows
        for end in ("", BY_OUTPUTS) if self.untold and not self.by_outputs else ("",):
            for name in (f"{name}{end}" for name in EVENNESS):
                if name != usual.name and usual.count is not None:
                    yield self._ranked(name, max(usual.size or 0.0, FEWEST) if counted else usual.count, counted)

    def fitted(self, way: Way, usual: Way) -> Way | None:
        count, best = way.count, None
        if way.size is not None or count is None or usual.size is None:
            return way
        left: set[float] = set()
        for _ in range(CORRECTIONS):
            try:
                now = self._costs(way.masks)
            except PruneError:  # a way that can't be pruned can't be used
                break
            size = now[self.measure.name]
            if size <= usual.size * (1 + CLOSE) and (best is None or size > (best.size or 0.0)):
                best = replace(way, size=size)
            if usual.size / SURE <= size <= usual.size * (1 + CLOSE) or now[self.follows] in left:
                break
            left.add(now[self.follows])
            count = max(count * usual.size / size, FEWEST)  # down or up to the size: unused room is wasted
            way = self._ranked(way.name, count, counted=False)
        return best

    def _ranked(self, name: str, count: float, counted: bool) -> Way:
        found = self._at(name, count)
        size = float(getattr(found, self.follows)) if counted else None
        return Way(name, self._finished(found.masks), size, self.asked, count)

    def _at(self, name: str, count: float) -> Ranked:
        ranking = self._ranked_by(self.by_outputs or name.endswith(BY_OUTPUTS))
        return ranking.at({self.follows: count}, evenness=EVENNESS[name.removesuffix(BY_OUTPUTS)])

    def again(self, stored: Mapping[str, Any]) -> Masks:
        if stored["count"] is None:
            return self._finished(self.found)
        return self._ranked(stored["way"], stored["count"], counted=False).masks

    def _finished(self, masks: Masks) -> Masks:
        # a weight between units that stay costs nothing and may help
        return masks if self.measure.name == "bytes" else whole_units(self.model, masks)

    def small(self, masks: Masks) -> nn.Module | None:
        try:
            return self._pruned(masks) if self._prunes else None
        except PruneError:  # for example, too few units are left for what the model does with them
            self._prunes = False  # trying again would take as long each time
            return None

    def _costs(self, chosen: Masks) -> dict[str, float]:
        self.context.check("while measuring what to remove")  # measuring a latency takes half a minute with a large model
        return self.measure.of_small(self._pruned(chosen), self.dense.model)

    def _pruned(self, chosen: Masks) -> nn.Module:
        small: Any = prune(self.model, self.opened.inputs, masks=chosen, time_budget=self.time_budget, **self.pruning)
        return whole(small, small.pruning.to_dict()).eval()
