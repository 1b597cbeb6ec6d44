"""Folders of images with a subfolder for each class: what is read, what is left out, and what the user is told of it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor
from torch.utils.data import Dataset

from svdcompress.errors import DataError
from svdcompress.recipe import DataSection
from svdcompress.sources._images import (
    LOOKED_AT,
    NO_IMAGES,
    SUFFIXES,
    Seen,
    decode,
    files_below,
    is_image,
    look_at,
    sensible_workers,
    spread,
    stacked,
)
from svdcompress.sources._raw import Raw, Table, encode_classes

IN_MEMORY_BYTES = 2**30
"""A folder whose decoded images take more than this is read again in each epoch, by loader processes."""

DECODED = 64
"""The number of images, evenly spaced, whose pixels are looked at if they are read as needed."""

NAMED = 10
"""The most classes or folders that a message names."""

DARK = 15
"""The largest value that is left of 12 bits in 16 if the upper 8 are kept."""

UNREAD = (
    *(".heic", ".heif", ".avif", ".jxl", ".jp2", ".j2k", ".svg", ".ico", ".tga", ".psd", ".exr", ".hdr", ".dcm", ".nii"),
    *(".dng", ".cr2", ".cr3", ".nef", ".arw", ".orf", ".rw2", ".raf", ".pcx", ".eps", ".jpe"),
)
"""Suffixes of images that are not read."""

_SPLITS = {"train": ("train", "training"), "validation": ("val", "valid", "validation"), "test": ("test", "testing")}


class ImageFiles(Dataset):
    """Images from a list of files, decoded when accessed, with their labels. channels: 1 or 3, of all images."""

    def __init__(self, files: Sequence[Path], labels: Tensor, size: tuple[int, int] | None, channels: int) -> None:
        self.files = list(files)
        self.labels = labels
        self.size = size
        self.channels = channels

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = decode(self.files[index], self.size, str(self.files[index]))
        if len(image) > self.channels:
            told = f"in color, unlike the {min(len(self), LOOKED_AT):,} images that were looked at before training"
            raise DataError(f"data: {self.files[index]}: {told}; convert it to gray, or others to color")
        return image.expand(self.channels, -1, -1), self.labels[index]


@dataclass(frozen=True)
class _Split:
    """The files of one split. unread: those that may well be images, but are not read."""

    folder: Path
    files: list[Path]
    unread: list[Path]

    @property
    def classes(self) -> list[str]:
        """The class of each file: the name of the first folder on the way to it."""
        return [file.relative_to(self.folder).parts[0] for file in self.files]


def read_imagefolder(place: str, section: DataSection) -> Raw:
    """`imagefolder:DIR`: DIR/CLASS/image, or DIR/train/CLASS/image with test and val (or validation) beside train."""
    root = Path(place)
    if not os.path.isdir(root):
        raise DataError(f"data.name: {root}: no such folder")
    folders, said = _splits(root)
    splits = {name: _split(folder) for name, folder in folders.items()}
    said += _no_classes(splits["train"])
    seen = {name: look_at(split.files) for name, split in splits.items()}
    channels = max(one.channels for one in seen.values())
    classes, tables = None, {}
    for name in splits:  # train comes first
        tables[name], classes = _table(splits[name], classes, section, seen[name], channels)
    assert classes is not None
    counts = Counter(splits["train"].classes)
    told = ", ".join(f"{name} ({counts[name]:,})" for name in classes[:NAMED]) + (", ..." if len(classes) > NAMED else "")
    return Raw(
        tables["train"],
        tables.get("test"),
        tables.get("validation"),
        classes,
        {"image_size": list(section.image_size) if section.image_size else None},
        said + [line for table in tables.values() for line in table.warnings],
        [f"{folders['train']}: {_count(len(classes), 'class', 'classes')} (images): {told}"],
    )


def _splits(root: Path) -> tuple[dict[str, Path], list[str]]:
    """The folders of train, test and validation, or {"train": root}; and what to tell of other folders.

    A split may be written in capitals if all folders are splits, or train is not. Only one whose images are not in class
    folders may be a class.
    """
    below = sorted(path for path in root.iterdir() if path.is_dir() and not _hidden(path.name))
    found = {name: [path for path in below if path.name.lower() in names] for name, names in _SPLITS.items()}
    split = {name: paths[0] for name, paths in found.items() if paths}
    if not split:
        return {"train": root}, []
    small = {name: next((path for path in paths if path.name.islower()), None) for name, paths in found.items()}
    known = [path for paths in found.values() for path in paths]
    others = [path for path in below if path not in known and any(map(is_image, files_below(path)))]
    for paths in found.values():
        if len(paths) > 1 and (small["train"] or not others):
            raise DataError(f"data: {root}: {_names(paths)} are the same split; keep one of them")
    if others and not small["train"]:
        split = {name: path for name, path in small.items() if path}
    if "train" in split and (len(split) > 1 or not others or any(_nested(split["train"]))):
        if not others:
            return split, []
        told = f"data: {root}: images in {_names(others)} are not read, as there is a split {split['train'].name}"
        cure = f"If these are classes, move all of them into {root / 'train'}"
        return split, [f"{told}; splits are called train, val and test. {cure}"]
    if not others:
        raise DataError(f"data: {root}: has {_names(known)}, but no train; name the split for training so")
    told = f"{_names(known)} {'is taken as a class' if len(known) == 1 else 'are taken as classes'}"
    return {"train": root}, [f"data: {root}: {told}, like {_names(others)}; splits are called train, val and test"]


def _hidden(name: str) -> bool:
    return name.startswith(".") or name in NO_IMAGES


def _nested(folder: Path) -> Iterator[Path]:
    """Images in folders of a folder."""
    return (path for path in files_below(folder) if is_image(path) and path.parent != folder)


def _names(paths: Sequence[Path]) -> str:
    return ", ".join(path.name for path in paths[:NAMED]) + (", ..." if len(paths) > NAMED else "")


def _count(number: int, one: str, several: str) -> str:
    return f"{number:,} {one if number == 1 else several}"


def _split(folder: Path) -> _Split:
    """The files of a split. Raises DataError if there are no images, or some beside the class folders."""
    images, unread = [], []
    for path in files_below(folder):
        if is_image(path):
            (images if os.path.isfile(path) else unread).append(path)
        elif path.suffix.lower() in UNREAD:
            unread.append(path)
    found = _Split(folder, sorted(images), unread)
    if not images:
        raise DataError(f"data: {folder}: contains no images in class folders" + (f" ({_told(found)})" if unread else ""))
    if any(file.parent == folder for file in images):
        raise DataError(f"data: {folder}: images are next to the class folders; move each into the folder of its class")
    return found


def _no_classes(train: _Split) -> list[str]:
    """Warnings about folders that are no classes, or the same one twice. Raises DataError for one whose images are not read."""
    known, said, places = set(train.classes), [], {}
    for path in sorted(path for path in train.folder.iterdir() if path.is_dir() and not path.name.startswith(".")):
        if path.name in known:
            if (other := places.setdefault(os.path.realpath(path), path)) != path:
                said.append(f"data: {train.folder}: the classes {other.name} and {path.name} are the same folder")
        elif path.name in NO_IMAGES:
            continue
        elif any(path in file.parents for file in train.unread):
            raise DataError(
                f"data: {path}: none of its files is read; images are {', '.join(SUFFIXES)}. Convert or remove them"
            )
        else:
            said.append(f"data: {path}: has no images, so it is no class")
    return said


def _told(split: _Split) -> str:
    """How many files are not read, by suffix."""
    kinds = Counter(path.suffix.lower() if os.path.isfile(path) else "links to nothing" for path in split.unread)
    each = ", ".join(f"{kind}: {count:,}" for kind, count in kinds.most_common(NAMED))
    return f"{_count(len(split.unread), 'file is', 'files are')} not read ({each}); images are {', '.join(SUFFIXES)}"


def _table(
    split: _Split, classes: list[str] | None, section: DataSection, seen: Seen, channels: int
) -> tuple[Table, list[str]]:
    """A split's examples. classes: known from training; None: each folder is one. channels: of all splits."""
    folder, files, size = split.folder, split.files, section.image_size
    labels, classes = encode_classes(split.classes, classes, f"data: {folder}")
    said = [*([f"data: {folder}: {_told(split)}"] if split.unread else []), *seen.warnings]
    first = decode(files[0], size, str(files[0]))
    if first[0].numel() * channels * len(files) > IN_MEMORY_BYTES:
        if size is None:
            raise DataError("data.image_size: needed for images that do not fit in memory, such as [224, 224]")
        workers = section.workers if section.workers is not None else sensible_workers()
        dataset = ImageFiles(files, labels, size, channels)
        some = [dataset[index][0] for index in spread(len(files), DECODED)]
        said += _dark(folder, seen, max(int(image.max()) for image in some), len(some))
        return Table(str(folder), dataset=dataset, workers=workers, warnings=said), classes
    images = stacked([decode(file, size, str(file)) for file in files], [str(file) for file in files])
    said += _dark(folder, seen, int(images.max()), len(images))
    return Table(str(folder), images.expand(-1, max(channels, images.shape[1]), -1, -1), labels, warnings=said), classes


def _dark(folder: Path, seen: Seen, most: int, looked: int) -> list[str]:
    """A warning about images of 16 bits that leave most of the range unused, such as those of 12. most: the largest value of
    those looked at, of 255."""
    if most > DARK or not seen.wide:
        return []
    return [
        f"data: {folder}: of 16 bits the upper 8 are read, and no pixel of {looked:,} images is above {most} of 255: hardly "
        "any levels are left. Stretch images of 12 bits to the full range, or pass arrays (npz)"
    ]
