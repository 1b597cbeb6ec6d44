"""Removal of living units, those that the data need least for their cost first, until a model has the requested size."""

from __future__ import annotations

import heapq
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from svdcompress.batch import unwrapped
from svdcompress.errors import UsageError
from svdcompress.layers import VariationalLayer
from svdcompress.prune import Analysis, Choice, analyse, oriented
from svdcompress.relevance import Masks, as_masks, information, relevance
from svdcompress.selection._bundles import Pools, bundles
from svdcompress.selection._depth import Depth
from svdcompress.selection._readers import readers, scores
from svdcompress.selection._residual import Branch, residual
from svdcompress.selection._sensitivity import sensitivity
from svdcompress.selection._sizes import MEASURES, Shrinking, Sizes, Touch

WEIGHTS = "weights"
"""The measure that `Ranking.keeping` orders units by, in addition to `MEASURES`."""

UNMOVED = 1e-3
"""The least sensitivity of a unit, as a fraction of the mean: units with none are then ranked by information."""


class _Step(NamedTuple):
    """Units that go together. kind: the number of the queue of bundles with the same cost that they are from; below 0 for a
    whole residual branch."""

    kind: int
    roots: list[int]


@dataclass(frozen=True)
class Ranked:
    """Masks for a goal, and what `prune` leaves with them.

    parameters, macs: what is left, as `svdcompress.cost.measure` counts it. `prune` leaves less where units become constant
    because others go, and more where it has to put units back. units: the number of living units that go, in addition to the
    dead ones. reached: whether the goal is met.
    """

    masks: Masks
    parameters: int
    macs: int
    units: int
    reached: bool


def ranked(
    model: nn.Module,
    example_inputs: Any,
    masks: Mapping[str, Tensor] | None = None,
    *,
    goal: Mapping[str, float],
    protect: Sequence[str] = (),
    remove_inputs: bool = False,
    round_to: int = 1,
    weigh: Callable[[VariationalLayer], Tensor] = information,
    examples: Iterable[Any] | None = None,
    within_blocks: bool = False,
    depth: float = 0.0,
) -> Masks:
    """Masks in which more whole units are dead, the least relevant for their cost first, until the goal is met.

    The relevance of a unit is the information in the weights that write or read it (see `svdcompress.relevance.information`),
    per parameter or multiply-accumulate that goes with it; it counts for more the fewer units are left in its layer. With
    `examples` it is the geometric mean of that and of how fast the outputs change with the unit, because variances that were
    hardly trained tell little. No layer is emptied. The last unit may take more than was left to take, so units that the goal
    still has room for come back. `prune(model, example_inputs, masks=...)` removes the units exactly; train further afterwards.

    model: converted, and trained so that its variances mean something; it is not changed. masks: which weights stay to begin
    with (None: those of `relevance`).
    goal: {"macs": 0.5} or {"parameters": 20_000}: numbers up to 1 are shares of the given model, larger ones are counts.
    example_inputs, protect, remove_inputs, round_to: as for `prune`. weigh: returns the worth of each weight of a layer, at
    least 0 and in the shape of its weight; the default is information.
    examples: batches of inputs without targets, each as for one call of the model; a hundred or more, of a few examples each,
        in random order: a batch of one class estimates worse.
    within_blocks: all residual channels, to which several layers add their outputs, stay. A ResNet then loses far less at the
        same number of multiply-accumulates, but can become less small.
    depth: which part of the way to the goal (of its logarithm) whole residual branches make, before units do the rest: those
        first without which the outputs move least. Takes `examples`. See `Ranking.at`.

    Warns if the goal cannot be reached, and returns the closest masks. It does not know of units that `prune` will have to put
    back, because code of the model depends on their number: the model then keeps more than the goal, and
    `small.pruning.groups` says which. Raises UsageError for a goal of another form, and whatever `prune` raises.

    Example:
        >>> masks = ranked(model, x, goal={"macs": 0.5})
        >>> small = svdc.prune(model, x, masks=masks)
    """
    ranking = Ranking(
        model,
        example_inputs,
        masks,
        protect=protect,
        remove_inputs=remove_inputs,
        round_to=round_to,
        weigh=weigh,
        examples=examples,
    )
    if depth > 0 and examples is None:
        raise UsageError("depth: without examples it is not known which residual branches matter least; pass examples")
    if depth > 0 and not ranking.branches(ranking.limit(goal)[0]):
        warnings.warn("depth changes nothing: the model has no residual branches that could go as a whole", stacklevel=2)
    found = ranking.at(goal, within_blocks=within_blocks, depth=depth)
    if within_blocks and not ranking.residual:
        within_blocks = False
        warnings.warn("within_blocks changes nothing: the model has no residual channels that could go", stacklevel=2)
    if not found.reached:
        measure, limit = ranking.limit(goal)
        kept = "what cannot be removed, and every residual channel," if within_blocks else "what cannot be removed,"
        warnings.warn(
            f"goal: {measure} {limit:,.0f} cannot be reached: one unit of each layer stays, and so does {kept} "
            f"which leaves {getattr(found, measure):,}. svdcompress.groups(model, inputs) says what stays, and why",
            stacklevel=2,
        )
    return found.masks


class Ranking:
    """`ranked` for many goals: the model is traced, and its weights are read, once, on construction.

    Arguments as for `ranked`. device: where the model runs on `examples`; None: where it is.
    """

    def __init__(
        self,
        model: nn.Module,
        example_inputs: Any,
        masks: Mapping[str, Tensor] | None = None,
        *,
        protect: Sequence[str] = (),
        remove_inputs: bool = False,
        round_to: int = 1,
        weigh: Callable[[VariationalLayer], Tensor] = information,
        examples: Iterable[Any] | None = None,
        device: torch.device | None = None,
    ) -> None:
        model = unwrapped(model)
        self.model, self.round_to = model, round_to
        self.masks = relevance(model) if masks is None else as_masks(model, masks)
        found = analyse(model, example_inputs, masks=self.masks, protect=protect, remove_inputs=remove_inputs)
        self._analysis = found
        self._steps: dict[tuple[str, float, bool, tuple[Branch, ...]], list[_Step]] = {}
        self._depth: Depth | None = None
        self._residual = np.zeros(0, bool)
        examples = None if examples is None else list(examples)
        if found is None:  # nothing can go: the sizes stay as they are
            from svdcompress.cost import measure

            cost = measure(model, example_inputs)
            self.total = {"parameters": float(cost.parameters), "macs": float(cost.macs)}
            return
        self._sizes = Sizes(model, found, example_inputs)
        self.total = self._sizes.total
        self._information, self._killable = scores(model, found, self.masks, weigh)
        self._residual = residual(found) & self._killable
        self._score = self._information
        self._depth = Depth(
            model, found, self._killable, self.masks, examples, device, lambda gone: self._size(_as_steps(gone))[1]
        )
        if examples is not None:
            moves = sensitivity(model, found, self.masks, examples, device)
            if (least := UNMOVED * float(moves[self._killable].sum()) / max(int(self._killable.sum()), 1)) > 0:
                self._score = np.sqrt(self._information * np.maximum(moves, least))
        self._weights = scores(model, found, self.masks, lambda layer: torch.ones_like(layer.weight))[0]

    @property
    def residual(self) -> bool:
        """Whether residual channels, to which several layers add their outputs, can go."""
        return bool(self._residual.any())

    def limit(self, goal: Mapping[str, float]) -> tuple[str, float]:
        """The measure of a goal, and how much of it may be left. Raises UsageError for a goal of another form."""
        if len(goal) != 1 or next(iter(goal)) not in MEASURES or not next(iter(goal.values())) > 0:
            raise UsageError(f"goal: {dict(goal)} is not one of {', '.join(MEASURES)} with a share up to 1 or a count")
        ((measure, value),) = goal.items()
        return measure, value * self.total[measure] if value <= 1 else float(value)

    def branches(self, measure: str) -> list[float]:
        """What is left without the first one, two, ... of the residual branches that can go as a whole. Without examples it is
        not known which ones matter least: only what is left without all of them then."""
        return self._depth.left(measure) if self._depth else []

    def at(
        self, goal: Mapping[str, float], *, evenness: float = 0.0, within_blocks: bool = False, depth: float = 0.0
    ) -> Ranked:
        """The masks for a goal that remove as few units as possible; if it cannot be reached, the closest.

        The last unit may take more than was left to take. So units that the goal still has room for come back, the last ones
        first.

        evenness: 0 ranks all units of the model by relevance per cost; 1 divides that by its mean over the units of the same
        layer (those with the same cost), so that each layer loses its own least relevant units and none goes as a whole; a
        value in between divides by that power of the mean.
        within_blocks: all residual channels stay, so that only units inside of residual blocks go.
        depth: which part of the way to the goal (of its logarithm) whole residual branches make, before units do the rest. One
            unit of each layer in them stays; files leave the branch out (see `export_onnx`).
        """
        measure, limit = self.limit(goal)
        if not 0 <= depth <= 1:
            raise UsageError(f"depth: {depth} is not a part of the way, from 0 to 1")
        if self._analysis is None:
            return self._told(np.zeros(0, bool), 0, self.total, self.total[measure] <= limit)
        deep = self._depth.of_part(measure, limit, depth) if self._depth and depth > 0 else []
        steps = self._steps_of(measure, evenness, within_blocks, deep)
        least, most = 0, len(steps)
        if self._size(steps)[1][measure] > limit:
            least = most  # even removing all of them is not enough
        while least < most:  # removing fewer units leaves more
            middle = (least + most) // 2
            least, most = (least, middle) if self._size(steps[:middle])[1][measure] <= limit else (middle + 1, most)
        steps = self._given_back(steps[:least], measure, limit)
        choice, left = self._size(steps)
        fewer = self._spared(steps, choice)
        if len(fewer) < len(steps) and (other := self._size(fewer)[1])[measure] <= left[measure]:
            steps, left = fewer, other
        units = sum(len(step.roots) for step in steps)
        return self._told(self._gone(steps), units, left, left[measure] <= limit)

    def keeping(self, kept: float) -> Ranked:
        """Masks that keep at most `kept` weights and remove as few units as possible, those with the least relevance per
        weight left in them first; if not enough units can go, the closest.

        Meant for counts of single weights, where a unit costs the weights that it has left and not its place in the shapes.
        """
        if self._analysis is None:
            return self._told(np.zeros(0, bool), 0, self.total, self.masks.kept <= kept)
        steps = self._steps_of(WEIGHTS)
        least, most = 0, len(steps)
        while least < most:
            middle = (least + most) // 2
            least, most = (least, middle) if self._masked(self._gone(steps[:middle])).kept <= kept else (middle + 1, most)
        found, left = self._gone(steps[:least]), self._size(steps[:least])[1]
        units = sum(len(step.roots) for step in steps[:least])
        return self._told(found, units, left, self._masked(found).kept <= kept)

    def _given_back(self, steps: list[_Step], measure: str, limit: float) -> list[_Step]:
        """The steps without those that the limit has room for, because the last one removed more than was left to remove. The
        last ones are tried first; of each kind it is always the most relevant unit that comes back."""
        if self._size(steps)[1][measure] > limit:
            return steps
        full: set[int] = set()
        for step in reversed(steps):
            if step.kind >= 0 and step.kind not in full:
                fewer = [other for other in steps if other is not step]
                if self._size(fewer)[1][measure] <= limit:
                    steps = fewer
                else:
                    full.add(step.kind)  # the others of its kind are less relevant, and need no less room
        return steps

    def _spared(self, steps: list[_Step], choice: Choice) -> list[_Step]:
        """The steps that have an effect: for each unit of a kind that `prune` keeps (`round_to`), the last step of that kind
        is left out."""
        removed = np.zeros(self._found.count, bool)
        removed[self._found.root[choice.removed]] = True
        kept = Counter(step.kind for step in steps if step.kind >= 0 and not removed[step.roots].all())
        left = []
        for step in reversed(steps):
            if kept[step.kind]:
                kept[step.kind] -= 1
            else:
                left.append(step)
        return left[::-1]

    def _gone(self, steps: list[_Step]) -> np.ndarray:
        gone = np.zeros(self._found.count, bool)
        gone[[root for step in steps for root in step.roots]] = True
        return gone

    @property
    def _found(self) -> Analysis:
        assert self._analysis is not None
        return self._analysis

    def _size(self, steps: list[_Step]) -> tuple[Choice, dict[str, float]]:
        """What `prune` would remove after these steps, and the sizes it would leave."""
        choice = self._found.choose(round_to=self.round_to, unread=self._gone(steps))
        return choice, self._sizes.left(choice)

    def _steps_of(
        self, measure: str, evenness: float = 0.0, within_blocks: bool = False, deep: Sequence[Branch] = ()
    ) -> list[_Step]:
        """The living units in the order of their removal, up to the point where a layer would become empty; before them, these
        branches."""
        key = measure, evenness, within_blocks, tuple(deep)
        if key not in self._steps:
            self._steps[key] = self._greedy(*key)
        return self._steps[key]

    def _value(self, roots: list[int], measure: str) -> float:
        """The relevance that is lost with a bundle; for the measure `WEIGHTS`, its information per weight."""
        if measure != WEIGHTS:
            return float(self._score[roots].sum())
        weights = float(self._weights[roots].sum())
        return float(self._information[roots].sum()) / weights if weights else np.inf  # nothing would be saved

    def _greedy(self, measure: str, evenness: float, within_blocks: bool, deep: Sequence[Branch]) -> list[_Step]:
        """At each step, take the bundle with the least relevance for what it saves at that point, times the factor by which
        its layer has shrunk.

        That factor keeps layers from becoming bottlenecks: a unit counts for more the fewer others are left in its layer. A
        bundle's key only rises as others go, so it is computed again only when the bundle comes up as the best one (lazy
        greedy). Among bundles with the same cost, the least relevant always goes first.
        """
        analysis = self._found
        before = _as_steps(deep)
        gone = np.zeros(analysis.count, bool)
        gone[analysis.root[analysis.choose(unread=self._gone(before)).removed]] = True
        shrinking, pools = Shrinking(self._sizes, gone), Pools(analysis, gone)
        alike: dict[Any, list[tuple[float, list[int]]]] = {}
        score = self._information if measure == WEIGHTS else self._score
        there = self._killable & ~gone
        for roots in bundles(analysis, score, there & ~self._residual if within_blocks else there):
            alike.setdefault(shrinking.of(roots), []).append((self._value(roots, measure), roots))
        queues = [(touches, sorted(own, reverse=True)) for touches, own in alike.items()]

        def saves(touches: tuple[Touch, ...]) -> float:
            return 1.0 if measure == WEIGHTS else shrinking.saved(touches, measure)

        typical = [_typical(own, saves(touches)) ** evenness for touches, own in queues]
        heap: list[tuple[float, int]] = []

        def worth(number: int) -> float:
            touches, own = queues[number]
            saved = saves(touches)
            return own[-1][0] * pools.shrunk(own[-1][1]) / saved / typical[number] if saved > 0 else np.inf

        def push(number: int) -> None:
            own = queues[number][1]
            while own and not pools.spare(own[-1][1]):
                own.pop()
            if own and (key := worth(number)) < np.inf:
                heapq.heappush(heap, (key, number))

        for number in range(len(queues)):
            push(number)
        steps = before
        while heap:
            key, number = heapq.heappop(heap)
            touches, own = queues[number]
            if not pools.spare(own[-1][1]) or worth(number) > key * (1 + 1e-12):
                push(number)
                continue
            roots = own.pop()[1]
            steps.append(_Step(number, roots))
            shrinking.take(touches)
            pools.take(roots)
            push(number)
        return steps

    def _told(self, gone: np.ndarray, units: int, left: Mapping[str, float], reached: bool) -> Ranked:
        return Ranked(self._masked(gone), round(left["parameters"]), round(left["macs"]), units, reached)

    def _masked(self, gone: np.ndarray) -> Masks:
        masks = {name: mask.clone() for name, mask in self.masks.items()}
        if gone.any():
            for consumer, layers in readers(self.model, self._found):
                dead_in = torch.from_numpy(gone[self._found.root[consumer.ins]])
                dead_out = torch.from_numpy(gone[self._found.root[consumer.outs]])
                for name in layers:
                    view = oriented(consumer, masks[name])
                    device = view.device
                    view &= ~dead_in.to(device)[:, None, :, None] & ~dead_out.to(device)[:, :, None, None]
        return as_masks(self.model, masks)


def _as_steps(gone: Sequence[Branch]) -> list[_Step]:
    return [_Step(-1 - number, list(branch.units)) for number, branch in enumerate(gone)]


def _typical(own: Sequence[tuple[float, list[int]]], saved: float) -> float:
    """The mean relevance per cost of a layer's bundles; 1 where that is 0 or not finite."""
    worth = float(np.mean([value for value, _ in own])) / saved if saved > 0 else 0.0
    return worth if 0 < worth < np.inf else 1.0
