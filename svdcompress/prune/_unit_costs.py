"""What a unit costs: the parameters and multiply-accumulates that would be removed with it."""

from __future__ import annotations

import numpy as np
from torch import nn

from svdcompress.prune._choice import Analysis
from svdcompress.prune._units import Parameter


def unit_costs(analysis: Analysis) -> tuple[np.ndarray, np.ndarray]:
    """Per root, what removing this unit alone would save: parameters, and multiply-accumulates for one example.

    These are the rows and columns of all weights that write or read the unit, its biases and its norm entries. A layer's
    multiply-accumulates are shared evenly by the elements of its weight; those of attention, which multiplies activations with
    each other, belong to no weight and are left out. Of layers that do not depend on the batch, a share of its size counts.
    """
    trace = analysis.trace
    parameters, macs = np.zeros(analysis.count, np.int64), np.zeros(analysis.count)
    for parameter in trace.units.parameters:
        roots, elements = _elements(parameter, analysis.root)
        if isinstance(parameter.tensor, nn.Parameter):
            parameters[roots] += elements
        if operations := sum(trace.operations[number] for number in trace.applied.get(id(parameter.tensor), ())):
            macs[roots] += elements * (operations / parameter.tensor.numel() / trace.batch)
    return parameters, macs


def _elements(parameter: Parameter, root: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The units of a parameter, and how many of its elements lie at an index of each unit."""
    axes = [root[first : first + size] for first, size in zip(parameter.axes, parameter.sizes, strict=True)]
    roots = np.unique(np.concatenate(axes))
    if not parameter.grouped:
        left = np.ones(len(roots), np.int64)  # elements at no index of the unit
        for own in axes:
            left *= len(own) - np.bincount(np.searchsorted(roots, own), minlength=len(roots))
        return roots, parameter.tensor.numel() - left
    groups = parameter.groups
    outs, ins = (len(own) // groups for own in axes)
    positions = parameter.tensor.numel() // (groups * outs * ins)
    keys, counts = [], []
    for own in axes:  # a key for each pair of a unit and a group of the convolution
        key, number = np.unique(
            np.searchsorted(roots, own) * groups + np.arange(len(own)) // (len(own) // groups), return_counts=True
        )
        keys.append(key)
        counts.append(number)
    elements = np.zeros(len(roots), np.int64)
    np.add.at(elements, keys[0] // groups, counts[0] * ins)
    np.add.at(elements, keys[1] // groups, counts[1] * outs)
    both, first, second = np.intersect1d(*keys, return_indices=True)
    np.subtract.at(elements, both // groups, counts[0][first] * counts[1][second])
    return roots, elements * positions
