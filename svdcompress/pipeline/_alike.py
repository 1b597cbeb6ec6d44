"""A check, before training, that all examples have one shape, as ONNX files take inputs of no other."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from svdcompress.errors import DataError
from svdcompress.sources import Data, Examples, FromDataset
from svdcompress.sources.given import shown
from svdcompress.train import generators_kept

SEEN, AT_ONCE = 32, 4
"""Examples of each split that are looked at, spread over it, and how many are batched together: a `collate_fn` that pads to the
longest example of a batch gives batches of different lengths."""


def check_shapes(data: Data, name: str | None, inputs: Any) -> None:
    """Raises DataError, naming the data (`name`) and two shapes, if not all examples have the shape of the first.

    inputs: the first few training examples, with which the files will be made.
    """
    wanted, where = _shapes(inputs), f"{shown(name)}: " if name else ""
    for split, examples in (("training", data.train), ("validation", data.validation), ("test", data.test)):
        for found in _seen(examples):
            if len(found) != len(wanted):
                raise DataError(
                    f"data: {where}not all batches have the same inputs: {len(wanted)} tensors at first, {len(found)} in other "
                    f"{split} examples. The ONNX files take the same inputs at each call"
                )
            if found != wanted:
                one, other = next((a, b) for a, b in zip(wanted, found, strict=True) if a != b)
                raise DataError(
                    f"data: {where}not all examples have the same shape: {one} at first, {other} in other {split} examples. "
                    "The ONNX files take inputs of one shape, with any number of rows: pad all of them to one length, in the "
                    "dataset or its collate_fn, or resize them"
                )


def _seen(examples: Examples) -> list[list[tuple[int, ...]]]:
    if not len(examples):
        return []
    few = examples.subset(torch.linspace(0, len(examples) - 1, min(SEEN, len(examples))).long().unique())
    if isinstance(few, FromDataset):
        few.workers = 0  # starting processes would take longer
    with generators_kept():  # datasets may draw random crops
        return [_shapes(inputs) for inputs, _ in few.batches(AT_ONCE)]


def _shapes(inputs: Any) -> list[tuple[int, ...]]:
    """The shapes of the tensors of a batch, without its rows."""
    return [tuple(leaf.shape[1:]) for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
