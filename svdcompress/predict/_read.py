"""Reading files of inputs: arrays, images, folders of images, tables."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from svdcompress.errors import DataError
from svdcompress.sources import (
    INPUTS,
    TARGETS,
    decode,
    frame_inputs,
    image_files,
    load_npy,
    load_npz,
    look_at,
    open_frame,
    text_columns,
)

KEYS = (*INPUTS, "input", "arr_0")
"""Names under which an npz file of several arrays may hold the input of a run with one input; the first found is used. If the
run has several inputs, all arrays are inputs, by name."""

NO_INPUTS = {*TARGETS, "label"}
"""Names of arrays that are targets, not inputs, in small letters or capitals: they may be in a file without a warning."""


def read_inputs(
    path: str | Path, preprocessing: Mapping[str, Any] | None = None, shape: tuple[int, ...] | None = None
) -> tuple[Any, list[str]]:
    """Read inputs from a file, before the recipe's transforms; returns (inputs, a name for each of them).

    path: .npy or .npz (batch first), .csv or .parquet (with the columns used in training), an image, or a folder of images
        (all below it, in the order of their names). If an .npz has several arrays, a run with one input whose shape is known
        uses the one called x, inputs, images, X, data, input or arr_0, or the only one that is no target, and warns of others;
        otherwise all are inputs.
    preprocessing: of the run: image size, columns, categories.
    shape: of one input to the model, if known: images are resized and converted to gray or color to match it.

    Raises DataError, naming the file, for what is missing, damaged, empty or holds Python objects.
    """
    path, preprocessing = Path(path), dict(preprocessing or {})
    if os.path.isdir(path):
        files = image_files(path)
        if not files:
            raise DataError(f"{path}: no images below this folder")
        return _images(files, preprocessing, shape), [str(file.relative_to(path)) for file in files]
    if not os.path.isfile(path):
        raise DataError(f"{path}: no such file or folder")
    kind = path.suffix.lower()
    if kind in (".csv", ".parquet"):
        if "columns" not in preprocessing:
            raise DataError(f"{path}: a table, but the run was not trained on tables")
        frame = open_frame(path, kind[1:], texts=text_columns(preprocessing))
        return frame_inputs(frame, preprocessing, str(path)), [str(row) for row in range(len(frame))]
    if kind in (".npy", ".npz"):
        inputs = load_npy(path) if kind == ".npy" else _arrays(path, shape is not None or "input_shape" in preprocessing)
        lengths = {len(part) for part in ([inputs] if isinstance(inputs, Tensor) else inputs.values())}
        if len(lengths) > 1:
            raise DataError(f"{path}: arrays of different lengths: {', '.join(map(str, sorted(lengths)))}")
        (rows,) = lengths
        return inputs, [str(row) for row in range(rows)]
    if "columns" in preprocessing:
        raise DataError(f"{path}: the run was trained on a table, and reads .csv, .parquet, .npy and .npz")
    return _images([path], preprocessing, shape), [path.name]


def _arrays(path: Path, single: bool) -> Any:
    arrays = load_npz(path)
    if not arrays:
        raise DataError(f"{path}: contains no array")
    if len(arrays) == 1:
        return next(iter(arrays.values()))
    taken = next((key for key in KEYS if key in arrays), None)
    if not single:
        return arrays
    others = [name for name in arrays if name.lower() not in NO_INPUTS]
    if taken is None and len(others) == 1:
        taken = others[0]
    if taken is None:
        raise DataError(
            f"{path}: which of its arrays ({', '.join(arrays)}) is the input? Name it {', '.join(KEYS[:-1])}, or give a .npy "
            "file of it alone"
        )
    left = [name for name in others if name != taken]
    if left:
        warnings.warn(f"{path}: only {taken!r} is used, without {', '.join(left)}: the run has one input", stacklevel=3)
    return arrays[taken]


def _images(files: list[Path], preprocessing: dict[str, Any], shape: tuple[int, ...] | None) -> Tensor:
    size = preprocessing.get("image_size")
    known = shape if shape is not None and len(shape) == 3 else None
    size = tuple(size) if size else known[1:] if known else None
    for line in look_at(files).warnings:
        warnings.warn(line, stacklevel=4)
    images = [decode(file, size, str(file)) for file in files]
    channels = known[0] if known else max(len(image) for image in images)
    images = [_channels(image, channels) for image in images]
    for image, file in zip(images, files, strict=True):
        if image.shape != images[0].shape:
            sizes = f"{image.shape[1]}x{image.shape[2]}, but {files[0].name} has {images[0].shape[1]}x{images[0].shape[2]}"
            raise DataError(f"{file}: images differ in size ({sizes}), and the run does not say which size to resize them to")
    return torch.stack(images)


def _channels(image: Tensor, channels: int) -> Tensor:
    """Convert gray bytes to color, or color to gray by the luma of ITU-R BT.601."""
    if len(image) == 1 and channels == 3:
        return image.expand(3, -1, -1)
    if len(image) == 3 and channels == 1:
        luma = torch.tensor([0.299, 0.587, 0.114]).view(3, 1, 1)
        return (image * luma).sum(0, keepdim=True).round().to(torch.uint8)
    return image
