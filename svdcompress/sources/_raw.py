"""What the readers of all kinds of data return, and what they share."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from svdcompress.errors import DataError, DependencyError


@dataclass
class Table:
    """Examples of one split as they were read: tensors in memory, or a dataset that is read as needed.

    origin: the file or folder, for messages. rows: which of the dataset's examples belong to the split; None: all.
    warnings: about how they were read.
    """

    origin: str
    inputs: Any = None
    targets: Any = None  # a tensor
    dataset: Any = None  # instead of both: a Dataset with a length
    collate: Any = None
    workers: int = 0
    rows: Tensor | None = None
    warnings: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        if self.rows is not None:
            return len(self.rows)
        return len(self.dataset) if self.dataset is not None else len(self.targets)


@dataclass
class Raw:
    """All that a source holds. test and validation: None if the source has none of its own.

    preprocessing: what is needed to read more examples in the same way (columns, categories, image size).
    warnings: what the user should know about how the data are read. notes: how they were read. columns: those that are read,
    for sources that name them. array: the name of the training inputs in their file, if it has one.
    """

    train: Table
    test: Table | None = None
    validation: Table | None = None
    classes: list[str] | None = None
    preprocessing: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    columns: list[str] | None = None
    array: str = ""


def no_targets(count: int) -> Tensor:
    """Placeholders for the targets of unlabeled examples until the dense model has given its answers."""
    return torch.zeros(count, dtype=torch.long)


def optional(module: str, package: str, needed_for: str) -> Any:
    """An optional module, or a DependencyError that says how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DependencyError(f"{needed_for} needs the package {package}: pip install {package}") from error


def encode_classes(values: list[Any], known: list[str] | None, where: str) -> tuple[Tensor, list[str]]:
    """Class names as indices (N,) of the sorted names. Raises DataError for a name outside `known`, naming its row."""
    names = known if known is not None else sorted({str(value) for value in values})
    index = {name: position for position, name in enumerate(names)}
    for row, value in enumerate(values):
        if str(value) not in index:
            raise DataError(f"{where}: class {value!r} at row {row} does not occur in the training data")
    return torch.tensor([index[str(value)] for value in values], dtype=torch.long), list(names)
