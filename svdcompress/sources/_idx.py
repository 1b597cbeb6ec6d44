"""IDX files: MNIST and its kin."""

from __future__ import annotations

import gzip
import math
import os
import re
import struct
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from svdcompress.errors import DataError
from svdcompress.files import INFLATES
from svdcompress.recipe import DataSection
from svdcompress.sources._npy import enough_memory
from svdcompress.sources._raw import Raw, Table

MNIST_ENV = "SVDC_MNIST"

MOST_CLASSES = 1_000_000
"""Most classes that are accepted, as each gets a name in a list; data sets in this format have tens of classes."""

_NAME = re.compile(r"(?P<stem>.*?)(?P<split>train|t10k|test)-(?P<part>images|labels)[-.]idx[13]-ubyte(\.gz)?", re.IGNORECASE)
"""MNIST's names with anything before them: train-images-idx3-ubyte.gz, emnist-letters-test-labels-idx1-ubyte."""
_IDX_TYPES = {8: ">u1", 9: ">i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}

_Files = dict[tuple[str, str], Path]
"""The files of a data set, by split (train or test) and part (images or labels)."""


def read_idx(place: str, section: DataSection) -> Raw:
    """MNIST and its kin as IDX files, gzipped or not: (N, 1, H, W) bytes.

    The files are in the given folder, or in torchvision's `MNIST/raw` below it. If a folder holds several sets,
    `mnist:FOLDER/BEGINNING` names the one whose file names begin like that, as in `mnist:EMNIST/raw/emnist-letters`.
    """
    root = place or section.root or os.environ.get(MNIST_ENV, "")
    tried = [Path(root)] if root else [Path("data/mnist"), Path("data/MNIST"), Path.home() / ".cache/mnist"]
    files = _one_set(tried)
    tables = {}
    for split in ("train", "test"):
        images_file, labels_file = files[split, "images"], files[split, "labels"]
        images, labels = read_idx_file(images_file), read_idx_file(labels_file)
        if images.dim() != 3 or labels.dim() != 1:
            shapes = f"{tuple(images.shape)} and {tuple(labels.shape)}"
            raise DataError(f"data: {images_file} and its labels have the shapes {shapes}; (N, H, W) and (N,) are needed")
        if len(images) != len(labels):
            raise DataError(f"data: {images_file} has {len(images)} images, {labels_file} {len(labels)} labels")
        if not len(labels):
            raise DataError(f"data: {images_file}: no examples")
        if labels.is_floating_point():
            raise DataError(f"data: {labels_file}: labels of {labels.dtype}; whole numbers are needed")
        tables[split] = Table(str(images_file), images.unsqueeze(1), labels.long())
    labels = tables["train"].targets
    if int(labels.min()) < 0 or int(labels.max()) >= MOST_CLASSES:
        wrong = int(labels.max()) if int(labels.min()) >= 0 else int(labels.min())
        raise DataError(
            f"data: {files['train', 'labels']}: label {wrong}; labels start at 0, with at most {MOST_CLASSES:,} classes"
        )
    return Raw(tables["train"], tables["test"], classes=[str(c) for c in range(int(labels.max()) + 1)])


def _one_set(tried: list[Path]) -> _Files:
    """The data set's files in the first place that has any. Raises DataError for no set, several, or an incomplete one."""
    for base in tried:
        places = [(base, ""), (base / "raw", ""), (base / "MNIST" / "raw", "")]
        if not os.path.isdir(base):
            places = [(base.parent, base.name)]
        found = next((sets for folder, beginning in places if (sets := _sets(folder, beginning))), None)
        found = found or {key: files for folder in sorted(base.glob("*/raw")) for key, files in _sets(folder).items()}
        if len(found) > 1:
            names = ", ".join(map(str, sorted(found)))
            raise DataError(
                f"data.name: {base} holds {len(found)} data sets ({names}); name one of them by its folder and the beginning "
                f"of its files: --data mnist:{min(found)}"
            )
        if found:
            return _whole(next(iter(found.values())))
    raise DataError(
        "data.name: no IDX files (train-images-idx3-ubyte[.gz] and the other three) in "
        f"{', '.join(map(str, tried))}. Name their folder: --data mnist:DIR, data.root, or the variable {MNIST_ENV}. "
        "torchvision.datasets.MNIST('DIR', download=True) creates it (DIR/MNIST/raw)"
    )


def _sets(folder: Path, beginning: str = "") -> dict[Path, _Files]:
    """Files of each data set in a folder that has training images, by the folder joined with the beginning of their names."""
    found: dict[Path, _Files] = {}
    for path in sorted(folder.iterdir()) if os.path.isdir(folder) else ():  # plain files come before gzipped ones
        match = _NAME.fullmatch(path.name)
        if match and match["stem"].startswith(beginning) and os.path.isfile(path):
            split = "train" if match["split"].lower() == "train" else "test"
            found.setdefault(folder / match["stem"], {}).setdefault((split, match["part"].lower()), path)
    return {key: files for key, files in found.items() if ("train", "images") in files}


def _whole(files: _Files) -> _Files:
    """The given files. Raises DataError unless all four are there."""
    images = files["train", "images"]
    stem = images.name[: images.name.lower().rindex("train-images")]
    for split in ("train", "test"):
        for part, kind in (("images", "idx3"), ("labels", "idx1")):
            if (split, part) not in files:
                name = "t10k" if split == "test" and not stem else split
                raise DataError(f"data.name: {images.parent} lacks {stem}{name}-{part}-{kind}-ubyte[.gz]")
    return files


def read_idx_file(path: Path) -> Tensor:
    """An IDX file's array. Raises DataError if it is truncated or another kind of file."""
    try:
        size = path.stat().st_size
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            head = file.read(4)
            if len(head) < 4 or head[:2] != b"\0\0" or head[2] not in _IDX_TYPES:
                raise DataError(f"data: {path}: not an IDX file")
            lengths = file.read(4 * head[3])
            if len(lengths) < 4 * head[3]:
                raise DataError(f"data: {path}: not an IDX file")
            shape = struct.unpack(f">{head[3]}I", lengths)
            kind = np.dtype(_IDX_TYPES[head[2]])
            wanted = math.prod(shape) * kind.itemsize
            there = size * (INFLATES if path.suffix == ".gz" else 1)  # at most
            if wanted > there:
                raise DataError(f"data: {path}: truncated: its header promises {wanted:,} bytes, but the file has {size:,}")
            enough_memory(wanted, f"data: {path}")
            body = file.read(wanted + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"data: {path}: cannot be read, or truncated ({error})") from error
    if len(body) != wanted:
        found = "more" if len(body) > wanted else f"{len(body):,}"
        raise DataError(f"data: {path}: truncated or damaged: {found} bytes of data, but its header promises {wanted:,}")
    try:
        return torch.from_numpy(np.frombuffer(body, kind).reshape(shape).astype(kind.newbyteorder("=")))
    except ValueError as error:
        raise DataError(f"data: {path}: impossible dimensions: {shape} ({error})") from error
