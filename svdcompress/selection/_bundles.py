"""Units that can only go together without sharing values: equally many per group of a convolution or piece of a split."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np

from svdcompress.prune import Analysis


def bundles(analysis: Analysis, score: np.ndarray, there: np.ndarray) -> list[list[int]]:
    """The removable units, in lists of units that go together: the lowest-scoring one of each group, the next ones, and so on.

    score: per root. there: bool per root, the units that may go.
    """
    parent = np.arange(analysis.count)

    def find(one: int) -> int:
        while parent[one] != one:
            parent[one] = parent[parent[one]]
            one = int(parent[one])
        return one

    left = there.copy()
    for rows in _balanced(analysis):
        order = [sorted({int(root) for root in row if left[root]}, key=lambda root: (score[root], root)) for row in rows]
        for same in zip(*order, strict=False):
            for root in same[1:]:
                parent[find(root)] = find(same[0])
        shortest = min(len(row) for row in order)
        for row in order:
            left[row[shortest:]] = False  # these have no counterpart to go with
    found: dict[int, list[int]] = {}
    for root in np.flatnonzero(there).tolist():
        found.setdefault(find(root), []).append(root)
    return [roots for roots in found.values() if left[roots].all()]


def _balanced(analysis: Analysis) -> Iterable[np.ndarray]:
    """Roots of units, (groups, per group) each, whose rows must all lose equally many."""
    for consumer in analysis.consumers:
        if len(consumer.ins) == 1:
            continue
        ins, outs = analysis.root[consumer.ins], analysis.root[consumer.outs]
        if passes_on(ins, outs):
            continue  # each group is a unit of its own
        yield ins
        yield outs
    for pieces in analysis.trace.splits:
        yield analysis.root[pieces.numpy()]


def passes_on(ins: np.ndarray, outs: np.ndarray) -> bool:
    """Whether a layer, as a depthwise convolution, only passes its units on. ins, outs: their roots, (groups, per group)."""
    return all(len({*row_in, *row_out}) == 1 for row_in, row_out in zip(ins.tolist(), outs.tolist(), strict=True))


class Pools:
    """Sets of units that must not become empty: the inputs and the outputs of each layer, in each group of a convolution.

    gone: units that have been removed already, bool per root.
    """

    def __init__(self, analysis: Analysis, gone: np.ndarray) -> None:
        self.left: list[int] = []
        self.of: dict[int, Counter[int]] = {}
        for consumer in analysis.consumers:
            for slots in (consumer.ins, consumer.outs):
                roots = analysis.root[slots]
                alone = all(len(set(row)) == 1 for row in roots.tolist())  # whole groups of a depthwise convolution may go
                for row in [roots.reshape(-1)] if alone else roots:
                    self._add(row[~gone[row]])
        self.whole = list(self.left)

    def _add(self, roots: np.ndarray) -> None:
        number = len(self.left)
        self.left.append(len(roots))
        for root in roots.tolist():
            self.of.setdefault(root, Counter())[number] += 1

    def spare(self, roots: list[int]) -> bool:
        """Whether each set keeps at least one unit if these go as well."""
        return all(count < self.left[pool] for pool, count in self._counts(roots).items())

    def shrunk(self, roots: list[int]) -> float:
        """The largest factor by which a set that contains any of these units has shrunk so far."""
        return max((self.whole[pool] / self.left[pool] for pool in self._counts(roots)), default=1.0)

    def take(self, roots: list[int]) -> None:
        """Remove units from their sets."""
        for pool, count in self._counts(roots).items():
            self.left[pool] -= count

    def _counts(self, roots: list[int]) -> Counter[int]:
        total: Counter[int] = Counter()
        for root in roots:
            total.update(self.of.get(root, ()))
        return total
