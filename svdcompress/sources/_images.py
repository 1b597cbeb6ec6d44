"""Images: folders of classes, CIFAR's binary files, and tar archives of class folders."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from svdcompress.errors import DataError
from svdcompress.recipe import DataSection
from svdcompress.sources._raw import Raw, Table, encode_classes, optional

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".pgm", ".tif", ".tiff", ".gif")
IN_MEMORY_BYTES = 2**30
"""Folders whose decoded images are larger than this are read anew in each epoch, by loader processes."""


def decode(content: bytes | Path, size: tuple[int, int] | None, origin: str) -> Tensor:
    """One image as bytes (C, H, W), C 1 for grey and 3 for colour; size: (height, width) to resize to.

    Raises DataError that names the file if it is not an image.
    """
    image_module = optional("PIL.Image", "pillow", "images")
    try:
        with image_module.open(io.BytesIO(content) if isinstance(content, bytes) else content) as image:
            image = image.convert("L" if image.mode in ("1", "L", "I", "I;16") else "RGB")
            if size is not None and image.size != (size[1], size[0]):
                image = image.resize((size[1], size[0]), image_module.Resampling.BILINEAR)
            array = np.array(image)
    except (OSError, ValueError, SyntaxError) as error:
        raise DataError(f"data: {origin}: not a readable image ({error})") from error
    return torch.from_numpy(array).unsqueeze(0) if array.ndim == 2 else torch.from_numpy(array).permute(2, 0, 1).contiguous()


class ImageFiles(Dataset):
    """Images of a list of files and their labels, decoded when asked for."""

    def __init__(self, files: Sequence[Path], labels: Tensor, size: tuple[int, int] | None) -> None:
        self.files = list(files)
        self.labels = labels
        self.size = size

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return decode(self.files[index], self.size, str(self.files[index])), self.labels[index]


def image_files(folder: Path) -> list[Path]:
    """All image files below a folder, in the order of their names."""
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())


def read_imagefolder(place: str, section: DataSection) -> Raw:
    """`imagefolder:DIR`: DIR/CLASS/image, or DIR/train/CLASS/image with test and val (or validation) beside train."""
    root = Path(place)
    if not root.is_dir():
        raise DataError(f"data.name: {root}: no such folder")
    split: dict[str, Any] = {
        name: next((root / n for n in names if (root / n).is_dir()), None) for name, names in _SPLITS.items()
    }
    if split["train"] is None:
        split = {"train": root, "validation": None, "test": None}
    train, classes = _folder(split["train"], None, section)
    others = {name: _folder(split[name], classes, section)[0] if split[name] else None for name in ("validation", "test")}
    size = list(section.image_size) if section.image_size else None
    return Raw(train, others["test"], others["validation"], classes, {"image_size": size})


_SPLITS = {"train": ("train", "training"), "validation": ("val", "valid", "validation"), "test": ("test", "testing")}


def _folder(folder: Path, classes: list[str] | None, section: DataSection) -> tuple[Table, list[str]]:
    files = image_files(folder)
    if not files:
        raise DataError(f"data: {folder}: no images in class folders below it")
    names = [file.relative_to(folder).parts[0] for file in files]
    if any(file.parent == folder for file in files):
        raise DataError(f"data: {folder}: images lie beside the class folders; each belongs into the folder of its class")
    labels, classes = encode_classes(names, classes, f"data: {folder}")
    first = decode(files[0], section.image_size, str(files[0]))
    if first.numel() * len(files) > IN_MEMORY_BYTES:
        if section.image_size is None:
            raise DataError("data.image_size: needed for images that do not fit in memory, such as [224, 224]")
        workers = section.workers if section.workers is not None else _sensible_workers()
        return Table(str(folder), dataset=ImageFiles(files, labels, section.image_size), workers=workers), classes
    images = [decode(file, section.image_size, str(file)) for file in files]
    return Table(str(folder), _stacked(images, [str(file) for file in files]), labels), classes


def _stacked(images: list[Tensor], names: list[str]) -> Tensor:
    if any(len(image) == 3 for image in images):
        images = [image.expand(3, -1, -1) for image in images]
    for image, name in zip(images, names, strict=True):
        if image.shape != images[0].shape:
            size = f"{image.shape[1]}x{image.shape[2]}, but {names[0]} has {images[0].shape[1]}x{images[0].shape[2]}"
            raise DataError(
                f"data.image_size: images differ in size ({name} has {size}); give the size to resize to, "
                "as in --set data.image_size=[224,224]"
            )
    return torch.stack(images)


def _sensible_workers() -> int:
    import os

    return max(0, min(8, (os.cpu_count() or 1) - 1))


def read_cifar(place: str, section: DataSection) -> Raw:
    """`cifar10:DIR`: CIFAR-10's binary batches, or train.tar.gz and test.tar.gz of images in class folders."""
    folder = Path(place or section.root or ".")
    for base in (folder, folder / "cifar-10-batches-bin"):
        if (base / "data_batch_1.bin").is_file():
            train = [_binary(file) for file in sorted(base.glob("data_batch_*.bin"))]
            images, labels = (torch.cat(parts) for parts in zip(*train, strict=True))
            test = _binary(base / "test_batch.bin")
            meta = base / "batches.meta.txt"
            classes = meta.read_text().split() if meta.is_file() else None
            return Raw(Table(str(base), images, labels), Table(str(base / "test_batch.bin"), *test), classes=classes)
    if (folder / "train.tar.gz").is_file():
        train_table, classes = _archive(folder / "train.tar.gz", None, section)
        test = folder / "test.tar.gz"
        test_table = _archive(test, classes, section)[0] if test.is_file() else None
        return Raw(train_table, test_table, classes=classes)
    raise DataError(f"data.name: {folder}: neither data_batch_1.bin nor train.tar.gz in it; name the folder as cifar10:DIR")


def _binary(path: Path) -> tuple[Tensor, Tensor]:
    """Records of one label byte and 3x32x32 pixel bytes."""
    try:
        content = np.fromfile(path, np.uint8)
    except OSError as error:
        raise DataError(f"data: {path}: cannot be read ({error})") from error
    if not len(content) or len(content) % 3073:
        raise DataError(f"data: {path}: {len(content)} bytes are not whole CIFAR-10 records of 3073; it is truncated")
    records = torch.from_numpy(content).view(-1, 3073)
    return records[:, 1:].reshape(-1, 3, 32, 32).contiguous(), records[:, 0].long()


def _read(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(member)
    return b"" if file is None else file.read()


def _archive(path: Path, classes: list[str] | None, section: DataSection) -> tuple[Table, list[str]]:
    """A tar archive of .../CLASS/image, read in memory: nothing is unpacked."""
    images: list[tuple[str, str, Any]] = []
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                parts = Path(member.name).parts
                if member.isfile() and len(parts) > 1 and Path(member.name).suffix.lower() in SUFFIXES:
                    origin = f"{path}, {member.name}"
                    images.append((member.name, parts[-2], decode(_read(archive, member), section.image_size, origin)))
    except (tarfile.TarError, EOFError, OSError) as error:
        raise DataError(f"data: {path}: cannot be read, or truncated ({error})") from error
    if not images:
        raise DataError(f"data: {path}: no images in class folders in it")
    images.sort(key=lambda entry: entry[0])
    labels, classes = encode_classes([entry[1] for entry in images], classes, f"data: {path}")
    return Table(str(path), _stacked([entry[2] for entry in images], [entry[0] for entry in images]), labels), classes
