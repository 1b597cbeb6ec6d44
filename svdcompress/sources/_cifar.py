"""CIFAR-10 and CIFAR-100: binary records, or tar archives of class folders."""

from __future__ import annotations

import os
import tarfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from svdcompress.errors import DataError
from svdcompress.recipe import DataSection
from svdcompress.sources._images import SUFFIXES, decode, stacked
from svdcompress.sources._raw import Raw, Table, encode_classes

_PIXELS = 3 * 32 * 32

LARGEST = 2**26
"""Most bytes that an image file in an archive may have."""


def read_cifar(place: str, section: DataSection) -> Raw:
    """`cifar10:DIR`, `cifar100:DIR`: binary files (the fine labels of CIFAR-100), or archives of images in class folders."""
    folder = Path(place or section.root or ".")
    for base in (folder, folder / "cifar-10-batches-bin", folder / "cifar-100-binary"):
        for first, test, names, labels in _BINARY:
            if os.path.isfile(base / first):
                return _records(base, sorted(base.glob(first.replace("_1", "_*"))), base / test, base / names, labels, section)
    if os.path.isfile(folder / "train.tar.gz"):
        train_table, classes = _archive(folder / "train.tar.gz", None, section)
        test = folder / "test.tar.gz"
        test_table = _archive(test, classes, section)[0] if os.path.isfile(test) else None
        return Raw(train_table, test_table, classes=classes)
    raise DataError(
        f"data.name: {folder}: contains none of data_batch_1.bin, train.bin and train.tar.gz; name the folder as cifar10:DIR"
    )


_BINARY = (
    ("data_batch_1.bin", "test_batch.bin", "batches.meta.txt", 1),
    ("train.bin", "test.bin", "fine_label_names.txt", 2),
)
"""For CIFAR-10 and CIFAR-100: first training file, test file, file of class names, label bytes before each image."""


def _records(base: Path, train: list[Path], test: Path, names: Path, labels: int, section: DataSection) -> Raw:
    if section.image_size not in (None, (32, 32)):
        raise DataError(
            f"data.image_size: the images of {base} are 32x32; resize them with a transform, as in data.transform=[{{resize: "
            f"64}}]"
        )
    parts = zip(*(_binary(file, labels) for file in train), strict=True)
    images, targets = (torch.cat(part) for part in parts)
    classes = _names(names) if os.path.isfile(names) else None
    table = Table(str(test), *_binary(test, labels))
    most = max(int(targets.max()), int(table.targets.max()))
    if classes is not None and most >= len(classes):
        raise DataError(f"data: {base}: label {most}, but {names.name} names {len(classes)} classes")
    return Raw(Table(str(base), images, targets), table, classes=classes)


def _names(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"data: {path}: cannot be read ({error})") from error


def _binary(path: Path, labels: int) -> tuple[Tensor, Tensor]:
    """Images and labels from records of a label byte (CIFAR-100: two, coarse then fine) and 3x32x32 pixel bytes."""
    try:
        content = np.fromfile(path, np.uint8)
    except OSError as error:
        raise DataError(f"data: {path}: cannot be read ({error})") from error
    size = labels + _PIXELS
    if not len(content) or len(content) % size:
        kind = "CIFAR-10" if labels == 1 else "CIFAR-100"
        raise DataError(
            f"data: {path}: {len(content)} bytes are not whole {kind} records of {size} bytes; the file is truncated"
        )
    records = torch.from_numpy(content).view(-1, size)
    return records[:, labels:].reshape(-1, 3, 32, 32).contiguous(), records[:, labels - 1].long()


def _read(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(member)
    if member.size > LARGEST:
        raise DataError(f"data: {archive.name}, {member.name}: {member.size:,} bytes, too large for a CIFAR image")
    return b"" if file is None else file.read()


def _archive(path: Path, classes: list[str] | None, section: DataSection) -> tuple[Table, list[str]]:
    """The images of a tar archive of .../CLASS/image, read into memory: nothing is unpacked to disk."""
    images: list[tuple[str, str, Any]] = []
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                parts = Path(member.name).parts
                if member.isfile() and len(parts) > 1 and Path(member.name).suffix.lower() in SUFFIXES:
                    origin = f"{path}, {member.name}"
                    images.append((member.name, parts[-2], decode(_read(archive, member), section.image_size, origin)))
    except (tarfile.TarError, EOFError, OSError, zlib.error, ValueError) as error:
        raise DataError(f"data: {path}: cannot be read, or truncated ({error})") from error
    if not images:
        raise DataError(f"data: {path}: contains no images in class folders")
    images.sort(key=lambda entry: entry[0])
    labels, classes = encode_classes([entry[1] for entry in images], classes, f"data: {path}")
    return Table(str(path), stacked([entry[2] for entry in images], [entry[0] for entry in images]), labels), classes
