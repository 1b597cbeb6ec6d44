"""Ways to a size that follows the shapes: which whole units go, and how they are ranked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from svdcompress.errors import PruneError
from svdcompress.pipeline._select import whole
from svdcompress.pipeline._way import CORRECTIONS, Way, Ways
from svdcompress.prune import prune
from svdcompress.relevance import Masks
from svdcompress.search import CLOSE
from svdcompress.selection import Ranked, whole_units

FOLLOWS = {"nonzero": "nonzero", "parameters": "parameters", "bytes": "parameters", "macs": "macs", "latency": "macs"}
"""The count that stands in for each measure while no file is written."""

EVENNESS = {"global": 0.0, "half-even": 0.5, "mostly-even": 0.75, "even": 1.0}
"""The ways if the size follows the shapes, with their `evenness` for `Ranking.at`; the first is the usual way."""

BY_OUTPUTS = "-by-outputs"
"""The suffix of ways that also rank units by how far the outputs move with them, if the usual way does not. They are tried
only if training is too short for the variances: with well-trained variances such a rank is better before recovery, but not
after."""

WITHIN = "-within-blocks"
"""The suffix of ways that keep all residual channels, if any could go: each carries what many layers add, and a rank of units
by their weights takes them too readily."""

KEEPING = ("global", "half-even")
"""The ways that are also tried like that."""

WHOLE = "branches"
BRANCHES = {WHOLE: 1.0, f"{WHOLE}-75%": 0.75, f"{WHOLE}-50%": 0.5}
"""The ways on which whole residual branches go first, with their `depth` for `Ranking.at`. Tried if latency is the goal: a
narrow layer that loses channels gets hardly faster, and a branch that is gone takes no time at all. Their sizes are measured
before they are compared, as latency follows the multiply-accumulates of branches more closely than those of units."""

GUESSES, MORE, FAR = 3, 6, 0.9
"""The most files to measure on the way to a size in bytes or milliseconds, in addition to that of the model as it is:
GUESSES, or MORE while the best size found is below FAR times the target, because latency is not linear in the count, and one
slow measurement on a busy machine makes the next cut too deep."""

SURE = 1.05
"""Two measured sizes count as different only if they are at least this factor apart."""

FEWEST = 1.5
"""The count to ask a ranking for to get the least possible size, with one unit in each layer and the units that cannot go. A
number up to 1 would be a share."""


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


class Units(Ways):
    """Ways to a size that follows the shapes: units go by their rank. Where shapes alone count, no single weights of units
    that stay are masked. Bytes and latency follow parameters and multiply-accumulates, by `next_count`."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self._usual: Way | None = None  # kept because files are measured for it
        self._whole: tuple[float, float] | None = None  # the count and the size of the model as it is
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
        self._whole = now[self.follows], now[self.measure.name]
        return self._measured_down("global", self._whole)

    def _measured_down(self, name: str, whole: tuple[float, float]) -> Way:
        """A way to a target that takes files: the largest one measured that reaches it, else the smallest. whole: the count
        and the size of the model as it is."""
        seen = [whole]
        made = [Way(name, self._finished(self.found), whole[1], self.asked, free=whole[1] <= self.target)]
        while seen[0][1] > self.target and len(made) <= MORE:
            best = max((size for _, size in seen if size <= self.target), default=0.0)
            if best >= self.target * (1 - CLOSE) or (best >= self.target * FAR and len(made) > GUESSES):
                break
            count = next_count(seen, self.target)
            masks = self._at(name, count).masks
            now = self._costs(masks)
            made.append(Way(name, self._finished(masks), now[self.measure.name], self.asked, count))
            if now[self.follows] in (left for left, _ in seen):  # the same units as before: no others will go
                break
            seen.append((now[self.follows], now[self.measure.name]))
        there = [way for way in made if (way.size or 0.0) <= self.target]
        return max(there, key=lambda way: way.size or 0.0) if there else min(made, key=lambda way: way.size or 0.0)

    def aim(self) -> float | None:
        return super().aim() if self.measure.name == self.follows else self.usual().count

    def aim_of(self, way: Way) -> float | None:
        # for the same latency, units have to leave far fewer multiply-accumulates than branches
        return way.count if way.name in BRANCHES else self.aim()

    def least(self) -> float:
        whole = self.measure.name == "latency" and self.context.recipe.search.mixture != "off"
        found = self.ranking.at({self.follows: FEWEST}, depth=float(whole))
        if self.measure.name == self.follows:
            return float(getattr(found, self.follows))
        return self._costs(found.masks)[self.measure.name]

    def part(self, size: float, name: str) -> Masks | None:
        found = self._at(name, max(size, FEWEST))
        return whole_units(self.model, found.masks) if found.units else None

    def others_than(self, usual: Way) -> Iterator[Way]:
        counted = self.measure.name == self.follows
        for end in ("", BY_OUTPUTS) if self.untold and not self.by_outputs else ("",):
            inner = [f"{name}{WITHIN}" for name in KEEPING if self.ranking.residual]
            for name in (f"{name}{end}" for name in (*EVENNESS, *inner)):
                if name != usual.name and usual.count is not None:
                    count = max(usual.size or 0.0, self.target, FEWEST) if counted else usual.count
                    found = self._at(name, count)
                    if found.reached or WITHIN not in name:
                        yield self._way(name, found, count, counted)
        if self.measure.name == "latency" and self._whole is not None:
            for way in self._by_branches(self._whole):
                if way.size is not None and way.size <= max(self.target, usual.size or 0.0) * (1 + CLOSE):
                    yield way

    def _by_branches(self, whole: tuple[float, float]) -> Iterator[Way]:
        """The ways on which whole branches go. whole: the count and the size of the model as it is."""
        left = self._ranked_by(True).branches(self.follows)
        least, most, found = 0, len(left), None
        while least < most:  # the fewest branches that are enough
            middle = (least + most) // 2
            way = self._measured(self._ranked(WHOLE, left[middle], counted=False))
            if way is not None and way.size is not None and way.size <= self.target:
                found, most = way, middle
            else:
                least = middle + 1
        for name in BRANCHES if left else ():
            try:
                yield found if found is not None and name == WHOLE else self._measured_down(name, whole)
            except PruneError:  # a way that can't be pruned can't be used
                continue

    def _measured(self, way: Way) -> Way | None:
        """A way with its size; None if it can't be pruned."""
        try:
            return replace(way, size=self._costs(way.masks)[self.measure.name])
        except PruneError:
            return None

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
        return self._way(name, self._at(name, count), count, counted)

    def _way(self, name: str, found: Ranked, count: float, counted: bool) -> Way:
        size = float(getattr(found, self.follows)) if counted else None
        return Way(name, self._finished(found.masks), size, self.asked, count)

    def _at(self, name: str, count: float) -> Ranked:
        if name in BRANCHES:
            ranking = self._ranked_by(True)
            deep = partial(ranking.at, {self.follows: count}, evenness=EVENNESS["half-even"], depth=BRANCHES[name])
            found = deep(within_blocks=ranking.residual)
            return found if found.reached else deep()
        ranking = self._ranked_by(self.by_outputs or name.endswith(BY_OUTPUTS))
        evenness = EVENNESS[name.removesuffix(BY_OUTPUTS).removesuffix(WITHIN)]
        return ranking.at({self.follows: count}, evenness=evenness, within_blocks=WITHIN in name)

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
