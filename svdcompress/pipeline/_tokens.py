"""What shapes of token data leave open: which dimension of an output has the classes, and whether targets are the inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from svdcompress.batch import call, main_output, map_tensors


@torch.no_grad()
def among_positions(model: nn.Module, inputs: Any, output: Tensor) -> tuple[int, list[str]]:
    """The dimension of an output's classes, 1 or -1, where both would fit: the one that keeps its size when the inputs are
    one position shorter. If that does not tell, it is 1, as in torch's losses, and a warning is returned with it."""
    try:
        shorter = main_output(call(model, map_tensors(inputs, lambda x: x[:, :-1] if x.dim() > 1 else x))).shape
    except Exception:  # the model may raise anything for inputs of another size
        shorter = output.shape
    changed = [dim for dim in range(1, output.dim()) if len(shorter) == output.dim() and shorter[dim] != output.shape[dim]]
    if changed == [1]:
        return -1, []
    if changed == [output.dim() - 1]:
        return 1, []
    shape = tuple(output.shape)
    return 1, [
        f"the model's output, {shape}, has as many positions as classes, and is taken as (N, classes, ...). If the "
        "classes are in its last dimension, return a dict with 'logits', or output.transpose(1, -1)"
    ]


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
