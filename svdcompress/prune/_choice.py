"""Chooses the units to remove: those that nothing reads and those that are constant, as far as shapes and constants allow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from svdcompress.prune._compare import CONSTANT, LARGEST_RATIO, PROPORTIONAL
from svdcompress.prune._trace import Trace, Use
from svdcompress.prune._units import Parameter, components

ZERO, BIAS, CARRIER, NEVER = 0, 1, 2, 3
"""How a constant input of a weight can be replaced: it adds 0; by a bias; by another constant input of its group; not at
all."""


@dataclass
class Consumer:
    """The uses of one weight between the same units, treated as one.

    ins, outs: slots, (groups, per group). mask: (groups, outputs per group, inputs per group). read: (groups, inputs per
    group), whether any output reads it. values: (inputs, positions), NaN where an input is not constant. how: per input, one
    of ZERO, BIAS, CARRIER, NEVER. owner: name of the module, or None.
    """

    parameter: Parameter
    owner: str | None
    ins: np.ndarray
    outs: np.ndarray
    mask: np.ndarray
    read: np.ndarray
    values: np.ndarray
    how: np.ndarray


@dataclass
class Choice:
    """The units to remove. removed: bool per slot. folded: bool per slot, removed units whose constant has to be folded.
    reasons: {root: why a dead unit is kept}. carriers: {number of a consumer: {input: (carrier, ratio)}}."""

    removed: np.ndarray
    folded: np.ndarray
    reasons: dict[int, str] = field(default_factory=dict)
    carriers: dict[int, dict[int, tuple[int, float]]] = field(default_factory=dict)


class Analysis:
    """What a trace says about the units of a model.

    past: names of layers that hold a mask which the model does not compute with.
    """

    past: frozenset[str] = frozenset()

    def __init__(self, trace: Trace, foldable: Callable[[Use], bool], watch: Callable[[Any], Trace]) -> None:
        self.trace, self.foldable, self.watch = trace, foldable, watch
        units = trace.units
        self.count = units.count
        self.consumers = _consumers(trace.uses + trace.branches, foldable)
        edges = list(units.edges)
        self.root = components(self.count, edges)
        for _ in range(8):
            more = self._couple_views()
            if not more:
                break
            edges += more
            self.root = components(self.count, edges)
        produced = np.zeros(self.count, bool)
        for slots in units.producers:
            produced[self.root[slots]] = True
        self.why: dict[int, str] = {}
        pinned = np.zeros(self.count, bool)
        pinned[0] = True
        for slots, reason in units.pins:
            for root in np.unique(self.root[slots]).tolist():
                self.why.setdefault(root, reason)
                pinned[root] = True
        self.produced = produced  # per root
        self.free = produced & ~pinned  # per root: may be removed

    def learn(self, inputs: Any) -> None:
        """Watch the model on other inputs: from now on only values that are constant on these too count as constants."""
        others = self.watch(inputs).uses
        if [use.parameter.names for use in others] != [use.parameter.names for use in self.trace.uses]:
            return  # another path through the code: nothing to compare
        for use, other in zip(self.trace.uses, others, strict=True):
            use.values = torch.cat([use.values, other.values], 1)
            use.reached = use.reached | other.reached
        self.consumers = _consumers(self.trace.uses + self.trace.branches, self.foldable)

    def _couple_views(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Edges between units in tensors of several dimensions, so that whole indices of one dimension are removed."""
        edges = []
        for view in self.trace.views:
            roots = self.root[view.labels.numpy()]
            free = [d for d in range(roots.ndim) if (roots != np.take(roots, [0], d)).any()]
            if len(free) < 2:
                continue
            first = roots
            for d in free[:-1]:
                first = np.take(first, [0], d)
            first = np.broadcast_to(first, roots.shape)
            apart = first != roots
            edges.append((first[apart], roots[apart]))
        return edges

    # The choice

    def choose(self, allowed: np.ndarray | None = None, round_to: int = 1, unread: np.ndarray | None = None) -> Choice:
        """Choose the units to remove.

        allowed: bool per root, the units that may be removed (None: all that can be). unread: bool per root, units whose
        readers count as masked, in addition to those that are masked in the trace.
        """
        free = self.free if allowed is None else self.free & allowed
        gone = self._unneeded(free, unread)
        silent = gone.copy()
        choice = Choice(gone, gone)
        fixed = self._constant(free & ~gone, choice)
        gone |= fixed
        while True:
            before = gone.copy()
            self._balance(gone, choice)
            self._keep_one(gone, choice)
            if round_to > 1:
                self._round(gone, choice, round_to)
            self._carry(gone, fixed, silent, choice)
            if np.array_equal(before, gone):
                break
        choice.removed = gone[self.root]
        choice.folded = (gone & fixed)[self.root]
        return choice

    def _unneeded(self, free: np.ndarray, unread: np.ndarray | None) -> np.ndarray:
        """Units that are read only by masked weights, or only for outputs that are removed too: the largest such set, so that
        it includes units that read only themselves (a channel's own depthwise convolution) or each other."""
        gone = free.copy()
        while True:
            before = gone.copy()
            for consumer in reversed(self.consumers):  # backwards: which outputs are read decides which inputs are
                live = ~gone[self.root[consumer.outs]]
                used = consumer.read if live.all() else (consumer.mask & live[:, :, None]).any(1)
                if unread is not None:
                    used = used & ~unread[self.root[consumer.ins]]
                gone[self.root[consumer.ins[used]]] = False
            if np.array_equal(before, gone):
                return gone

    def _constant(self, candidates: np.ndarray, choice: Choice) -> np.ndarray:
        """Candidates that are constant at every consumer that reads them, and whose constants can be folded."""
        constant = candidates.copy()
        for consumer in self.consumers:
            roots = self.root[consumer.ins].reshape(-1)
            reached = np.isnan(consumer.values).any(1)
            constant[roots[reached & (consumer.how == NEVER)]] = False
        for consumer in self.consumers:
            roots = self.root[consumer.ins].reshape(-1)
            stuck = constant[roots] & (consumer.how == NEVER)
            for root in np.unique(roots[stuck]).tolist():
                choice.reasons[root] = f"its constant cannot be folded into {consumer.parameter.name}"
            constant[roots[stuck]] = False
        return constant

    def _restore(self, gone: np.ndarray, roots: np.ndarray, choice: Choice, reason: str) -> None:
        gone[roots] = False
        for root in np.unique(roots).tolist():
            choice.reasons.setdefault(root, reason)

    def _balance(self, gone: np.ndarray, choice: Choice) -> None:
        """Restore units until the groups of a convolution, and the pieces of a split, lose equally many."""
        for consumer in self.consumers:
            if len(consumer.ins) == 1:
                continue
            ins, outs = self.root[consumer.ins], self.root[consumer.outs]
            whole = gone[ins].all(1) & gone[outs].all(1)
            for roots in (ins, outs):
                self._level(gone, roots[~whole], choice, "kept: each group of a convolution keeps the same number", spare=1)
        for pieces in self.trace.splits:
            reason = "kept: pieces of a split keep equal sizes"
            self._level(gone, self.root[pieces.numpy()], choice, reason, spare=0)

    def _level(self, gone: np.ndarray, roots: np.ndarray, choice: Choice, reason: str, spare: int) -> None:
        while len(roots):
            counts = gone[roots].sum(1)
            least = min(counts.min(), roots.shape[1] - spare)
            over = np.flatnonzero(counts > least)
            if not len(over):
                return
            for row in over:
                dead = roots[row][gone[roots[row]]]
                self._restore(gone, dead[: counts[row] - least], choice, reason)

    def _keep_one(self, gone: np.ndarray, choice: Choice) -> None:
        for consumer in self.consumers:
            for slots in (consumer.ins, consumer.outs):
                roots = self.root[slots].reshape(-1)
                if len(roots) and gone[roots].all():
                    self._restore(gone, roots[:1], choice, "kept: the last one of its layer")

    def _round(self, gone: np.ndarray, choice: Choice, multiple: int) -> None:
        for consumer in self.consumers:
            for slots in (consumer.ins, consumer.outs):
                roots = self.root[slots].reshape(-1)
                while gone[roots].any() and (~gone[roots]).sum() % multiple:
                    self._restore(gone, roots[gone[roots]][:1], choice, f"kept: rounded up to a multiple of {multiple}")

    def _carry(self, gone: np.ndarray, constant: np.ndarray, unread: np.ndarray, choice: Choice) -> None:
        """Where a bias cannot replace a constant (zero padding), let another constant input of the same group carry it.

        A unit that nothing reads cannot be a carrier: what it reads itself may be removed, and its value with it.
        """
        choice.carriers = {}
        for number, consumer in enumerate(self.consumers):
            per_group = consumer.ins.shape[1]
            roots = self.root[consumer.ins].reshape(-1)
            idle = gone[self.root[consumer.outs]].all(1).repeat(per_group)
            moving = gone[roots] & constant[roots] & (consumer.how == CARRIER) & ~idle
            able = ~unread[roots]
            found: dict[int, tuple[int, float]] = {}
            for j in sorted(np.flatnonzero(moving).tolist(), key=lambda j: -np.abs(consumer.values[j]).max()):
                if not gone[roots[j]]:
                    continue
                group = j // per_group
                inside = range(group * per_group, (group + 1) * per_group)
                carriers = ((c, _ratio(consumer.values, j, c)) for c in inside if able[c] and not gone[roots[c]])
                best = next(((c, ratio) for c, ratio in carriers if ratio is not None), None)
                if best is None:
                    self._restore(gone, roots[j : j + 1], choice, "kept: carries the constants of others past zero padding")
                else:
                    found[j] = best
            if found:
                choice.carriers[number] = found


def _ratio(values: np.ndarray, j: int, c: int) -> float | None:
    """The r with values[j] = r values[c]; None if there is none of reasonable size."""
    carrier, moved = values[c], values[j]
    if np.isnan(carrier).any() or not np.abs(carrier).max() > 0:
        return None
    top = int(np.abs(carrier).argmax())
    ratio = float(moved[top] / carrier[top])
    if abs(ratio) > LARGEST_RATIO or np.abs(moved - ratio * carrier).max() > PROPORTIONAL * np.abs(moved).max():
        return None
    return ratio


def _consumers(uses: list[Use], foldable: Callable[[Use], bool]) -> list[Consumer]:
    by_parameter: dict[int, list[Use]] = {}
    for use in uses:
        by_parameter.setdefault(id(use.parameter), []).append(use)
    result = []
    for same in by_parameter.values():
        first = same[0]
        alike = all(torch.equal(use.ins, first.ins) and torch.equal(use.outs, first.outs) for use in same)
        alike = alike and not any(use.derived for use in same)
        if alike:
            result.append(_consumer(same, all(foldable(use) and use.owner == first.owner for use in same)))
        else:
            result += [_consumer([use], None) for use in same]
    return result


def _consumer(uses: list[Use], foldable: bool | None) -> Consumer:
    """One consumer from uses. foldable: whether its bias may be changed or created; None: its constants cannot be folded."""
    first = uses[0]
    values = torch.cat([use.values for use in uses], 1).numpy()
    groups, outs, ins = first.mask.shape
    unknown = np.isnan(values).any(1)
    largest = np.abs(np.where(np.isnan(values), 0, values)).max(1)
    uniform = np.abs(values - values[:, :1]).max(1) <= CONSTANT * largest
    read: Any = first.mask.numpy().any(1)
    unread = ~read.reshape(-1)
    how = np.full(groups * ins, NEVER)
    if foldable is not None:
        how[~unknown] = CARRIER
        if foldable and all(use.biasable for use in uses):
            how[~unknown & uniform] = BIAS
    if groups > 1 and ins == 1:  # depthwise: what reads a channel is removed with it
        how[~unknown] = ZERO
    how[(~unknown & (largest == 0)) | unread] = ZERO
    return Consumer(
        parameter=first.parameter,
        owner=first.owner,
        ins=first.ins.reshape(groups, ins).numpy(),
        outs=first.outs.reshape(groups, outs).numpy(),
        mask=first.mask.numpy(),
        read=read,
        values=values,
        how=how,
    )
