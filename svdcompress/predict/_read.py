"""Files of inputs: arrays, images, folders of images, tables."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from svdcompress.errors import DataError
from svdcompress.sources import decode, frame_inputs, image_files, open_frame

KEYS = ("x", "input", "inputs", "arr_0")
"""Names of the array that counts in an npz file of several, the first found; without one all go in by name."""


def read_inputs(
    path: str | Path, preprocessing: Mapping[str, Any] | None = None, shape: tuple[int, ...] | None = None
) -> tuple[Any, list[str]]:
    """Inputs as they are in a file, before the recipe's transforms: (inputs, a name for each of them).

    path: .npy or .npz (the batch as first dimension), .csv or .parquet (the columns of the training), an image, or a folder
        of images (all below it, in the order of their names).
    preprocessing: of the run: image size, columns, categories.
    shape: of one input to the model, where it is known: images are resized and made grey or colour after it.

    Raises DataError, naming the file, for what is missing, damaged, empty or holds Python objects.
    """
    path, preprocessing = Path(path), dict(preprocessing or {})
    if path.is_dir():
        files = image_files(path)
        if not files:
            raise DataError(f"{path}: no images below this folder")
        return _images(files, preprocessing, shape), [str(file.relative_to(path)) for file in files]
    if not path.is_file():
        raise DataError(f"{path}: no such file or folder")
    kind = path.suffix.lower()
    if kind in (".csv", ".parquet"):
        if "columns" not in preprocessing:
            raise DataError(f"{path}: a table, but the run was not trained on tables")
        frame = open_frame(path, kind[1:])
        return frame_inputs(frame, preprocessing, str(path)), [str(row) for row in range(len(frame))]
    if kind in (".npy", ".npz"):
        inputs = _array(path) if kind == ".npy" else _arrays(path)
        rows = len(inputs if isinstance(inputs, Tensor) else next(iter(inputs.values())))
        return inputs, [str(row) for row in range(rows)]
    return _images([path], preprocessing, shape), [path.name]


def _array(path: Path) -> Tensor:
    try:
        return _tensor(np.load(path, allow_pickle=False), str(path))
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path}: not a readable array of numbers ({error})") from error


def _arrays(path: Path) -> Any:
    try:
        with np.load(path, allow_pickle=False) as stored:
            arrays = {name: _tensor(stored[name], f"{path}, {name}") for name in stored.files}
    except (OSError, ValueError, EOFError, AttributeError, zipfile.BadZipFile) as error:
        raise DataError(f"{path}: not readable arrays of numbers ({error})") from error
    if not arrays:
        raise DataError(f"{path}: there is no array in it")
    if len(arrays) == 1:
        return next(iter(arrays.values()))
    return next((arrays[key] for key in KEYS if key in arrays), arrays)


def _tensor(array: np.ndarray, where: str) -> Tensor:
    if array.dtype.kind not in "fiub":
        raise DataError(f"{where}: holds {array.dtype}, not numbers")
    if array.ndim == 0:
        raise DataError(f"{where}: a single number; inputs have the batch as their first dimension")
    if array.dtype.kind == "u" and array.dtype != np.uint8:
        array = array.astype(np.int64)
    return torch.from_numpy(np.ascontiguousarray(array.astype(array.dtype.newbyteorder("="))))


def _images(files: list[Path], preprocessing: dict[str, Any], shape: tuple[int, ...] | None) -> Tensor:
    size = preprocessing.get("image_size")
    known = shape if shape is not None and len(shape) == 3 else None
    size = tuple(size) if size else known[1:] if known else None
    images = [decode(file, size, str(file)) for file in files]
    channels = known[0] if known else max(len(image) for image in images)
    images = [_channels(image, channels) for image in images]
    for image, file in zip(images, files, strict=True):
        if image.shape != images[0].shape:
            sizes = f"{image.shape[1]}x{image.shape[2]}, but {files[0].name} has {images[0].shape[1]}x{images[0].shape[2]}"
            raise DataError(f"{file}: images differ in size ({sizes}), and the run does not say to which to resize them")
    return torch.stack(images)


def _channels(image: Tensor, channels: int) -> Tensor:
    """Grey bytes to colour, or colour to grey by the luma of ITU-R BT.601."""
    if len(image) == 1 and channels == 3:
        return image.expand(3, -1, -1)
    if len(image) == 3 and channels == 1:
        luma = torch.tensor([0.299, 0.587, 0.114]).view(3, 1, 1)
        return (image * luma).sum(0, keepdim=True).round().to(torch.uint8)
    return image
