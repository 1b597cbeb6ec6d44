"""What shapes of token data leave open: which dimension of an output has the classes, and whether targets are the inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from svdcompress.batch import call, main_output, map_tensors

SHORTER = (1, 2, 4, 8, 16, 32)
"""By how much inputs are made shorter: an output of a model with strides has another size only after several positions."""


@torch.no_grad()
def among_positions(model: nn.Module, inputs: Any, output: Tensor) -> tuple[int, list[str]]:
    """The dimension of an output's classes, 1 or -1, where both would fit: the one that keeps its size when the inputs have
    fewer positions. If that does not tell, it is 1, as in torch's losses, and a warning is returned with it."""
    moved = _moved_by(model, inputs, output, 1)
    if moved == {1}:
        return -1, []
    if moved == {output.dim() - 1}:
        return 1, []
    shape = tuple(output.shape)
    return 1, [
        f"the model's output, {shape}, has as many positions as classes, and is taken as (N, classes, ...). If the "
        "classes are in its last dimension, return a dict with 'logits', or output.transpose(1, -1)"
    ]


@torch.no_grad()
def unlabelled_dim(model: nn.Module, inputs: Any, output: Tensor, by_name: bool) -> tuple[int, list[str]]:
    """The dimension of an output's classes where no labels show it: the one whose size stays when inputs become smaller.

    by_name: whether the model returns its outputs by name, as those of transformers do. If making inputs smaller does not
    tell, the classes are taken to be last in an output (N, positions, classes) by name, and in dimension 1 otherwise, and a
    warning is returned with it.
    """
    last = output.dim() - 1
    if last < 2:
        return 1, []
    moved: set[int] = set()
    for dim in range(1, max((each.dim() for each in tree_leaves(inputs) if isinstance(each, Tensor)), default=0)):
        moved |= _moved_by(model, inputs, output, dim)
    if moved == set(range(2, last + 1)):
        return 1, []
    if moved == set(range(1, last)):
        return last, []
    dim, sizes = last if by_name and last == 2 else 1, ", ".join(map(str, output.shape[1:]))
    return dim, [
        f"the model's output has the shape (N, {sizes}), and nothing tells which dimension has the classes: "
        f"dimension {dim} is taken. If that is wrong, return an output whose classes are in dimension 1: (N, classes, ...)"
    ]


def _moved_by(model: nn.Module, inputs: Any, output: Tensor, dim: int) -> set[int]:
    """The output's dimensions that have another size if the inputs are shorter in one dimension; empty if none has, or if the
    model takes no shorter ones."""
    for step in SHORTER:

        def shorter(x: Tensor, step: int = step) -> Tensor:
            return x.narrow(dim, 0, x.shape[dim] - step) if x.dim() > dim and x.shape[dim] > step else x

        try:
            found = main_output(call(model, map_tensors(inputs, shorter))).shape
        except Exception:  # the model may raise anything for inputs of another size
            continue
        if len(found) == output.dim() and (moved := {d for d in range(1, len(found)) if found[d] != output.shape[d]}):
            return moved
    return set()


def copied(inputs: Any, targets: Tensor, task: str) -> list[str]:
    """A warning about targets that are the inputs themselves, which Hugging Face's language models take and shift."""
    if task != "classification" or targets.dim() < 2:
        return []
    given = [each for each in tree_leaves(inputs) if isinstance(each, Tensor) and each.shape == targets.shape]
    if not any(torch.equal(each, targets.to(each.dtype)) for each in given):
        return []
    return [
        "the targets are the inputs themselves: a model learns to copy them. For a language model shift them by one, "
        "labels[:, :-1] = ids[:, 1:], with -100 at the end: only the model's own loss shifts them itself, and it is not used"
    ]
