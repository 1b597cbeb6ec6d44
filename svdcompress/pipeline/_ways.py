"""Ways from a cooled posterior to one size: which whole units go, ranked how, and how much goes as single weights."""

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
"""Bisections of a threshold: beyond them, two thresholds differ by less than any two weights."""

LOWEST, HIGHEST = -12.0, 30.0

FOLLOWS = {"nonzero": "nonzero", "parameters": "parameters", "bytes": "parameters", "macs": "macs", "latency": "macs"}
"""By what a size is known without a file."""

EVENNESS = {"global": 0.0, "half-even": 0.5, "mostly-even": 0.75, "even": 1.0}
"""How units are ranked where a size follows the shapes, as `Ranking.at` has it; the first is the usual way."""

BY_OUTPUTS = "-by-outputs"
"""Behind the name of such a way: units are ranked by how far outputs move with them, too, where the usual way is without. Only
where training is too short for the variances: of those that learnt, it is the better rank untrained, and not afterwards."""

SHARES = {"weights": 0.0, "units-25%": 0.25, "units-50%": 0.5, "units-100%": 1.0}
"""How much of what has to go goes as whole units where single weights count; the first is the usual way."""

HALVINGS = 12
"""Of what weights may stay, towards as many non-zeros as asked for."""

GUESSES, MORE, FAR = 3, 6, 0.8
"""Files that are measured on the way to a size in bytes or milliseconds, at most, beside that of the model as it is; and at
most where what they found is smaller than that share of the size, as latencies are no line."""

SURE = 1.05
"""Sizes that are so many times apart tell more than chance."""

PROJECTIONS = 128
"""Batches that units' sensitivities are made of: their standard error is a sixteenth."""

LEAST, MOST, SHARE = 2, 4, 0.05
"""Examples in each batch, at least and at most, and the share of the training examples that they come to between."""

FEWEST = 1.5
"""A count that asks a rank for the least: one unit stays in each layer, and what may not go. Up to 1 it would be a share."""

CORRECTIONS = 3
"""Times that a mixture is made anew, at most, because its size is not what was counted."""


@dataclass(frozen=True)
class Way:
    """name: of `EVENNESS` (and `BY_OUTPUTS`) or `SHARES`. size: what is left, in the measure of the search; None: not measured
    yet. asked: the threshold of the single weights. count: what the units' rank was asked to leave (weights that are kept,
    parameters or multiply-accumulates); None: no unit was asked to go. free: whether nothing that lives had to go."""

    name: str
    masks: Masks
    size: float | None
    asked: Threshold | None
    count: float | None = None
    free: bool = False

    def stored(self) -> dict[str, Any]:
        """JSON-able; `ways(...).again` makes the same masks of it."""
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
    """Those of a measure. target: the size that `measure` is to have. masks: what is left of the model, which itself holds
    nothing; None: all of it. by_outputs: units are ranked by how far the outputs move with them, too, as variances that were
    trained without pressure tell little."""
    kind = Weights if measure.name == "nonzero" else Units
    return kind(context, opened, dense, model, measure, target, masks, by_outputs)


def next_count(seen: list[tuple[float, float]], target: float) -> float:
    """How many parameters or multiply-accumulates to leave for a size of a file or a latency.

    seen: (count, size) of what was measured; at least one size is above the target. Where there are sizes on both sides, the
    count lies between. Else size is taken as proportional or, of two sizes that differ by more than chance, as a line, as a
    part of it doesn't depend on the count; one step leaves a quarter at least.
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
    """What of a recipe's pruning decides how small a model becomes; for `Ranking` and counts."""
    return {name: getattr(recipe.prune, name) for name in ("remove_inputs", "protect", "round_to")}


class Ways:
    """natural: the size without anything gone that lives, in what the measure follows. left: the masks of what is left of the
    model so far; None: all of it."""

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
        self.untold = reach is not None and not reach.enough  # variances that could not learn tell little of units
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
        """Of the units that live, in the usual way."""
        return self._ranked_by(self.by_outputs)

    def _ranked_by(self, outputs: bool) -> Ranking:
        """Made where it is asked for first."""
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
        """The way that is taken without a choice."""
        raise NotImplementedError

    def aim(self) -> float | None:
        """What to get to in what the measure follows, as far as this model tells; None where nothing that lives has to go."""
        return self.target if self.target < self.natural else None

    def least(self) -> float:
        """The size that no masks can go below, in the measure of the search; 0 where that is not known ahead."""
        return 0.0

    def part(self, size: float, name: str) -> Masks | None:
        """Masks of a size, in what the measure follows, on the way to the target; name: of the way. None where no unit that
        lives goes for it."""
        return None

    def others_than(self, usual: Way) -> Iterator[Way]:
        """Mixtures that are no larger than the usual way, or likely not, where that takes a file (see `fitted`)."""
        raise NotImplementedError

    def fitted(self, way: Way, usual: Way) -> Way | None:
        """A way as large as the usual one, give or take `CLOSE`, with its size measured, or the largest below that was found;
        None where it doesn't get there."""
        return way

    def again(self, stored: Mapping[str, Any]) -> Masks:
        """The masks of a way that was stored: nothing is measured."""
        raise NotImplementedError

    def small(self, masks: Masks) -> nn.Module | None:
        """What masks leave of the model as it is now, pruned; None where the measure leaves the shapes, or pruning fails."""
        return None

    def _both(self, one: Masks | None, other: Masks) -> Masks:
        if one is None:
            return other
        return as_masks(self.model, {name: mask & one[name] for name, mask in other.items()})


class Weights(Ways):
    """To a number of non-zeros: single weights by one threshold on all shares, and a part of what has to go as whole units."""

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
        """As many non-zeros as the usual way leaves once it is pruned; None where that is not met."""
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
        """The highest threshold that keeps at most so many weights (the own one, if the units that stay are few enough)."""
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
    """To a size that follows the shapes: units by their rank. Where shapes alone count, no single weight of a unit that stays
    is masked. Bytes and latency follow parameters and multiply-accumulates, by `next_count`."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._usual: Way | None = None  # files are measured for it
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
            if now[self.follows] in (left for left, _ in seen):  # the same units: no other will go
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
            except PruneError:  # what can't be pruned can't be taken
                break
            size = now[self.measure.name]
            if size <= usual.size * (1 + CLOSE) and (best is None or size > (best.size or 0.0)):
                best = replace(way, size=size)
            if usual.size / SURE <= size <= usual.size * (1 + CLOSE) or now[self.follows] in left:
                break
            left.add(now[self.follows])
            count = max(count * usual.size / size, FEWEST)  # down to the size, or up to it: room that is left helps nobody
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
        # A weight between units that stay costs nothing, and may help.
        return masks if self.measure.name == "bytes" else whole_units(self.model, masks)

    def small(self, masks: Masks) -> nn.Module | None:
        try:
            return self._pruned(masks) if self._prunes else None
        except PruneError:  # as where too few units are left for what the model does with them
            self._prunes = False  # it takes as long each time
            return None

    def _costs(self, chosen: Masks) -> dict[str, float]:
        self.context.check("while it measured what could go")  # a latency takes half a minute with a large model
        return self.measure.of_small(self._pruned(chosen), self.dense.model)

    def _pruned(self, chosen: Masks) -> nn.Module:
        small: Any = prune(self.model, self.opened.inputs, masks=chosen, time_budget=self.time_budget, **self.pruning)
        return whole(small, small.pruning.to_dict()).eval()
