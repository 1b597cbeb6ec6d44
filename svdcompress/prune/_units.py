"""Units and their ties: each index of each axis of a parameter is a slot; slots that must be removed together are a unit."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from svdcompress.layers import canonical


@dataclass
class Parameter:
    """One parameter or buffer of the traced model, and the slots of its axes.

    names: every dotted name under which it is found. axes: first slot of each axis. sizes: length of each axis. The axes of a
    grouped convolution's weight are its output and its input channels; those of any other tensor are its dimensions.
    mask: which elements count (bool, its shape), or None for all.
    """

    tensor: Tensor
    names: list[str]
    axes: list[int]
    sizes: list[int]
    groups: int = 1
    transposed: bool = False
    mask: Tensor | None = None

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def grouped(self) -> bool:
        return self.groups > 1

    def canonical(self, tensor: Tensor) -> Tensor:
        """A tensor of the parameter's shape as (groups, outputs per group, inputs per group, kernel positions)."""
        return canonical(tensor, self.groups, self.transposed)


@dataclass
class Units:
    """Slots, the edges between them, and the pins; filled while tracing. Slot 0 stands for "no unit"."""

    count: int = 1
    edges: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    pins: list[tuple[np.ndarray, str]] = field(default_factory=list)
    producers: list[np.ndarray] = field(default_factory=list)
    parameters: list[Parameter] = field(default_factory=list)
    _root: np.ndarray = field(default_factory=lambda: np.arange(1))
    _seen: int = 0

    def new(self, number: int) -> int:
        """Allocate this many slots; returns the first."""
        first, self.count = self.count, self.count + number
        return first

    def add(self, tensor: Tensor, names: list[str], module: Any, mask: Tensor | None) -> Parameter:
        """Allocate slots for a parameter's axes."""
        groups = int(getattr(module, "groups", 1)) if isinstance(module, nn.modules.conv._ConvNd) else 1
        transposed = bool(getattr(module, "transposed", False)) and tensor.dim() > 1
        sizes = list(tensor.shape)
        if groups > 1 and tensor.dim() > 1:
            sizes = [module.out_channels, module.in_channels]
        else:
            groups = 1
        parameter = Parameter(tensor, names, [self.new(n) for n in sizes], sizes, groups, transposed, mask)
        self.parameters.append(parameter)
        return parameter

    def tie(self, a: Tensor, b: Tensor) -> None:
        """Tie the slots of two broadcastable label tensors, element by element; a slot that meets no unit is pinned."""
        a, b = torch.broadcast_tensors(a, b)
        pairs = torch.stack([a.reshape(-1), b.reshape(-1)])
        pairs = pairs[:, pairs[0] != pairs[1]]
        if pairs.shape[1] == 0:
            return
        lone = (pairs == 0).any(0)
        if bool(lone.any()):
            self.pin(pairs[:, lone], "meets values that belong to no unit")
            pairs = pairs[:, ~lone]
        pairs = distinct(pairs)
        self.edges.append((pairs[0].cpu().numpy(), pairs[1].cpu().numpy()))

    def resolve(self, labels: Tensor) -> Tensor:
        """The labels, with slots that have been tied so far replaced by one of them."""
        if self._seen != len(self.edges) or len(self._root) != self.count:
            root = np.concatenate([self._root, np.arange(len(self._root), self.count)])
            self._root, self._seen = components(self.count, self.edges[self._seen :], root), len(self.edges)
        return torch.from_numpy(self._root)[labels]

    def pin(self, labels: Tensor, reason: str) -> None:
        """Keep these slots, for this reason."""
        flat = torch.unique(labels.reshape(-1)).cpu().numpy()
        self.pins.append((flat[flat > 0], reason))

    def produce(self, slots: Tensor) -> None:
        """Note that the rows of a weight write these slots: they are units that can be removed."""
        self.producers.append(slots.cpu().numpy())


def distinct(pairs: Tensor) -> Tensor:
    """The distinct columns of a (2, n) tensor of slots or indices."""
    width = int(pairs[1].max()) + 1 if pairs.numel() else 1
    code = torch.unique(pairs[0] * width + pairs[1])
    return torch.stack([code // width, code % width])


def components(count: int, edges: list[tuple[np.ndarray, np.ndarray]], root: np.ndarray | None = None) -> np.ndarray:
    """The least slot of each slot's connected component; minimum-label propagation with pointer jumping.

    root: the components without these edges, to start from.
    """
    root = np.arange(count) if root is None else root.copy()
    if not edges:
        return root
    a = np.concatenate([pair[0] for pair in edges])
    b = np.concatenate([pair[1] for pair in edges])
    while len(a):
        ra, rb = root[a], root[b]
        apart = ra != rb
        if not apart.any():
            return root
        a, b, ra, rb = a[apart], b[apart], ra[apart], rb[apart]
        np.minimum.at(root, np.maximum(ra, rb), np.minimum(ra, rb))
        while not np.array_equal(root[root], root):
            root = root[root]
    return root
