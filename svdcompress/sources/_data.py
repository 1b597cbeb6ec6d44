"""Turns a recipe's data section into checked training, validation and test examples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from svdcompress.batch import map_tensors
from svdcompress.errors import DataError
from svdcompress.recipe import DataSection
from svdcompress.sources import _standard, _transforms
from svdcompress.sources._check import FROM_ONE, Check, from_one
from svdcompress.sources._examples import Examples, FromDataset, InMemory
from svdcompress.sources._factory import read_factory
from svdcompress.sources._hub import read_hub
from svdcompress.sources._names import is_python_name
from svdcompress.sources._positions import IGNORED
from svdcompress.sources._raw import Raw, Table
from svdcompress.sources._readers import READERS, check_fields, made_by
from svdcompress.sources._split import in_three, part
from svdcompress.sources._tables import read_table


@dataclass
class Data:
    """The three splits of a run's data, and what is needed to read more data in the same way.

    task: classification, binary, regression or gaussian. classes: the names of the classes, if any.
    outputs: number of classes (1 for binary) or of target columns. target_scale: mean and standard deviation by which the
    targets were standardized, or None. preprocessing: JSON-serializable: transforms with their measured numbers, columns,
    categories, image size, the shape of an input before the transforms if inputs are one tensor (`input_shape`),
    whether the transforms begin by standardizing (`standardized`), and what is done to inputs that are bytes before that
    (`bytes`: "divided by 255", or None if none are). warnings: what may be wrong, one line each. notes: what was done unasked,
    one line each. dim: the dimension of the model's output that holds the classes (`class_dim`), once a model was run.
    place: where the training inputs are, for messages: their file or function, and their name in it (`x in FILE`).
    """

    train: Examples
    validation: Examples
    test: Examples
    task: str
    outputs: int
    classes: list[str] | None = None
    target_scale: tuple[float, float] | None = None
    preprocessing: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    dim: int = 1
    place: str = ""


def open_data(section: DataSection, task: str, *, strict: bool = True) -> Data:
    """Read, split, check and transform the data that a recipe names; only two examples of data that are read as needed.

    strict: refuse fields that the source does not know; False ignores them, for recipes of finished runs.

    Raises DataError, naming file, field and row, for data that are missing, damaged, empty, out of range or not finite, and
    for a field that is set but has no effect; RecipeError for transforms that do not fit.
    """
    if strict:
        check_fields(section)
    raw = _read(section, task)
    raw.train = _limited(_checked(raw.train, task, "train"), section)
    if not len(raw.train):
        raise DataError(f"data: {raw.train.origin}: no examples")
    tables = in_three(raw, section, lambda other: _read(other, task))
    for name in ("validation", "test"):
        tables[name] = _limited(_checked(tables[name], task, name), section)
    outputs, classes = _outputs(tables, task, raw.classes)
    train = tables["train"]
    standardized = _standard.standardizes(section, raw.preprocessing, train.inputs)
    scale = _target_scale(train, section, task, standardized)
    fitted = _fit(section, train, raw.preprocessing, standardized)
    augment = _transforms.build(section.augment, "data.augment", trust_code=True)
    splits = {}
    for name, table in tables.items():
        check = Check(task, table.origin, name, outputs if classes else None)
        splits[name] = _examples(table, fitted, augment if name == "train" else None, scale, check)
    _try(splits)
    preprocessing = {**raw.preprocessing, "transform": fitted, "target_scale": list(scale) if scale else None}
    preprocessing["standardized"] = standardized
    if isinstance(train.inputs, Tensor):
        preprocessing["input_shape"] = list(train.inputs.shape[1:])
    byte, flat = _bytes(train, splits["train"])
    preprocessing["bytes"] = _transforms.DIVIDED if byte else None
    own = made_by(section) or str(section.name).startswith("npz:")  # in images, bytes are expected
    warnings = [_transforms.BYTES.format(train.origin)] if own and flat else []
    warnings += _standard.unscaled(section, train.inputs, train.targets, task, standardized, scale is not None)
    if task == "classification":
        warnings += (
            _standard.not_classes(train.targets, raw.classes)
            or _standard.absent_classes(train.targets, raw.classes)
            or _standard.unseen_classes({name: table.targets for name, table in tables.items()})
        )
    unasked = standardized and section.standardize == "auto"
    notes = raw.notes + ([_transforms.OWN_BYTES.format(train.origin)] if own and byte and not flat else [])
    notes += [_standard.note(train.origin, raw.preprocessing, scale is not None)] if unasked else []
    return Data(
        **splits,
        task=task,
        outputs=outputs,
        classes=classes,
        target_scale=scale,
        preprocessing=preprocessing,
        warnings=raw.warnings + warnings,
        notes=notes,
        place=f"{raw.array} in {train.origin}" if raw.array else train.origin,
    )


def _bytes(train: Table, examples: Examples) -> tuple[bool, bool]:
    """Whether inputs are bytes, which are scaled like images, and whether these don't have the shape of images; of a dataset,
    this is known from the examples that were tried."""
    if isinstance(examples, FromDataset) and examples.check is not None:
        return examples.check.bytes, examples.check.flat_bytes
    return _transforms.has_bytes(train.inputs), _transforms.flat_bytes(train.inputs)


def _try(splits: dict[str, Examples]) -> None:
    """Try two examples of each split that is read or augmented later, so that errors show early; random states are kept."""
    with torch.random.fork_rng(devices=[]):
        for name, examples in splits.items():
            if isinstance(examples, FromDataset) or (name == "train" and getattr(examples, "augment", None) is not None):
                two = examples.subset(torch.arange(min(2, len(examples))))
                next(iter(two.batches(2, shuffle=0 if name == "train" else None)))


def preprocess(inputs: Any, preprocessing: Mapping[str, Any], *, trust_code: bool = False) -> Any:
    """Turn inputs as they were read (images as bytes, table columns as numbers) into what the model takes, as in training.

    trust_code: whether transforms that are Python functions may run; if `preprocessing` comes from a file, its author
    chose them. If False, such a transform raises TrustError.
    """
    transform = _transforms.build(preprocessing.get("transform", ()), "data.transform", trust_code=trust_code)
    inputs = map_tensors(inputs, _transforms.as_float)
    return transform(inputs) if transform else inputs


def _read(section: DataSection, task: str) -> Raw:
    name = section.name
    kinds = ", ".join([*READERS, "csv:FILE", "parquet:FILE", "package.module:factory"])
    if not name:
        raise DataError(f"data: no data source is named; use one of {kinds}")
    kind, _, place = name.partition(":")
    if kind in ("csv", "parquet"):
        return read_table(place, section, kind, task)
    if kind in READERS:
        if not place and kind in ("npz", "imagefolder", "hf"):
            raise DataError(f"data.name: {kind} needs a place, as in {kind}:PATH")
        return read_hub(place, section, task) if kind == "hf" else READERS[kind](place, section)
    if is_python_name(name):
        return read_factory(name, section)
    how = f"use one of {kinds}"
    if name.endswith((".pt", ".pth", ".pkl")):
        how = "save it as npz, with arrays x and y (npz:FILE), or write a function that returns its data: --data ./data.py:make"
    raise DataError(f"data.name: unknown source {name!r}; {how}")


def _limited(table: Table, section: DataSection) -> Table:
    if section.limit is None or len(table) <= section.limit:
        return table
    first, labels = torch.arange(section.limit), table.targets
    plain = not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dim() > 1
    if section.split == "tail" or plain or len(labels[first].unique()) == len(labels.unique()):
        return part(table, first)
    # Drawn at random if the first ones lack classes, as when the data are sorted by class.
    drawn = torch.randperm(len(table), generator=torch.Generator().manual_seed(section.split_seed))[: section.limit]
    return part(table, drawn.sort().values)


def _checked(table: Table, task: str, split: str) -> Table:
    """The table, checked and its targets converted; data that are read as needed are checked batch by batch later (`Check`)."""
    if table.dataset is not None:
        return table
    if not len(table.targets):
        raise DataError(f"data: {table.origin}: no examples ({split})")
    check = Check(task, table.origin, split)
    targets = check.targets(table.targets)
    check.inputs(table.inputs)
    inputs = map_tensors(table.inputs, lambda tensor: tensor.detach())  # features that a network made may have a graph
    return Table(table.origin, inputs, targets.detach())


def _outputs(tables: dict[str, Table], task: str, classes: list[str] | None) -> tuple[int, list[str] | None]:
    targets = tables["train"].targets
    if task == "binary":
        return 1 if targets is None or targets.dim() == 1 else targets.shape[1], classes
    if task != "classification":
        return 1 if targets is None or targets.dim() == 1 else targets.shape[1], None
    if targets is None:
        return len(classes) if classes else 0, classes
    held = [int(table.targets.max()) for table in tables.values() if table.targets is not None]
    count = len(classes) if classes else max(*held, 0) + 1
    for split, table in tables.items():
        if table.targets is not None:
            Check(task, table.origin, split, count).targets(table.targets)
    return count, classes


def check_labels(data: Data, outputs: int, hint: str = "") -> None:
    """Raises DataError, naming split and row, if a label does not fit a model with `outputs` outputs; hint: what to do then.

    Labels that are read as needed are checked against `outputs` from here on, batch by batch.
    """
    if data.task != "classification":
        return
    splits = {split: getattr(data, split) for split in ("train", "validation", "test")}
    held = [part.targets for part in splits.values() if isinstance(getattr(part, "targets", None), Tensor)]
    hint = f", and {FROM_ONE}" if from_one(held, outputs) else hint
    why = f": the model has {outputs} output{'s' * (outputs != 1)}{hint}"
    for split, examples in splits.items():
        if isinstance(examples, FromDataset):
            if examples.check is not None:
                examples.check.outputs, examples.check.why = outputs, why
            continue
        targets = getattr(examples, "targets", None)
        if targets is not None and int(targets.max()) >= outputs:
            where = (targets >= outputs).nonzero()[0]
            marked = f"; a position that does not count has the class {IGNORED}" if targets.dim() > 1 else ""
            raise DataError(
                f"data.target: label {int(targets[tuple(where)])} in row {int(where[0])} ({split}) is out of range "
                f"0 to {outputs - 1}{why}{marked}"
            )


def _target_scale(table: Table, section: DataSection, task: str, standardized: bool) -> tuple[float, float] | None:
    if not _standard.scales_target(section, task, standardized):
        return None
    if table.targets is None:
        raise DataError("data.target_scale: the targets are not in memory; scale them in your dataset")
    std = float(table.targets.double().std()) if table.targets.numel() > 1 else 0.0
    return float(table.targets.double().mean()), std if std > 0 else 1.0


def _fit(section: DataSection, train: Table, preprocessing: Mapping[str, Any], standardized: bool) -> list[Any]:
    specs: list[Any] = [dict(spec) if isinstance(spec, Mapping) else spec for spec in section.transform]
    if standardized and _standard.is_table(preprocessing, train.inputs):
        specs.insert(0, {"normalize": _standard.column_statistics(train.inputs, preprocessing)})
    elif standardized:
        specs.insert(0, "standardize")
    if "standardize" not in specs:
        return specs
    if train.dataset is not None:
        raise DataError("data.transform: standardize needs data in memory; write normalize with mean and std")
    return _transforms.fit(specs, map_tensors(train.inputs, _transforms.as_float))


def _examples(table: Table, fitted: list[Any], augment: Any, scale: tuple[float, float] | None, check: Check) -> Examples:
    if table.dataset is not None:
        settings = {"transform": fitted}
        return FromDataset(
            table.dataset,
            collate=table.collate,
            workers=table.workers,
            transform=lambda inputs: preprocess(inputs, settings, trust_code=True),
            augment=augment,
            indices=table.rows,
            check=check,
        )
    inputs = preprocess(table.inputs, {"transform": fitted}, trust_code=True)
    targets = table.targets if scale is None else (table.targets - scale[0]) / scale[1]
    return InMemory(inputs, targets, augment)
