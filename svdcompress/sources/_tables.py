"""Tables: CSV and Parquet files, one example per row, one column to predict."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from svdcompress.errors import DataError, shortened
from svdcompress.recipe import DataSection
from svdcompress.sources._categories import HOW, commas, note, with_comma
from svdcompress.sources._raw import Raw, Table, encode_classes, optional
from svdcompress.sources._text import tokens

MOST_CATEGORIES = 100
"""A text column with more distinct values is refused: it is an identifier or free text, not a category."""

LOST = 1e-3
"""There is a warning about a column that float32 rounds by more than this share of its standard deviation."""


def read_table(place: str, section: DataSection, kind: str, task: str) -> Raw:
    """`csv:FILE` or `parquet:FILE`: numeric columns as they are, text columns one-hot by their values in the training data.

    data.target: a column, or several with commas between them to predict them all (not for classification).
    data.args with a `tokenizer` (folder or id): one column of text for a language model instead (see `_text`).
    """
    frame = open_frame(Path(place), kind)
    texts = [column for column in frame.columns if not _is_number(frame[column])]
    target = section.target
    if target is None:
        raise DataError(
            f"data.target: name the column to predict with --target; {place} has {', '.join(map(str, frame.columns))}"
        )
    targets = [target] if target in frame.columns else [name.strip() for name in target.split(",")]
    features = section.features or [column for column in frame.columns if column not in targets]
    for field, columns in (("data.target", targets), ("data.features", features)):
        for column in columns:
            if column not in frame.columns:
                raise DataError(f"{field}: {place} has no column {column!r}; it has {', '.join(map(str, frame.columns))}")
    text = _text_settings(frame, features, section, place)
    for field, columns in (("data.features", features), ("data.args.text", [text["text"]] if text else [])):
        if given := [column for column in columns if column in targets]:
            raise DataError(f"{field}: {given[0]!r} is the target: a model that is given it has nothing to predict")
    if text:
        features = [text["text"]]
    categories = {} if text else _categories(frame, features, place)
    classes: list[str] | None = None
    said = commas(categories, place)
    notes = note(categories, place)
    wanted, classes = _targets(frame, targets, None, task, place, said)
    preprocessing: dict[str, Any] = {
        "columns": features,
        "categories": categories,
        "target": target if len(targets) == 1 else targets,
        **text,
    }
    train = Table(place, frame_inputs(frame, preprocessing, place, said), wanted)
    if section.test is None:
        return Raw(train, classes=classes, preprocessing=preprocessing, warnings=said, notes=notes)
    test_place = section.test.partition(":")[2] or section.test
    test_frame = open_frame(Path(test_place), "parquet" if test_place.endswith(".parquet") else "csv", "data.test", texts)
    for column in targets:
        if column not in test_frame.columns:
            raise DataError(f"data.test: {test_place} has no column {column!r}")
    test = Table(test_place)
    test.targets, _ = _targets(test_frame, targets, classes, task, test_place, test.warnings)
    test.inputs = frame_inputs(test_frame, preprocessing, test_place, test.warnings)
    return Raw(train, test, classes=classes, preprocessing=preprocessing, warnings=said, notes=notes)


def _targets(
    frame: Any, columns: list[str], classes: list[str] | None, task: str, place: str, said: list[str] | None = None
) -> tuple[Tensor, list[str] | None]:
    """One column as (N,), with the classes' names if it holds classes; several as numbers (N, columns). said: gets warnings."""

    def numbers(column: str) -> Tensor:
        values = _numbers(frame[column], place, "data.target")
        if said is not None:
            said.extend(crowded(column, values, "data.target"))
        return values.float()

    if len(columns) > 1:
        if task == "classification":
            names = ", ".join(columns)
            raise DataError(
                f"data.target: {names}: several columns need mse, gaussian-nll or binary; classes must be in one column"
            )
        return torch.stack([numbers(column) for column in columns], 1), None
    if task in ("classification", "binary"):
        return _classes(frame[columns[0]], classes, place)
    return numbers(columns[0]), None


def _separated(path: Path) -> str:
    """What to do about a file whose header has another separator, as commas in its numbers make rows of different lengths."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            header = file.readline()
    except OSError:  # that is what went wrong
        return ""
    mark = _other_mark([header]) if "," not in header else None
    return f"; apparently separated by {mark!r}: use commas, and points in numbers" if mark else ""


def _other_mark(names: list[str]) -> str | None:
    """The separator that a table's only column suggests, if it is no comma."""
    return next((mark for mark in (";", "\t", "|") if len(names) == 1 and mark in names[0]), None)


def text_columns(preprocessing: dict[str, Any]) -> list[str]:
    """The input columns that were text in training."""
    return [preprocessing["text"]] if preprocessing.get("tokenizer") else list(preprocessing.get("categories", {}))


def open_frame(path: Path, kind: str, field: str = "data.name", texts: Sequence[str] = ()) -> Any:
    """A CSV or Parquet file as a pandas DataFrame. Raises DataError, naming `field`, if it is missing, empty or damaged.

    texts: columns that are text whatever this file holds: where all values look like numbers, pandas would take 01 for 1.
    """
    pandas = optional("pandas", "pandas", f"data: {kind}:")
    if not os.path.isfile(path):
        raise DataError(f"{field}: {path}: no such file")
    try:
        if kind == "parquet":
            optional("pyarrow", "pyarrow", "data: parquet:")
            frame = pandas.read_parquet(path)
        else:
            # low_memory: each part of a long file would have types of its own, and 01 be 1 in those without other texts
            frame = pandas.read_csv(path, dtype=dict.fromkeys(texts, str), low_memory=False)
    except DataError:
        raise
    except Exception as error:  # pandas and pyarrow raise many kinds of errors
        reason = shortened((str(error).splitlines() or [type(error).__name__])[0])
        more = "; save it as UTF-8" if isinstance(error, UnicodeDecodeError) else _separated(path) if kind == "csv" else ""
        raise DataError(f"data: {path}: not a readable {kind} file ({reason}){more}") from error
    if not len(frame):
        raise DataError(f"data: {path}: no rows")
    if kind == "csv":
        try:  # the header as a row: pandas takes a longer row's first fields for its name, and shifts all columns
            pandas.read_csv(path, header=None, nrows=2, dtype=str)
        except pandas.errors.ParserError:
            names = ", ".join(map(str, frame.columns[:6]))
            raise DataError(
                f"data: {path}: rows have more fields than the header has columns ({names}): name those at the beginning (row "
                "names) or remove those at the end (a comma after the last)"
            ) from None
    return frame


def frame_inputs(frame: Any, preprocessing: dict[str, Any], place: str, said: list[str] | None = None) -> Any:
    """The columns of a table as float32 (N, features), categories one-hot, in the order that training used.

    For a table with text, the output of the tokenizer: a dict of tensors (N, length). said: gets warnings.
    """
    if preprocessing.get("tokenizer"):
        column = preprocessing["text"]
        if column not in frame.columns:
            raise DataError(f"data.args.text: {place} has no column {column!r}; it has {', '.join(map(str, frame.columns))}")
        _no_gaps(frame[column], place, "data.args.text")
        return tokens([str(value) for value in frame[column]], preprocessing, place, said)
    parts = []
    for column in preprocessing["columns"]:
        if column not in frame.columns:
            raise DataError(f"data.features: {place} has no column {column!r}; it has {_columns(frame)}")
        names = preprocessing["categories"].get(column)
        if names is None:
            values = _numbers(frame[column], place, "data.features")
            if said is not None:
                said += crowded(column, values, "data.features")
            parts.append(values.float().unsqueeze(1))
            continue
        _no_gaps(frame[column], place, "data.features")
        index = {name: position for position, name in enumerate(names)}
        hot = torch.zeros(len(frame), len(names))
        for row, value in enumerate(frame[column].astype(str)):
            if value not in index:
                known = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
                raise DataError(
                    f"data.features: {place}: column {column!r}, row {row}: {value!r} does not occur in training ({known} do); "
                    "leave such rows out, or train with some"
                )
            hot[row, index[value]] = 1
        parts.append(hot)
    return torch.cat(parts, 1)


def _columns(frame: Any) -> str:
    """A table's columns for a message, with a hint if its only column suggests another separator."""
    names = [str(column) for column in frame.columns]
    mark = _other_mark(names)
    return ", ".join(names[:20]) + (f", apparently separated by {mark!r}: use commas" if mark else "")


def _text_settings(frame: Any, features: list[str], section: DataSection, place: str) -> dict[str, Any]:
    """Tokenizer, length and column of a table with text; {} if no tokenizer is named."""
    if not section.args.get("tokenizer"):
        return {}
    texts = [column for column in features if not _is_number(frame[column])]
    column = section.args.get("text") or (texts[0] if len(texts) == 1 else None)
    if column is None:
        raise DataError(
            f"data.args.text: {place} has {len(texts)} columns of text ({', '.join(texts[:8])}); name the one for the model "
            "(--data-arg text=COLUMN)"
        )
    return {**section.args, "text": column}


def _is_number(series: Any) -> bool:
    return series.dtype.kind in "fiub"


def _categories(frame: Any, features: list[str], place: str) -> dict[str, list[str]]:
    found = {}
    for column in features:
        series = frame[column]
        _no_gaps(series, place, "data.features")
        if not _is_number(series):
            names = sorted(series.astype(str).unique())
            if len(names) > MOST_CATEGORIES:
                how = (
                    "; leave it out (data.features lists the columns to use), or, for a language model, name its tokenizer "
                    "(--data-arg tokenizer=FOLDER)"
                )
                if comma := with_comma(names):
                    how = f", which look like numbers with a comma ({comma}): {HOW}"
                raise DataError(f"data.features: {place}: column {column!r} is text with {len(names)} distinct values{how}")
            found[column] = names
    return found


def _no_gaps(series: Any, place: str, field: str) -> None:
    gaps = series.isna().to_numpy()
    if gaps.any():
        count = int(gaps.sum())
        raise DataError(
            f"{field}: {place}: column {series.name!r}: no value (NaN) in row {int(gaps.argmax())} ({count} such rows; an "
            "empty cell, or a text such as NA, None or null): fill it, or leave the row out"
        )


def _numbers(series: Any, place: str, field: str) -> Tensor:
    _no_gaps(series, place, field)
    if not _is_number(series):
        pandas = optional("pandas", "pandas", "data: tables")
        row = int(pandas.to_numeric(series, errors="coerce").isna().to_numpy().argmax())
        how = f"; {HOW}" if with_comma(series.astype(str).unique()) else ""
        raise DataError(f"{field}: {place}: column {series.name!r} holds {series.iloc[row]!r} in row {row}, not numbers{how}")
    values = series.to_numpy().astype(np.float64)
    if not np.isfinite(values).all():
        raise DataError(f"{field}: {place}: column {series.name!r}: infinite in row {int((~np.isfinite(values)).argmax())}")
    huge = np.abs(values) > np.finfo(np.float32).max
    if huge.any():
        row = int(huge.argmax())
        raise DataError(
            f"{field}: {place}: column {series.name!r}: {values[row]} in row {row} overflows float32, which networks use"
        )
    return torch.from_numpy(values)


def crowded(column: str, values: Tensor, field: str) -> list[str]:
    """A warning about a column whose differences are lost in float32, such as seconds since 1970."""
    if values.max() == values.min():  # nothing to lose
        return []
    lost = (values.float().double() - values).abs().max()
    if float(lost) <= LOST * float(values.std(correction=0)):
        return []
    return [
        f"{field}: column {column!r}: of {len(values.unique()):,} different values {len(values.float().unique()):,} are left "
        f"in float32, which networks and their files use, because values reach {float(values.abs().max()):.3g}; subtract a "
        "common offset in the table"
    ]


def _classes(series: Any, known: list[str] | None, place: str) -> tuple[Tensor, list[str]]:
    _no_gaps(series, place, "data.target")
    if series.dtype.kind == "f":
        values = series.to_numpy()
        broken = ~((values == np.floor(values)) & (np.abs(values) < 2**53))
        if broken.any():
            row = int(broken.argmax())
            raise DataError(
                f"data.target: {place}: column {series.name!r} holds {values[row]} in row {row}, which is not a class; for a "
                "regression, use --loss mse (or gaussian-nll)"
            )
        series = series.astype(int)
    if known is None and series.dtype.kind in "iu":
        known = [str(value) for value in sorted(series.unique())]  # by value: 2 before 10
    return encode_classes(series.tolist(), known, f"data.target: {place}")
