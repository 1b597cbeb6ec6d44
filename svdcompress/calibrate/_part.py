"""A fixed random part of the targets of many examples, drawn while these are read, so that memory stays bounded."""

from __future__ import annotations

import torch
from torch import Tensor

EXTRA = 1.25
"""Targets are dropped when there are this many times too many, as dropping copies those that stay."""


class Part:
    """At most `most` of the targets that count, with their outputs, in order; all if there are no more.

    Each target has a number, and those with the lowest ones stay. The numbers of an example's m targets, in random order, lie
    one in each m-th of the range from 0 to 1, so that all examples keep the same share of theirs, rounded up or down at random.
    They depend on the targets before them alone, not on batches or models: parts of several models are of the same targets.
    """

    def __init__(self, most: int) -> None:
        self.most, self.total, self._examples, self._limit = most, 0, 0, 1.0
        self._orders, self._places = (torch.Generator().manual_seed(seed) for seed in (0, 1))
        self._stored: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []

    def add(self, outputs: Tensor, targets: Tensor, counts: Tensor) -> None:
        """Add a batch. outputs: (S, R, ...), a row for each target, R = B times positions. targets, counts: (B, ...)."""
        numbers = self._numbers(counts.reshape(len(counts), -1))
        owner = torch.arange(len(targets)).view(-1, *[1] * (targets.dim() - 1)).expand_as(targets).flatten()
        stays = counts.flatten() & (numbers <= self._limit)
        self._stored.append((outputs[:, stays], targets.flatten()[stays], owner[stays] + self._examples, numbers[stays]))
        self.total += int(counts.sum())
        self._examples += len(targets)
        if sum(len(batch[1]) for batch in self._stored) > EXTRA * self.most:
            self._drop()

    def kept(self) -> tuple[Tensor, Tensor, Tensor]:
        """Outputs (S, R, ...), targets (R,), and the example of each, (R,)."""
        if self.total > self.most:
            self._drop()
        outputs, targets, owner, _ = zip(*self._stored, strict=True)
        return torch.cat(outputs, 1), torch.cat(targets), torch.cat(owner)

    def _numbers(self, counts: Tensor) -> Tensor:
        """The number of each target, flattened, in double precision. counts: (B, positions)."""
        order = torch.rand(counts.shape, generator=self._orders, dtype=torch.float64).masked_fill(~counts, 2.0).argsort(1)
        rank = torch.empty_like(order).scatter_(1, order, torch.arange(counts.shape[1]).expand_as(order))
        place = torch.rand(len(counts), 1, generator=self._places, dtype=torch.float64)
        return ((rank + 1 - place) / counts.sum(1, keepdim=True).clamp_min(1)).flatten()

    def _drop(self) -> None:
        """Drop the targets with the highest numbers."""
        numbers = torch.cat([batch[3] for batch in self._stored])
        if len(numbers) <= self.most:
            return
        self._limit = float(numbers.kthvalue(self.most).values)
        stored, self._stored = self._stored, []
        while stored:
            outputs, targets, owner, numbers = stored.pop(0)
            stays = numbers <= self._limit
            self._stored.append((outputs[:, stays], targets[stays], owner[stays], numbers[stays]))
