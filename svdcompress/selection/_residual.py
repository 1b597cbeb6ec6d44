"""Residual streams, in which the outputs of several layers are added: their channels, and the branches that add to them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from svdcompress.prune import Analysis
from svdcompress.selection._bundles import passes_on


@dataclass(frozen=True)
class Branch:
    """A part of the model that adds to a residual stream, and is silent without the units that its last layer reads.

    units: the roots of these. writer: the number of the consumer that is its last layer. stream: the roots that it adds to.
    """

    units: tuple[int, ...]
    writer: int
    stream: frozenset[int]


def residual(analysis: Analysis) -> np.ndarray:
    """Per root, whether the unit is a sum to which at least two layers that read different units contribute.

    A sum of one layer's outputs (rotary embeddings, a gated tensor added to itself) is none, nor are gates and heads, where
    outputs are multiplied. A table of embeddings reads units of its own.
    """
    return _streams(analysis) & analysis.free


def branches(analysis: Analysis, killable: np.ndarray) -> list[Branch]:
    """The residual branches that can go as a whole, in the order in which they run.

    A branch ends in a layer that writes to a stream and reads nothing but units of its own, all of which can go: the hidden
    units of a block's layers, or the values of attention. Where all layers from which a stream begins are ends of such
    branches, the first one is left out, as the input has to get through. killable: bool per root, the units that may go.
    """
    streams = _streams(analysis)
    sides = [
        (set(analysis.root[consumer.ins].reshape(-1).tolist()), set(analysis.root[consumer.outs].reshape(-1).tolist()))
        for consumer in analysis.consumers
    ]
    found: dict[tuple[int, ...], Branch] = {}
    writers: dict[frozenset[int], set[int]] = defaultdict(set)
    for number, (consumer, (ins, outs)) in enumerate(zip(analysis.consumers, sides, strict=True)):
        if passes_on(analysis.root[consumer.ins], analysis.root[consumer.outs]) or not streams[list(outs)].all():
            continue
        writers[frozenset(outs)].add(number)
        if ins and killable[list(ins)].all() and not streams[list(ins)].any():
            units = tuple(sorted(ins))
            found[units] = Branch(units, number, frozenset(outs))
    leaves = {root for root in range(analysis.count) if streams[root] or not analysis.free[root]}
    found = {units: branch for units, branch in found.items() if _ends_in(sides, leaves, branch)}
    ends = {branch.writer for branch in found.values()}
    looked = {root for columns in analysis.trace.lookups for root in analysis.root[columns.reshape(-1).numpy()].tolist()}
    needed = set()
    for stream, numbers in writers.items():
        if stream & looked:  # a table of embeddings begins it
            continue
        reached = {number for number in numbers if np.isnan(analysis.consumers[number].values).any()}
        first = {number for number in reached if _begins(sides, number, stream)}
        if (first or numbers) <= ends:
            needed.add(min(first or numbers))
    return sorted((b for b in found.values() if b.writer not in needed), key=lambda branch: branch.writer)


Sides = list[tuple[set[int], set[int]]]
"""The roots that each consumer reads and writes, in the order in which they run."""


def _begins(sides: Sides, number: int, stream: frozenset[int]) -> bool:
    """Whether a layer that writes to a stream doesn't read it, itself or by way of others."""
    above, before = set(sides[number][0]), 0
    while len(above) > before and above.isdisjoint(stream):
        before = len(above)
        for ins, outs in reversed(sides):  # most are found in one pass: what a layer reads was written before
            if not above.isdisjoint(outs):
                above |= ins
    return above.isdisjoint(stream)


def _ends_in(sides: Sides, leaves: set[int], branch: Branch) -> bool:
    """Whether the units of a branch reach the rest of the model by its last layer alone, even if a gate reads them.

    leaves: roots that are no branch's own: of streams, and those that cannot go.
    """
    inside, before = set(branch.units), 0
    while len(inside) > before:
        before = len(inside)
        for number, (ins, outs) in enumerate(sides):
            if number == branch.writer or inside.isdisjoint(ins) or inside >= outs:
                continue
            if not leaves.isdisjoint(outs):
                return False
            inside |= outs
    return True


def _streams(analysis: Analysis) -> np.ndarray:
    """Per root, whether the unit is such a sum, removable or not."""
    summed = np.zeros(analysis.count, bool)
    for labels in analysis.trace.sums:
        summed[analysis.root[labels.reshape(-1).numpy()]] = True
    read: dict[int, set[frozenset[int]]] = defaultdict(set)
    for consumer in analysis.consumers:
        ins, outs = analysis.root[consumer.ins], analysis.root[consumer.outs]
        if not passes_on(ins, outs):
            units = frozenset(ins.reshape(-1).tolist())
            for root in np.unique(outs).tolist():
                read[root].add(units)
    for number, columns in enumerate(analysis.trace.lookups, 1):
        for root in np.unique(analysis.root[columns.reshape(-1).numpy()]).tolist():
            read[root].add(frozenset({-number}))
    written = np.zeros(analysis.count, bool)
    written[[root for root, units in read.items() if len(units) > 1]] = True
    return summed & written
