"""Splits a source's examples into training, validation and test data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from svdcompress.batch import map_tensors
from svdcompress.errors import DataError, shortened
from svdcompress.recipe import DataSection
from svdcompress.sources._raw import Raw, Table

TABLES = ("csv", "parquet")
"""Kinds of sources that are tables."""

Read = Callable[[DataSection], Raw]


def in_three(raw: Raw, section: DataSection, read: Read) -> dict[str, Table]:
    """Training, validation and test parts; which examples are held out depends on split_seed alone, never on the run's seed.

    read: a function that reads another source.
    """
    train, test = raw.train, raw.test
    if test is None:
        train, test = _hold_out(train, section.test_share, section, "test_share")
    elif section.test_share != DataSection().test_share:
        raw.warnings.append(
            f"data.test_share: {section.test_share:g} has no effect, because {section.name} has its own test data"
        )
    if isinstance(section.validation, str):
        test, validation = _held_elsewhere(section.validation, section, raw, test, read)
        return {"train": train, "validation": validation, "test": test}
    if raw.validation is not None:
        if section.validation != DataSection().validation:
            raw.warnings.append(
                f"data.validation: {section.validation:g} has no effect, because {section.name} has its own validation data"
            )
        if raw.test is not None and section.limit is None:  # which examples a limit takes follows from both
            raw.warnings += [
                f"data.{name}: {getattr(section, name)} has no effect: {section.name} has its own validation and test data"
                for name in ("split", "split_seed")
                if getattr(section, name) != getattr(DataSection(), name)
            ]
        return {"train": train, "validation": raw.validation, "test": test}
    train, validation = _hold_out(train, section.validation, section, "validation")
    return {"train": train, "validation": validation, "test": test}


def _held_elsewhere(name: str, section: DataSection, raw: Raw, test: Table, read: Read) -> tuple[Table, Table]:
    """The test data, and the validation data that `data.validation` names: a part of the former, or another source.

    For weights that were trained on the training data: no part of it could judge them.
    """
    if name.startswith("test:"):
        share = _share(name.removeprefix("test:"))
        return _hold_out(test, share, section, "validation", "test data")
    if name.partition(":")[0] in TABLES:  # read with the categories and columns of the training data
        if str(section.name).partition(":")[0] not in TABLES:
            raise DataError(
                f"data.validation: {name} is a table, but {section.name} is not, so its input columns are not known. Name data "
                f"of the same kind as {section.name}, or test:50%"
            )
        table = read(section.model_copy(update={"test": name})).test
        assert table is not None
        raw.warnings += _told(table.warnings, name, raw.warnings)
        return test, table
    try:
        features = section.features or raw.columns if str(section.name).partition(":")[0] == name.partition(":")[0] else None
        other = read(section.model_copy(update={"name": name, "test": None, "features": features}))
    except DataError as error:  # which names the field that sources are usually named by
        raise DataError(str(error).replace("data.name:", "data.validation:")) from error
    if other.classes is not None and raw.classes is not None and other.classes != raw.classes:
        raise DataError(
            f"data.validation: {name} has the classes {shortened(str(other.classes))}, and {section.name} has "
            f"{shortened(str(raw.classes))}: the same names in the same order are needed"
        )
    raw.warnings += _told(other.warnings, name, raw.warnings)
    return test, other.train


def _told(lines: list[str], name: str, known: list[str]) -> list[str]:
    """Warnings about how the validation data `name` were read, which say so; without those `known` of the training data."""
    place = name.partition(":")[2] or name
    plain = [line.removeprefix("data: ") for line in lines if line not in known]
    return [f"data.validation: {line}" if place in line else f"data.validation: {name}: {line}" for line in plain]


def _share(text: str) -> float:
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = 0.0
    if share <= 0 or (text.endswith("%") and share >= 1):
        raise DataError(f"data.validation: 'test:{text}' names no part of the test data; write test:50%, or test:500 examples")
    return share


def _hold_out(table: Table, amount: float, section: DataSection, name: str, what: str = "training data") -> tuple[Table, Table]:
    count = int(amount) if amount >= 1 else max(1, round(amount * len(table)))
    if count >= len(table):
        raise DataError(f"data.{name}: {amount:g} leaves no {what} of the {len(table)} examples of {table.origin}")
    if section.split == "tail":
        order = torch.arange(len(table))
    else:
        order = torch.randperm(len(table), generator=torch.Generator().manual_seed(section.split_seed))
    return part(table, order[:-count]), part(table, order[-count:])


def part(table: Table, indices: Tensor) -> Table:
    """The examples of a split at `indices`."""
    if table.dataset is not None:
        return replace(table, rows=indices if table.rows is None else table.rows[indices])
    return Table(table.origin, map_tensors(table.inputs, lambda tensor: tensor[indices]), table.targets[indices])
