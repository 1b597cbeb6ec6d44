"""Hugging Face datasets: a folder saved with `save_to_disk`, or a name on the hub."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch

from svdcompress.errors import DataError
from svdcompress.recipe import DataSection
from svdcompress.sources._examples import LABEL_KEYS
from svdcompress.sources._images import pixels, stacked
from svdcompress.sources._names import check_folder
from svdcompress.sources._raw import Raw, Table, encode_classes, optional
from svdcompress.sources._tables import crowded
from svdcompress.sources._text import ARGS, tokens

SPLITS = {"train": ("train",), "validation": ("validation", "valid", "val", "dev"), "test": ("test",)}
"""Names under which each split may be stored."""


def read_hub(place: str, section: DataSection, task: str = "classification") -> Raw:
    """`hf:NAME_OR_DIR`: images, text or numbers, and a label column (`data.target`, else one of the usual names).

    The columns that are read of train, and the names of its classes, hold for all splits.

    data.args: `tokenizer` (folder or id, for text), `max_length`, `text` (column); the rest goes to `load_dataset`.
    """
    check_folder(place, DataError, "data.name: hf")
    datasets = optional("datasets", "datasets", f"data: hf:{place}")
    args = dict(section.args)
    own = {key: args.pop(key, None) for key in ARGS}
    try:
        found = datasets.load_from_disk(place) if os.path.isdir(place) else datasets.load_dataset(place, **args)
    except Exception as error:  # datasets raises many kinds of errors
        raise DataError(f"data.name: hf:{place}: {type(error).__name__}: {str(error).splitlines()[0]}") from error
    splits = {name: split.with_format(None) for name, split in (found if isinstance(found, dict) else {"train": found}).items()}
    if "train" not in splits:
        raise DataError(f"data.name: hf:{place} has no split named train; it has {', '.join(splits)}")
    label = _target(splits["train"], f"hf:{place} (train)", section)
    columns = section.features or [name for name in splits["train"].column_names if name != label]
    section = section.model_copy(update={"target": label, "features": columns})
    classes: list[str] | None = None
    tables, prepared, read = {}, {}, columns
    named = {split: next((name for name in names if name in splits), None) for split, names in SPLITS.items()}
    for split, name in named.items():  # train comes first
        if name is not None:
            section = section.model_copy(update={"features": read})
            tables[split], classes, found = _table(splits[name], f"hf:{place} ({name})", section, own, classes, task)
            if task not in ("regression", "gaussian"):
                _same_labels(splits["train"], splits[name], f"hf:{place} ({name})", label)
            prepared, alone = prepared or found, next(filter(None, _image_or_text(splits["train"][0], columns, own)), None)
            read = columns if alone is None else [alone]  # those beside images or text may be absent elsewhere
    warnings = list(tables["train"].warnings)  # those of the other splits would say the same
    others = [name for name in splits if name not in named.values()]
    if others and None in named.values():  # otherwise a run has no use for them
        absent = " and ".join(split for split, name in named.items() if name is None)
        instead = "" if section.validation == section.name else f"; {absent} data are held out of train"
        warnings.append(f"hf:{place}: the splits {', '.join(others)} are not read{instead}")
    return Raw(tables["train"], tables.get("test"), tables.get("validation"), classes, prepared, warnings, columns=read)


def _image_or_text(first: dict[str, Any], columns: list[str], own: dict[str, Any]) -> tuple[str | None, str | None]:
    """The column of images and that of text, where there is one. first: an example."""
    image = next((name for name in columns if hasattr(first[name], "convert")), None)
    return image, own["text"] or next((name for name in columns if isinstance(first[name], str)), None)


def _same_labels(train: Any, split: Any, origin: str, label: str) -> None:
    """Raises DataError for names in one split and numbers without names in the other: which is which cannot be known."""
    for one, other in ((train, split), (split, train)):
        if (
            isinstance(one[0][label], str)
            and not isinstance(other[0][label], str)
            and not getattr(other.features[label], "names", None)
        ):
            raise DataError(
                f"data.target: {origin}: column {label!r} holds {split[0][label]!r:.40}, and {train[0][label]!r:.40} in train; "
                "make both names or both numbers"
            )


def _target(split: Any, origin: str, section: DataSection) -> str:
    label = section.target or next((name for name in LABEL_KEYS if name in split.column_names), None)
    if label is None or label not in split.column_names:
        raise DataError(f"data.target: {origin} has the columns {', '.join(split.column_names)}; name the one to predict")
    return label


def _table(
    split: Any, origin: str, section: DataSection, own: dict[str, Any], classes: list[str] | None, task: str
) -> tuple[Table, list[str] | None, dict[str, Any]]:
    """A split's examples, its classes, and what is needed to read more examples in the same way, also from files.

    section: names the target and all other columns. classes: those of train.
    """
    if not len(split):
        raise DataError(f"data: {origin}: no examples")
    label = _target(split, origin, section)
    said: list[str] = []
    targets, classes = _labels(split, label, origin, classes, task, said)
    columns = section.features or []
    if not columns:
        raise DataError(f"data.features: {origin} has no column but {label!r}, which is the target")
    if label in columns:
        raise DataError(f"data.features: {label!r} is the target: a model that is given it has nothing to predict")
    for field, wanted in (("data.features", columns), ("data.args.text", [own["text"]] if own["text"] else [])):
        absent = [name for name in wanted if name not in split.column_names]
        if absent:
            raise DataError(f"{field}: {origin} has no column {absent[0]!r}; it has {', '.join(split.column_names)}")
    image, text = _image_or_text(split[0], columns, own)
    if section.image_size and image is None:
        raise DataError(f"data.image_size: {origin} has no column of images among {', '.join(columns)}")
    if own["tokenizer"] and (image is not None or text is None):
        raise DataError(f"data.args.tokenizer: {origin} is not read as text; name the text column in data.features")
    if image is not None or text is not None:
        read = image if image is not None else text
        if left := [name for name in columns if name != read]:
            said.append(f"data.features: {origin}: of the columns only {read} is read, not {', '.join(left)}")
    if image is not None:
        size = list(section.image_size) if section.image_size else None
        return Table(origin, _images(split[image], section, origin), targets, warnings=said), classes, {"image_size": size}
    prepared = {"columns": columns, "categories": {}, "target": label}
    if text is not None:
        texts = _values(split, text, origin, "data.args.text")
        settings = {key: value for key, value in own.items() if value is not None}
        prepared = {**prepared, **settings, "columns": [text], "text": text}
        encoded = tokens([str(value) for value in texts], own, origin, said)
        return Table(origin, encoded, targets, warnings=said), classes, prepared
    arrays = [_numbers(split, name, origin, said) for name in columns]
    inputs = torch.cat([array.reshape(len(array), -1) for array in arrays], 1)
    single = all(array.dim() == 1 for array in arrays)  # no table has a column of lists
    return Table(origin, inputs, targets, warnings=said), classes, prepared if single else {}


def _values(split: Any, column: str, origin: str, field: str) -> list[Any]:
    values = list(split[column])
    row = next((row for row, value in enumerate(values) if value is None), None)
    if row is not None:
        raise DataError(f"{field}: {origin}: column {column!r}: no value in row {row}")
    return values


def _labels(
    split: Any, label: str, origin: str, classes: list[str] | None, task: str, said: list[str]
) -> tuple[torch.Tensor, list[str] | None]:
    """Targets and the names of classes. classes: those of train, which give the numbers in all splits."""
    values = _values(split, label, origin, "data.target")
    names = getattr(split.features[label], "names", None)
    field = f"data.target: {origin}"
    if task in ("regression", "gaussian"):
        if not isinstance(values[0], list | str | int | float):
            raise DataError(f"{field}: column {label!r} holds {values[0]!r:.40}, not numbers or names")
        return _float32(values, label, field, said), None
    if isinstance(values[0], str):
        return encode_classes(values, classes, field)
    if names and classes and list(names) != classes and values:
        known = [names[value] if 0 <= value < len(names) else None for value in values]  # -1: unknown
        if None in known:
            row = known.index(None)
            raise DataError(f"{field}: column {label!r} holds {values[row]} in row {row}, which is not a class")
        return encode_classes(known, classes, field)
    try:
        return torch.tensor(values), list(names) if names else classes
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{field}: column {label!r} holds {values[0]!r:.40}, not numbers or names") from error


def _numbers(split: Any, column: str, origin: str, said: list[str]) -> torch.Tensor:
    return _float32(_values(split, column, origin, "data.features"), column, f"data.features: {origin}", said)


def _float32(values: list[Any], column: str, field: str, said: list[str]) -> torch.Tensor:
    """Numbers, or lists of them. said: gets a warning if float32 loses their differences."""
    try:
        numbers = torch.as_tensor(np.asarray(values, dtype=np.float64))
    except (TypeError, ValueError) as error:
        raise DataError(f"{field}: column {column!r} is not an array of numbers ({error})") from error
    if numbers.dim() == 1 and bool(numbers.isfinite().all()):
        said += crowded(column, numbers, field)
    return numbers.float()


def _images(images: Any, section: DataSection, origin: str) -> torch.Tensor:
    tensors = []
    for row, image in enumerate(images):
        if image is None:
            raise DataError(f"data.features: {origin}: no image in row {row}")
        try:
            tensors.append(pixels(image, section.image_size))
        except DataError as error:
            raise DataError(f"data.features: {origin}: the image in row {row}: {error}") from None
    return stacked(tensors, [f"{origin}, row {row}" for row in range(len(tensors))])
