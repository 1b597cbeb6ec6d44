"""A check, before training, that all examples have shapes that the ONNX files take."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from svdcompress.batch import call, generators_kept, main_output
from svdcompress.errors import DataError, cause
from svdcompress.sources import Data, Examples, FromDataset
from svdcompress.sources.given import shown

SEEN, AT_ONCE = 32, 4
"""Examples of each split that are looked at, spread over it, and how many are batched together: a `collate_fn` that pads to the
longest example of a batch gives batches of different lengths."""


def check_shapes(data: Data, name: str | None, inputs: Any, model: nn.Module, dims: list[set[int]]) -> None:
    """Raises DataError, naming the data (`name`) and two shapes, if not all examples have the shape of the first.

    inputs: the first few training examples, with which the files will be made. dims: of each tensor in them, dimensions whose
    size may differ (`export.dynamic_axes`), as long as the model's output has the same shape.
    """
    wanted, where = _shapes(inputs), f"{shown(name)}: " if name else ""
    for split, examples in (("training", data.train), ("validation", data.validation), ("test", data.test)):
        for found in _seen(examples):
            shapes = _shapes(found)
            if len(shapes) != len(wanted):
                raise DataError(
                    f"data: {where}not all batches have the same inputs: {len(wanted)} tensors at first, {len(shapes)} in "
                    f"other {split} examples. The ONNX files take the same inputs at each call"
                )
            if shapes == wanted:
                continue
            one, other = next((a, b) for a, b in zip(wanted, shapes, strict=True) if a != b)
            said = f"data: {where}not all examples have the same shape: {one} at first, {other} in other {split} examples. "
            if _but_for(shapes, dims) != _but_for(wanted, dims):
                raise DataError(
                    f"{said}The ONNX files take inputs of one shape, with any number of rows: pad all of them to one length, "
                    "in the dataset or its collate_fn, or resize them; or leave dimensions open (export.dynamic_axes)"
                )
            try:
                same = _output(model, found) == (output := _output(model, inputs))
            except Exception as error:  # whatever the user's model raises
                raise DataError(f"{said}The model fails on them: {type(error).__name__}: {cause(error)}") from error
            if not same:
                raise DataError(
                    f"{said}The model's output, of shape {output} at first, follows them, and outputs of several shapes can't "
                    "be compared: pad all examples to one length, in the dataset or its collate_fn (files may take other "
                    "lengths all the same)"
                )


def _seen(examples: Examples) -> list[Any]:
    if not len(examples):
        return []
    few = examples.subset(torch.linspace(0, len(examples) - 1, min(SEEN, len(examples))).long().unique())
    if isinstance(few, FromDataset):
        few.workers = 0  # starting processes would take longer
    with generators_kept():  # datasets may draw random crops
        return [inputs for inputs, _ in few.batches(AT_ONCE)]


def _shapes(inputs: Any) -> list[tuple[int, ...]]:
    """The shapes of the tensors of a batch, without its rows."""
    return [tuple(leaf.shape[1:]) for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]


def _but_for(shapes: list[tuple[int, ...]], dims: list[set[int]]) -> list[list[int]]:
    """Shapes without rows, less the dimensions that may differ, which count the rows."""
    return [
        [size for dim, size in enumerate(shape, 1) if dim not in free]
        for shape, free in zip(shapes, dims or [set()] * len(shapes), strict=True)
    ]


def _output(model: nn.Module, inputs: Any) -> tuple[int, ...]:
    with torch.no_grad():
        return tuple(main_output(call(model, inputs)).shape[1:])
