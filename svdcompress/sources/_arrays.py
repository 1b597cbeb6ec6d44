"""Arrays: scikit-learn's digits, IDX files (MNIST), npz files, and factories of the user's."""

from __future__ import annotations

import gzip
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from svdcompress.errors import DataError
from svdcompress.recipe import DataSection
from svdcompress.sources._names import import_name
from svdcompress.sources._raw import Raw, Table, optional

MNIST_ENV = "SVDC_MNIST"
_IDX_NAMES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
_IDX_TYPES = {8: ">u1", 9: ">i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}


def read_digits(place: str, section: DataSection) -> Raw:
    """scikit-learn's 1,797 scanned digits: (N, 1, 8, 8) in [0, 1], ten classes."""
    datasets = optional("sklearn.datasets", "scikit-learn", "data: digits")
    bunch = datasets.load_digits()
    inputs = torch.from_numpy(bunch.images).float().div_(16).unsqueeze(1)
    table = Table("digits", inputs, torch.from_numpy(bunch.target).long())
    return Raw(table, classes=[str(digit) for digit in range(10)])


def read_idx(place: str, section: DataSection) -> Raw:
    """MNIST and its kin as IDX files, gzipped or not, in a folder or torchvision's `MNIST/raw` in it: (N, 1, H, W) bytes."""
    root = place or section.root or os.environ.get(MNIST_ENV, "")
    tried = [Path(root)] if root else [Path("data/mnist"), Path("data/MNIST"), Path.home() / ".cache/mnist"]
    folder = next((f for base in tried for f in (base, base / "raw", base / "MNIST" / "raw") if _idx_file(f, "train", 0)), None)
    if folder is None:
        names = f"{_IDX_NAMES['train'][0]}[.gz]"
        raise DataError(
            f"data.name: no IDX files ({names} and the other three) in {', '.join(map(str, tried))}. "
            f"Name the folder: --data mnist:DIR, data.root, or the variable {MNIST_ENV}; the README says where MNIST comes from"
        )
    tables = {}
    for split in ("train", "test"):
        files: list[Any] = [_idx_file(folder, split, part) for part in (0, 1)]
        if None in files:
            raise DataError(f"data.name: {folder} lacks {_IDX_NAMES[split][files.index(None)]}[.gz]")
        images, labels = (read_idx_file(file) for file in files)
        if len(images) != len(labels):
            raise DataError(f"data: {files[0]} has {len(images)} images, {files[1]} {len(labels)} labels")
        tables[split] = Table(str(files[0]), images.unsqueeze(1), labels.long())
    return Raw(tables["train"], tables["test"], classes=[str(c) for c in range(int(tables["train"].targets.max()) + 1)])


def _idx_file(folder: Path, split: str, part: int) -> Path | None:
    name = _IDX_NAMES[split][part]
    candidates = (name, name + ".gz", name.replace("-idx", ".idx"))
    return next((folder / candidate for candidate in candidates if (folder / candidate).is_file()), None)


def read_idx_file(path: Path) -> Tensor:
    """An IDX file's array. Raises DataError if it is truncated or another kind of file."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            content = file.read()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"data: {path}: cannot be read, or truncated ({error})") from error
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in _IDX_TYPES or len(content) < 4 + 4 * content[3]:
        raise DataError(f"data: {path}: not an IDX file")
    dims = content[3]
    shape = struct.unpack(f">{dims}I", content[4 : 4 + 4 * dims])
    kind = np.dtype(_IDX_TYPES[content[2]])
    body = content[4 + 4 * dims :]
    if len(body) != int(np.prod(shape)) * kind.itemsize:
        raise DataError(f"data: {path}: truncated: {len(body)} bytes of data, but its header promises {np.prod(shape)} values")
    return torch.from_numpy(np.frombuffer(body, kind).reshape(shape).astype(kind.newbyteorder("=")))


def read_npz(place: str, section: DataSection) -> Raw:
    """An npz file with x (or inputs, images, x_train) and y (or targets, labels, y_train); x_test and y_test if it has them."""
    path = Path(place)
    if not path.is_file():
        raise DataError(f"data.name: {path}: no such file")
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, zlib.error, KeyError) as error:
        raise DataError(f"data: {path}: not an npz file of plain arrays ({error})") from error
    except Exception as error:  # zipfile's own errors are not of one family
        raise DataError(f"data: {path}: damaged ({error})") from error
    tables: dict[str, Table | None] = {}
    for split in ("train", "validation", "test"):
        x = next((arrays[name] for name in _npz_names("x", split) if name in arrays), None)
        y = next((arrays[name] for name in _npz_names("y", split) if name in arrays), None)
        if x is not None and y is not None and len(x) != len(y):
            raise DataError(f"data: {path}: {len(x)} inputs, but {len(y)} targets ({split})")
        tables[split] = None if x is None or y is None else Table(str(path), _tensor(x, path), _tensor(y, path))
    if tables["train"] is None:
        raise DataError(
            f"data: {path}: needs the arrays x and y (or x_train and y_train); it has {', '.join(arrays) or 'none'}"
        )
    return Raw(tables["train"], tables["test"], tables["validation"])


def _npz_names(kind: str, split: str) -> list[str]:
    names = {"x": ("x", "inputs", "images", "X", "data"), "y": ("y", "targets", "labels", "Y", "target")}[kind]
    split_names = [f"{name}_{split}" for name in names] + [f"{split}_{name}" for name in names]
    return split_names + list(names) if split == "train" else split_names


def _tensor(array: np.ndarray, path: Path) -> Tensor:
    if array.dtype.kind not in "fiub":
        raise DataError(f"data: {path}: an array of {array.dtype}; numbers are needed")
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        array = array.astype(np.int64)
    return torch.from_numpy(np.ascontiguousarray(array))


def read_factory(name: str, section: DataSection) -> Raw:
    """What `package.module:factory` makes: (train, test), (train, validation, test), a mapping of these names, or one dataset.

    Each is a Dataset with a length, a DataLoader (its dataset and collate function are taken), or an (inputs, targets) pair.
    """
    factory = import_name(name, DataError, "data.name")
    try:
        made = factory(**section.args) if callable(factory) else factory
    except Exception as error:  # whatever the user's factory raises
        raise DataError(f"data.name: {name} failed: {type(error).__name__}: {error}") from error
    if isinstance(made, dict):
        parts = {"validation" if key in ("val", "valid") else key: value for key, value in made.items()}
    elif isinstance(made, tuple | list) and not all(isinstance(part, Tensor | np.ndarray) for part in made):
        names = {1: ("train",), 2: ("train", "test"), 3: ("train", "validation", "test")}.get(len(made), ())
        parts = dict(zip(names, made, strict=True)) if names else {}
    else:
        parts = {"train": made}
    unknown = sorted(set(parts) - {"train", "validation", "test"})
    if "train" not in parts or unknown:
        raise DataError(
            f"data.name: {name} must return train, test or train, validation, test; it returned {type(made).__name__}"
        )
    tables = {key: _table(part, name, section) for key, part in parts.items() if part is not None}
    return Raw(tables["train"], tables.get("test"), tables.get("validation"))


def _table(part: Any, name: str, section: DataSection) -> Table:
    workers = section.workers or 0
    if isinstance(part, DataLoader):
        workers = part.num_workers if section.workers is None else workers
        return _dataset(part.dataset, name, part.collate_fn, workers)
    if isinstance(part, Dataset):
        tensors = getattr(part, "tensors", ())
        if len(tensors) == 2:  # a TensorDataset: index it whole
            return Table(name, *tensors)
        return _dataset(part, name, None, workers)
    if isinstance(part, tuple | list) and len(part) == 2:
        inputs, targets = part
        inputs = torch.as_tensor(inputs) if isinstance(inputs, np.ndarray) else inputs
        return Table(name, inputs, torch.as_tensor(targets))
    if hasattr(part, "__len__") and hasattr(part, "__getitem__"):
        return _dataset(part, name, None, workers)
    raise DataError(
        f"data.name: {name} returned a {type(part).__name__}; a Dataset, a DataLoader or (inputs, targets) is needed"
    )


def _dataset(dataset: Any, name: str, collate: Any, workers: int) -> Table:
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise DataError(f"data.name: {name}: {type(dataset).__name__} has no length; a map-style dataset is needed")
    return Table(name, dataset=dataset, collate=collate, workers=workers)
