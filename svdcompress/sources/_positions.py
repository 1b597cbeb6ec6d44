"""Targets for each pixel or token: which dimension of an output holds the classes, and targets in the shape of an output."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torch import Tensor

IGNORED = -100
"""The class of a position that does not count, as in torch's and transformers' losses."""


def class_dim(output: Sequence[int], targets: Sequence[int], task: str, last_if_both: bool = False) -> int:
    """The dimension of an output that holds the classes (or, for gaussian, means and log variances), from the shapes.

    1 as in torch, (B, C, ...) for targets (B, ...); -1 if only (B, ..., C) fits, as transformers has it for tokens.
    last_if_both: -1 if both fit, as for 9 tokens and 9 classes.
    """
    if len(output) < 3:
        return 1
    fits = {dim: _fits(output, targets, task, dim) for dim in (1, -1)}
    return -1 if fits[-1] and (last_if_both or not fits[1]) else 1


def both_fit(output: Sequence[int], targets: Sequence[int], task: str) -> bool:
    """Whether the shapes allow the classes at dimension 1 and at the last one, as there are as many positions as classes."""
    return len(output) > 2 and all(_fits(output, targets, task, dim) for dim in (1, -1))


def _fits(output: Sequence[int], targets: Sequence[int], task: str, dim: int) -> bool:
    rest = [*output]
    size = rest.pop(dim)
    if task == "classification":
        return rest == [*targets]
    if task == "gaussian":
        rest.insert(dim if dim > 0 else len(rest), size // 2)
        return size % 2 == 0 and _plain(rest) == _plain(targets)
    return dim == 1


def _plain(shape: Sequence[int]) -> list[int]:
    return [size for size in shape[1:] if size != 1]


def classes_second(logits: Tensor, dim: int) -> Tensor:
    """Logits as (B, C, ...), as torch's losses take them."""
    return logits if dim in (1, 1 - logits.dim()) or logits.dim() < 2 else logits.movedim(dim, 1)


def like(targets: Tensor, output: Tensor) -> Tensor:
    """Targets reshaped to an output's shape: dimensions of size 1 may differ, and either may be flattened after the batch.

    Raises ValueError for any other shape: values would be compared with the wrong ones.
    """
    if targets.shape == output.shape:
        return targets
    flat = min(targets.dim(), output.dim()) <= 2 and prod(targets.shape[1:]) == prod(output.shape[1:])
    if targets.shape[:1] == output.shape[:1] and (flat or _plain(targets.shape) == _plain(output.shape)):
        return targets.reshape(output.shape)
    raise ValueError(f"an output of shape {tuple(output.shape)} for targets of shape {tuple(targets.shape)}")
