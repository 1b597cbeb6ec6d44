"""Writing predictions as CSV, Parquet or npz."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from svdcompress.errors import DependencyError, UsageError
from svdcompress.likelihoods import likelihood_for
from svdcompress.train import write_atomically

SUFFIXES = (".csv", ".parquet", ".npz")

MOST_ROWS = 1_000_000
"""Maximum number of rows in a table that has a row for each position (pixel, token) of each input."""

MOST_COLUMNS = 100
"""Maximum number of classes for which a table has columns for each class; npz always has them all."""

PER_INPUT = ("answered", "entropy", "expected_entropy", "mutual_information")


def write_predictions(
    path: str | Path,
    arrays: Mapping[str, np.ndarray],
    names: Sequence[str],
    task: str,
    classes: Sequence[str] | None = None,
    dim: int = 1,
) -> Path:
    """Write predictions to a .csv, .parquet or .npz file; returns its path.

    arrays: by name, as `Prediction.numpy` returns them, batch first. names: of the inputs. classes: names of the classes.
    dim: the dimension of the classes.

    A table has one row for each input: `name`; for classification `label`, `confidence`, the entropies, and for up to 100
    classes `mean_CLASS`, `variance_CLASS`, ...; otherwise `mean`, `std` and the rest, numbered if there are several. For a
    binary probability, `std` is the standard deviation over the draws; ONNX files without `epistemic` do not give it, and
    there is no `std` then.

    Predictions for each pixel or token have a row for each of these, with its indices as `position`.

    Raises UsageError for another suffix and for a table of too many positions, DependencyError if the package for Parquet is
    missing, OutputError for a path that cannot be written.
    """
    path = Path(path)
    check_suffix(path)
    if path.suffix == ".npz":
        stored: dict[str, Any] = {**arrays, "name": np.asarray(names)}
        if classes is not None:
            stored["classes"] = np.asarray(classes)
        write_atomically(path, lambda place: _npz(place, stored))
        return path
    table = columns(arrays, names, task, classes, dim)
    if path.suffix == ".csv":
        write_atomically(path, lambda place: _csv(place, table, task))
    else:
        write_atomically(path, lambda place: _parquet(place, table))
    return path


def check_suffix(path: Path) -> None:
    """Raises UsageError unless the path ends in .csv, .parquet or .npz."""
    if path.suffix not in SUFFIXES:
        raise UsageError(f"{path}: predictions are written as {', '.join(SUFFIXES)}, not as {path.suffix or 'a bare name'!r}")


def columns(
    arrays: Mapping[str, np.ndarray],
    names: Sequence[str],
    task: str,
    classes: Sequence[str] | None = None,
    dim: int = 1,
) -> dict[str, Sequence[Any]]:
    """The columns of a table of predictions, by name; dim: the dimension of the classes.

    Predictions for each pixel or token have a row for each of these, with its indices as `position`.
    """
    likelihood = likelihood_for(task)
    arrays, names, places = _by_position(arrays, names, task, dim)
    flat = {name: array.reshape(len(names), -1) for name, array in arrays.items()}
    mean = flat["mean"]
    table: dict[str, Any] = {"name": list(names)}
    if places:
        table["position"] = places
    if likelihood.classes:
        labels = [str(k) for k in range(mean.shape[1])] if classes is None else [str(name) for name in classes]
        if len(set(labels)) != mean.shape[1]:  # for example, names that occur twice
            labels = [str(k) for k in range(mean.shape[1])]
        table["label"] = [labels[k] for k in mean.argmax(1)]
        table["confidence"] = mean.max(1)
        table.update({name: flat.pop(name)[:, 0] for name in PER_INPUT if name in flat})
        if "set" in flat:
            table["set"] = ["|".join(labels[k] for k in row.nonzero()[0]) for row in flat.pop("set")]
    else:
        labels = [str(k) for k in range(mean.shape[1])]
        if likelihood.std_of in flat:  # an ONNX file may lack it
            flat["std"] = np.sqrt(flat[likelihood.std_of])
    if likelihood.classes and mean.shape[1] > MOST_COLUMNS:
        return table
    for name, values in flat.items():
        for k in range(values.shape[1]):
            table[name if values.shape[1] == 1 else f"{name}_{labels[k]}"] = values[:, k]
    return table


def _by_position(
    arrays: Mapping[str, np.ndarray], names: Sequence[str], task: str, dim: int
) -> tuple[Mapping[str, np.ndarray], Sequence[str], list[str]]:
    """Arrays with a row for each position of each input, names to match, and the positions; unchanged without positions.

    Raises UsageError for more rows than a table may have.
    """
    mean = arrays["mean"]
    if mean.ndim < 3:
        return arrays, names, []
    of_classes = likelihood_for(task).classes
    shape = np.moveaxis(mean, dim, -1).shape[1:-1] if of_classes else mean.shape[1:]
    count = int(np.prod(shape))
    if len(names) * count > MOST_ROWS:
        raise UsageError(
            f"predictions for {count:,} positions of {len(names):,} inputs are too many for a table; write them as .npz"
        )
    seen = [axis for axis, size in enumerate(shape) if size > 1]  # (N, 1, H, W) has only rows and columns
    places = [",".join(str(index[axis]) for axis in seen) for index in np.ndindex(*shape)]
    rows = {}
    for name, array in arrays.items():
        whole = np.moveaxis(array, dim, -1) if of_classes and array.ndim == mean.ndim else array
        rows[name] = whole.reshape(len(names) * count, -1)
    return rows, [name for name in names for _ in range(count)], places * len(names)


def _csv(path: Path, table: Mapping[str, Sequence[Any]], task: str) -> None:
    exact = not likelihood_for(task).probabilities  # nine digits are enough for probabilities
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(table)
        for row in zip(*table.values(), strict=True):
            writer.writerow([_digits(value, exact) if isinstance(value, float | np.floating) else value for value in row])


def _digits(value: float | np.floating, exact: bool) -> str:
    """A number as text. exact: with as many digits as it takes to read it back unchanged, as large targets may differ in the
    last digits only."""
    return str(float(value)) if exact and np.dtype(type(value)) == np.float64 else f"{value:.9g}"


def _parquet(path: Path, table: Mapping[str, Sequence[Any]]) -> None:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise DependencyError("Parquet files need the package pyarrow: pip install pyarrow, or write .csv or .npz") from error
    parquet.write_table(pyarrow.table({name: pyarrow.array(values) for name, values in table.items()}), path)


def _npz(path: Path, arrays: Mapping[str, Any]) -> None:
    with path.open("wb") as file:
        np.savez_compressed(file, **arrays)
