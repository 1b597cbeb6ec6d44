"""How large a model is without some of its units: exactly for a whole choice, and step by step as units go."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from svdcompress.batch import first_example
from svdcompress.cost import macs
from svdcompress.prune import BIAS, Analysis, Choice, count_means, operations

MEASURES = ("parameters", "macs")
"""What a size can be measured in, as `svdcompress.cost.measure` counts it."""

Touch = tuple[int, int, tuple[int, ...]]
"""A unit's part of a tensor: (tensor, axis, number of indices in each group of a convolution)."""


@dataclass
class _Tensor:
    """A parameter or buffer that shrinks with its units.

    axes: roots of the units along each axis, (groups, per group); one group unless it is a grouped convolution's weight.
    kept: the number of indices of each axis in each group. rest: the product of the other lengths. price: of one element, by
    measure.
    """

    axes: list[np.ndarray]
    kept: list[list[int]]
    rest: int
    price: dict[str, float]

    def elements(self, kept: list[list[int]]) -> int:
        """The number of elements with this many indices left along each axis, by group."""
        total = 0
        for group in range(len(kept[0]) if kept else 1):
            product = self.rest
            for axis in kept:
                product *= axis[group]
            total += product
        return total


class Sizes:
    """The tensors of an analyzed model, with the units along their axes.

    total: the whole model's sizes, by measure.
    """

    def __init__(self, model: nn.Module, analysis: Analysis, example_inputs: Any) -> None:
        self.model, self.analysis = model, analysis
        trace = analysis.trace
        self.total = {"parameters": float(count_means(model)), "macs": float(macs(model, example_inputs))}
        self.tensors: list[_Tensor] = []
        each = _of_one_example(model, analysis, example_inputs, self.total["macs"])
        for parameter in trace.units.parameters:
            operations = sum(each[number] for number in trace.applied.get(id(parameter.tensor), ()))
            counted = isinstance(parameter.tensor, nn.Parameter)
            if not operations and not counted:
                continue
            price = {"parameters": float(counted), "macs": operations / max(parameter.tensor.numel(), 1)}
            roots = [analysis.root[a : a + n] for a, n in zip(parameter.axes, parameter.sizes, strict=True)]
            if parameter.grouped:
                axes = [own.reshape(parameter.groups, -1) for own in roots]
                rest = parameter.tensor.numel() // (parameter.groups * axes[0].shape[1] * axes[1].shape[1])
            else:
                axes = [own[None] for own in roots if analysis.free[own].any()]
                rest = parameter.tensor.numel() // max(int(np.prod([own.shape[1] for own in axes])), 1)
            kept = [[own.shape[1]] * own.shape[0] for own in axes]
            self.tensors.append(_Tensor(axes, kept, rest, price))
        for labels, number in trace.products:  # attention: a head's products go with it
            own = analysis.root[labels.numpy()]
            price = {"parameters": 0.0, "macs": each[number] / len(own)}
            self.tensors.append(_Tensor([own[None]], [[len(own)]], 1, price))

    def left(self, choice: Choice) -> dict[str, float]:
        """The sizes after a choice is carried out, including new biases for folded constants."""
        removed = np.zeros(self.analysis.count, bool)
        removed[self.analysis.root[choice.removed]] = True
        left = dict(self.total)
        for tensor in self.tensors:
            kept = [(~removed[own]).sum(1).tolist() for own in tensor.axes]
            gone = tensor.elements(tensor.kept) - tensor.elements(kept)
            for measure in MEASURES:
                left[measure] -= gone * tensor.price[measure]
        return {**left, "parameters": left["parameters"] + self._new_biases(choice)}

    def _new_biases(self, choice: Choice) -> int:
        """The number of elements in new biases, of modules without a bias that constants are folded into."""
        made: dict[str, int] = {}
        for consumer in self.analysis.consumers:
            if consumer.owner is None or getattr(self.model.get_submodule(consumer.owner), "bias", None) is not None:
                continue
            folded = choice.folded[consumer.ins.reshape(-1)] & (consumer.how == BIAS)
            if (folded & (consumer.values[:, 0] != 0)).any():
                made[consumer.owner] = int((~choice.removed[consumer.outs]).sum())
        return sum(made.values())


def _of_one_example(model: nn.Module, analysis: Analysis, example_inputs: Any, total: float) -> list[float]:
    """Multiply-accumulates of one example in each of a trace's operations.

    Some may not depend on the batch (a network that computes position biases), so their share of it is not one of its size.
    """
    trace = analysis.trace
    shares = [macs / trace.batch for macs in trace.operations]
    if abs(sum(shares) - total) < 0.5:
        return shares
    found = operations(model, first_example(example_inputs))
    return [float(macs) for macs in found] if len(found) == len(shares) and abs(sum(found) - total) < 0.5 else shares


class Shrinking:
    """Sizes as units go one after another; each step costs a few operations.

    sizes: of the whole model; gone: units that have been removed already, bool per root.
    """

    def __init__(self, sizes: Sizes, gone: np.ndarray) -> None:
        self.tensors = sizes.tensors
        self.kept = [[(~gone[own]).sum(1).tolist() for own in tensor.axes] for tensor in sizes.tensors]
        self.touches: dict[int, list[Touch]] = defaultdict(list)
        for number, tensor in enumerate(sizes.tensors):
            for axis, own in enumerate(tensor.axes):
                for root, counts in _counts(own):
                    if sizes.analysis.free[root]:
                        self.touches[root].append((number, axis, counts))

    def of(self, roots: list[int]) -> tuple[Touch, ...]:
        """The parts of all tensors that belong to some units; units with equal parts have equal costs."""
        found: dict[tuple[int, int], np.ndarray] = {}
        for root in roots:
            for number, axis, counts in self.touches.get(root, ()):
                found[number, axis] = found.get((number, axis), 0) + np.array(counts)
        return tuple((*key, tuple(counts.tolist())) for key, counts in sorted(found.items()))

    def saved(self, touches: tuple[Touch, ...], measure: str) -> float:
        """How much a size falls if these parts go now."""
        by_tensor: dict[int, dict[int, tuple[int, ...]]] = defaultdict(dict)
        for number, axis, counts in touches:
            by_tensor[number][axis] = counts
        total = 0.0
        for number, gone in by_tensor.items():
            tensor, kept = self.tensors[number], self.kept[number]
            if price := tensor.price[measure]:
                after = [[k - g for k, g in zip(own, gone[i], strict=True)] if i in gone else own for i, own in enumerate(kept)]
                total += price * (tensor.elements(kept) - tensor.elements(after))
        return total

    def take(self, touches: tuple[Touch, ...]) -> None:
        """Remove these parts."""
        for number, axis, counts in touches:
            kept = self.kept[number][axis]
            self.kept[number][axis] = [k - g for k, g in zip(kept, counts, strict=True)]


def _counts(own: np.ndarray) -> list[tuple[int, tuple[int, ...]]]:
    """The number of indices that each unit has in each group, along an axis of (groups, indices)."""
    roots, inverse = np.unique(own.reshape(-1), return_inverse=True)
    groups = len(own)
    table = np.zeros((len(roots), groups), np.int64)
    np.add.at(table, (inverse.reshape(-1), np.repeat(np.arange(groups), own.shape[1])), 1)
    return list(zip(roots.tolist(), map(tuple, table.tolist()), strict=True))
