"""Folders of images with a subfolder for each class: what is read, what is left out, and what the user is told of it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from svdcompress.errors import DataError
from svdcompress.recipe import DataSection
from svdcompress.sources._images import (
    LOOKED_AT,
    SUFFIXES,
    decode,
    files_below,
    image_files,
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
"""The largest value that 12 bits leave of 16 if the upper 8 are kept."""

BESIDE = (".txt", ".md", ".json", ".jsonl", ".csv", ".tsv", ".xml", ".yaml", ".yml", ".html", ".db", ".ini", ".lock")
"""Files beside images that nobody expects to be read."""

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
            told = f"in color, unlike the {LOOKED_AT:,} images that were looked at before training"
            raise DataError(f"data: {self.files[index]}: {told}; convert it to gray, or others to color")
        return image.expand(self.channels, -1, -1), self.labels[index]


def read_imagefolder(place: str, section: DataSection) -> Raw:
    """`imagefolder:DIR`: DIR/CLASS/image, or DIR/train/CLASS/image with test and val (or validation) beside train."""
    root = Path(place)
    if not os.path.isdir(root):
        raise DataError(f"data.name: {root}: no such folder")
    split, said = _splits(root)
    train, classes = _folder(split["train"], None, section)
    others = {name: _folder(split[name], classes, section)[0] if name in split else None for name in ("validation", "test")}
    size = list(section.image_size) if section.image_size else None
    counts = torch.bincount(train.dataset.labels if train.dataset is not None else train.targets).tolist()
    told = [f"{name} ({count:,})" for name, count in zip(classes, counts, strict=True)]
    shown = ", ".join(told[:NAMED]) + (", ..." if len(told) > NAMED else "")
    return Raw(
        train,
        others["test"],
        others["validation"],
        classes,
        {"image_size": size},
        said + [line for table in (train, *others.values()) if table is not None for line in table.warnings],
        [f"{train.origin}: {len(classes):,} classes (images): {shown}"],
    )


def _splits(root: Path) -> tuple[dict[str, Path], list[str]]:
    """The folders of train, test and validation, or {"train": root}; and what to tell of other folders."""
    below = sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    found = {name: [path for path in below if path.name.lower() in names] for name, names in _SPLITS.items()}
    for paths in found.values():
        if len(paths) > 1:
            raise DataError(f"data: {root}: {_names(paths)} are the same split; keep one of them")
    split = {name: paths[0] for name, paths in found.items() if paths}
    if not split:
        return {"train": root}, []
    others = [path for path in below if path not in split.values() and any(map(_is_image, files_below(path)))]
    if "train" in split and (not others or any(path.parent != split["train"] for path in image_files(split["train"]))):
        if not others:
            return split, []
        told = f"data: {root}: images in {_names(others)} are not read, as there is a split {split['train'].name}"
        cure = f"If these are classes, move all of them into {root / 'train'}"
        return split, [f"{told}; splits are called train, val and test. {cure}"]
    if not others:
        raise DataError(f"data: {root}: has {_names([*split.values()])}, but no train; name the split for training so")
    told = f"{_names([*split.values()])} {'is taken as a class' if len(split) == 1 else 'are taken as classes'}"
    return {"train": root}, [f"data: {root}: {told}, like {_names(others)}"]


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES


def _names(paths: Sequence[Path]) -> str:
    return ", ".join(path.name for path in paths[:NAMED]) + (", ..." if len(paths) > NAMED else "")


def _folder(folder: Path, classes: list[str] | None, section: DataSection) -> tuple[Table, list[str]]:
    """One split. classes: known from training; None: each folder is one."""
    files = image_files(folder)
    said = _unread(folder)
    if not files:
        raise DataError(f"data: {folder}: contains no images in class folders" + (f" ({said[0]})" if said else ""))
    names = [file.relative_to(folder).parts[0] for file in files]
    if any(file.parent == folder for file in files):
        raise DataError(f"data: {folder}: images are next to the class folders; move each into the folder of its class")
    if classes is None:
        known = set(names)
        empty = [path for path in sorted(folder.iterdir()) if path.is_dir() and path.name not in known]
        if empty := [path for path in empty if not path.name.startswith(".")]:
            why = f"it has no images ({', '.join(SUFFIXES)})"
            raise DataError(f"data: {empty[0]}: {why}, but is a class like {names[0]}; remove it, or add its images")
    labels, classes = encode_classes(names, classes, f"data: {folder}")
    seen = look_at(files)
    said += seen.warnings
    first = decode(files[0], section.image_size, str(files[0]))
    if first[0].numel() * seen.channels * len(files) > IN_MEMORY_BYTES:
        if section.image_size is None:
            raise DataError("data.image_size: needed for images that do not fit in memory, such as [224, 224]")
        workers = section.workers if section.workers is not None else sensible_workers()
        dataset = ImageFiles(files, labels, section.image_size, seen.channels)
        some = [dataset[index][0] for index in spread(len(files), DECODED)]
        said += _dark(folder, max(int(image.max()) for image in some))
        return Table(str(folder), dataset=dataset, workers=workers, warnings=said), classes
    images = stacked([decode(file, section.image_size, str(file)) for file in files], [str(file) for file in files])
    said += _dark(folder, int(images.max()))
    return Table(str(folder), images, labels, warnings=said), classes


def _unread(folder: Path) -> list[str]:
    """A warning about files that may well be images, but are not read."""
    found = [path for path in files_below(folder) if path.suffix.lower() not in BESIDE]
    left = [path for path in found if not (_is_image(path) and os.path.isfile(path))]
    if not left:
        return []
    kinds = Counter((path.suffix if os.path.isfile(path) else "links to nothing") or "no suffix" for path in left)
    told = ", ".join(f"{kind}: {count:,}" for kind, count in kinds.most_common(NAMED))
    return [f"data: {folder}: {len(left):,} files are not read ({told}); images are {', '.join(SUFFIXES)}"]


def _dark(folder: Path, most: int) -> list[str]:
    """A warning about images that leave most of the range unused, such as those of 12 bits in files of 16. most: the largest
    value seen, of 255."""
    if most > DARK:
        return []
    return [
        f"data: {folder}: no pixel is above {most} of 255, so at most {most + 1} levels are left. Of 16 bits the upper 8 are "
        "read: stretch images of 12 bits to the full range, or pass arrays (npz)"
    ]
