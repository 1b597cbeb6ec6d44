"""Arrays: scikit-learn's digits, and npz files."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from svdcompress.errors import DataError
from svdcompress.recipe import DataSection
from svdcompress.sources._npy import load_npz
from svdcompress.sources._raw import Raw, Table, no_targets, optional

LIKE_SPLITS = {"train", "training", "validation", "val", "valid", "dev", "test", "testing", "heldout"}
"""Words in an array's name that suggest a training, validation or test split."""

SPLITS = ("train", "validation", "test")

INPUTS = ("x", "inputs", "images", "X", "data")
"""Names of the array of inputs in an npz file; with a split before or after them, of that split's inputs."""

TARGETS = ("y", "targets", "labels", "Y", "target")
"""The same of the targets."""


def read_digits(place: str, section: DataSection) -> Raw:
    """scikit-learn's 1,797 scanned digits: (N, 1, 8, 8) in [0, 1], ten classes."""
    datasets = optional("sklearn.datasets", "scikit-learn", "data: digits")
    bunch = datasets.load_digits()
    inputs = torch.from_numpy(bunch.images).float().div_(16).unsqueeze(1)
    table = Table("digits", inputs, torch.from_numpy(bunch.target).long())
    return Raw(table, classes=[str(digit) for digit in range(10)])


def read_npz(place: str, section: DataSection) -> Raw:
    """An npz file with x (or inputs, images, x_train) and y (or targets, labels, y_train); x_test and y_test if it has them."""
    path = Path(place)
    if not os.path.isfile(path):
        raise DataError(f"data.name: {path}: no such file")
    arrays = load_npz(path)
    tables: dict[str, Table | None] = {}
    read: dict[str, str] = {}
    for split in SPLITS:
        found = {kind: next((name for name in _npz_names(kind, split) if name in arrays), None) for kind in ("x", "y")}
        read |= {f"{kind}_{split}": name for kind, name in found.items() if name is not None}
        x, y = (None if name is None else arrays[name] for name in found.values())
        if x is not None and y is not None and len(x) != len(y):
            raise DataError(f"data: {path}: {len(x)} inputs, but {len(y)} targets ({split})")
        if y is None and x is not None and section.unlabelled:
            y = no_targets(len(x))
        if (x is None) != (y is None) and split != "train":
            there, missing = ("inputs", "targets") if y is None else ("targets", "inputs")
            one = read[f"{'xy'[x is None]}_{split}"]
            raise DataError(
                f"data: {path}: has {there} for {split} ({one}), but no {missing}; it has {', '.join(arrays)}. Names such as "
                f"{_npz_names('x', split)[0]} and {_npz_names('y', split)[0]} belong together"
            )
        tables[split] = None if x is None or y is None else Table(str(path), x, y)
    if tables["train"] is None:
        raise DataError(
            f"data: {path}: needs the arrays x and y (or x_train and y_train); it has {', '.join(arrays) or 'none'}. Without "
            "targets: --unlabelled"
        )
    warnings = _not_read(path, list(arrays), list(read.values()))
    return Raw(tables["train"], tables["test"], tables["validation"], warnings=warnings, array=read["x_train"])


def _not_read(path: Path, names: list[str], read: list[str]) -> list[str]:
    """Warnings about arrays that are not read although their names are those of data, or look like those of a split."""
    known = {name for split in SPLITS for kind in ("x", "y") for name in _npz_names(kind, split)}
    left = [name for name in names if name in known and name not in read]
    others = [name for name in names if name not in known and LIKE_SPLITS & set(name.lower().split("_"))]
    warnings = []
    if left:
        warnings.append(f"{path}: not read, although named like data: {', '.join(left)} (read: {', '.join(read)})")
    if others:
        said = "known names are x and y with train, validation, val, valid or test"
        named = ", ".join(others)
        warnings.append(f"{path}: not read, although named like training, validation or test data: {named} ({said})")
    return warnings


def _npz_names(kind: str, split: str) -> list[str]:
    names = {"x": INPUTS, "y": TARGETS}[kind]
    known = ("validation", "val", "valid") if split == "validation" else (split,)
    split_names = [each for part in known for name in names for each in (f"{name}_{part}", f"{part}_{name}")]
    return split_names + list(names) if split == "train" else split_names
