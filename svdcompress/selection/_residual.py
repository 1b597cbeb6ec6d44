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
    found: dict[tuple[int, ...], Branch] = {}
    writers: dict[frozenset[int], set[int]] = defaultdict(set)
    for number, consumer in enumerate(analysis.consumers):
        ins, outs = np.unique(analysis.root[consumer.ins]), np.unique(analysis.root[consumer.outs])
        if passes_on(analysis.root[consumer.ins], analysis.root[consumer.outs]):
            continue
        stream = frozenset(outs.tolist())
        if streams[outs].all():
            writers[stream].add(number)
            if len(ins) and killable[ins].all() and not streams[ins].any():
                found[tuple(ins.tolist())] = Branch(tuple(ins.tolist()), number, stream)
    found = {units: branch for units, branch in found.items() if _ends_in(analysis, streams, branch)}
    ends = {branch.writer for branch in found.values()}
    looked = {root for columns in analysis.trace.lookups for root in analysis.root[columns.reshape(-1).numpy()].tolist()}
    needed = set()
    for stream, numbers in writers.items():
        if stream & looked:  # a table of embeddings begins it
            continue
        first = {number for number in numbers if _begins(analysis, number, stream)}
        if (first or numbers) <= ends:
            needed.add(min(first or numbers))
    return sorted((b for b in found.values() if b.writer not in needed), key=lambda branch: branch.writer)


def _begins(analysis: Analysis, number: int, stream: frozenset[int]) -> bool:
    """Whether a layer that writes to a stream doesn't read it, itself or by way of others, and the model's input reaches it."""
    consumer = analysis.consumers[number]
    if not np.isnan(consumer.values).any():
        return False
    above, before = set(analysis.root[consumer.ins].reshape(-1).tolist()), 0
    while len(above) > before:
        before = len(above)
        for each in analysis.consumers:
            if not above.isdisjoint(analysis.root[each.outs].reshape(-1).tolist()):
                above.update(analysis.root[each.ins].reshape(-1).tolist())
    return above.isdisjoint(stream)


def _ends_in(analysis: Analysis, streams: np.ndarray, branch: Branch) -> bool:
    """Whether the units of a branch reach the rest of the model by its last layer alone, even if a gate reads them."""
    inside = set(branch.units)
    before = 0
    while len(inside) > before:
        before = len(inside)
        for number, consumer in enumerate(analysis.consumers):
            ins, outs = (set(analysis.root[slots].reshape(-1).tolist()) for slots in (consumer.ins, consumer.outs))
            if number == branch.writer or inside.isdisjoint(ins) or inside >= outs:
                continue
            if streams[list(outs)].any() or not analysis.free[list(outs)].all():
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
