"""Residual channels: units in which the outputs of several layers are added, so that all of these layers share them."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from svdcompress.prune import Analysis
from svdcompress.selection._bundles import passes_on


def residual(analysis: Analysis) -> np.ndarray:
    """Per root, whether the unit is a sum to which at least two layers that read different units contribute.

    A sum of one layer's outputs (rotary embeddings, a gated tensor added to itself) is none, nor are gates and heads, where
    outputs are multiplied. A table of embeddings reads units of its own.
    """
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
    return summed & written & analysis.free
