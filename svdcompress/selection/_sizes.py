"""How large a model is without some of its units: exactly, and step by step while they go."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from svdcompress.cost import macs
from svdcompress.prune import BIAS, Analysis, Choice, count_means

MEASURES = ("parameters", "macs")
"""What a size can be measured in, as `svdcompress.cost.measure` counts it."""

Touch = tuple[int, int, tuple[int, ...]]
"""What a unit has of a tensor: (tensor, axis, indices in each group of a convolution)."""


@dataclass
class _Tensor:
    """A parameter or buffer: `kept` indices of each axis in each group (one, if it is no grouped convolution's weight).

    axes: units along each axis. rest: the product of the other lengths. price: of an element, by measure.
    """

    axes: list[np.ndarray]
    kept: list[list[int]]
    rest: int
    price: dict[str, float]

    def elements(self, kept: list[list[int]]) -> int:
        """Of a tensor with so many indices left."""
        total = 0
        for group in range(len(kept[0]) if kept else 1):
            product = self.rest
            for axis in kept:
                product *= axis[group]
            total += product
        return total


class Sizes:
    """The tensors of an analysed model, with the units along their axes.

    total: the whole model's sizes, by measure.
    """

    def __init__(self, model: nn.Module, analysis: Analysis, example_inputs: Any) -> None:
        self.model, self.analysis = model, analysis
        trace = analysis.trace
        self.total = {"parameters": float(count_means(model)), "macs": float(macs(model, example_inputs))}
        self.tensors: list[_Tensor] = []
        for parameter in trace.units.parameters:
            operations = trace.macs.get(id(parameter.tensor), 0) / trace.batch
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
        for labels, operations in trace.products:  # attention: a head takes its own along
            own = analysis.root[labels.numpy()]
            price = {"parameters": 0.0, "macs": operations / trace.batch / len(own)}
            self.tensors.append(_Tensor([own[None]], [[len(own)]], 1, price))

    def left(self, choice: Choice) -> dict[str, float]:
        """The sizes once a choice is carried out, with the biases that folded constants make."""
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
        """Of modules without one that constants are folded into."""
        made: dict[str, int] = {}
        for consumer in self.analysis.consumers:
            if consumer.owner is None or getattr(self.model.get_submodule(consumer.owner), "bias", None) is not None:
                continue
            folded = choice.folded[consumer.ins.reshape(-1)] & (consumer.how == BIAS)
            if (folded & (consumer.values[:, 0] != 0)).any():
                made[consumer.owner] = int((~choice.removed[consumer.outs]).sum())
        return sum(made.values())


class Shrinking:
    """The same while units go one after the other; each step costs a few operations.

    sizes: of the whole model; gone: units that are not there any more, bool per root.
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
        """All that some units have of the tensors; units that have the same cost the same."""
        found: dict[tuple[int, int], np.ndarray] = {}
        for root in roots:
            for number, axis, counts in self.touches.get(root, ()):
                found[number, axis] = found.get((number, axis), 0) + np.array(counts)
        return tuple((*key, tuple(counts.tolist())) for key, counts in sorted(found.items()))

    def saved(self, touches: tuple[Touch, ...], measure: str) -> float:
        """By how much a size falls when they go now."""
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
        """They go."""
        for number, axis, counts in touches:
            kept = self.kept[number][axis]
            self.kept[number][axis] = [k - g for k, g in zip(kept, counts, strict=True)]


def _counts(own: np.ndarray) -> list[tuple[int, tuple[int, ...]]]:
    """How many indices of each group each unit has, along an axis of (groups, indices)."""
    roots, inverse = np.unique(own.reshape(-1), return_inverse=True)
    groups = len(own)
    table = np.zeros((len(roots), groups), np.int64)
    np.add.at(table, (inverse.reshape(-1), np.repeat(np.arange(groups), own.shape[1])), 1)
    return list(zip(roots.tolist(), map(tuple, table.tolist()), strict=True))
