"""Images: one way of decoding for all sources, and folders with a subfolder for each class."""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from svdcompress.errors import DataError, shortened
from svdcompress.recipe import DataSection
from svdcompress.sources._raw import Raw, Table, encode_classes, optional

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".pgm", ".tif", ".tiff", ".gif")
FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "PPM", "TIFF", "GIF")
"""Formats that Pillow may decode, whatever a file's name: others run programs (EPS), or are rarely used and rarely tested."""

MOST_PIXELS = 2**26
"""Most pixels that an image may have, as a small file can claim any number."""

CHANNELS = (1, 3, 4)
"""Channels of gray images, of color images, and of color images with opacity."""

IN_MEMORY_BYTES = 2**30
"""A folder whose decoded images take more than this is read again in each epoch, by loader processes."""


def channels_last(inputs: Any) -> str:
    """A hint for the error of a model that fails on images that seem to be (N, H, W, C); "" for all other inputs."""
    last = isinstance(inputs, Tensor) and inputs.dim() == 4 and inputs.shape[3] in CHANNELS and inputs.shape[1] not in CHANNELS
    return ". (N, H, W, C)? PyTorch takes (N, C, H, W): x.transpose(0, 3, 1, 2)" if last else ""


def decode(content: bytes | Path, size: tuple[int, int] | None, origin: str) -> Tensor:
    """One image as bytes (C, H, W), C 1 for gray and 3 for color; size: (height, width) to resize to.

    Raises DataError, naming the file, if it is not an image.
    """
    image_module = optional("PIL.Image", "pillow", "images")
    try:
        source = io.BytesIO(content) if isinstance(content, bytes) else content
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about sizes, which are checked here, and about damaged metadata
            with image_module.open(source, formats=FORMATS) as image:
                width, height = image.size
                if width * height > MOST_PIXELS:
                    raise DataError(
                        f"data: {origin}: {width:,} x {height:,}; images of at most {MOST_PIXELS:,} pixels are read"
                    )
                return pixels(image, size)
    except DataError:
        raise
    except Exception as error:  # Pillow raises many kinds of errors, also for decompression bombs
        reason = shortened(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
        raise DataError(f"data: {origin}: not a readable image ({reason})") from error


def pixels(image: Any, size: tuple[int, int] | None) -> Tensor:
    """A Pillow image as bytes (C, H, W), C 1 for gray and 3 for color; size: (height, width) to resize to, bilinearly.

    Gray images of more than 8 bits keep the upper 8 (Pillow's own conversion would turn all values above 255 white).
    """
    image_module = optional("PIL.Image", "pillow", "images")
    if image.mode.startswith("I"):
        values = np.asarray(image)
        wide = image.mode != "I" or values.max(initial=0) > 255  # some versions of Pillow open 16-bit files as I
        image = image_module.fromarray((values // 256 if wide else values).clip(0, 255).astype(np.uint8))
    image = image.convert("L" if image.mode in ("1", "L", "F") else "RGB")
    if size is not None and image.size != (size[1], size[0]):
        image = image.resize((size[1], size[0]), image_module.Resampling.BILINEAR)
    array = torch.from_numpy(np.array(image))
    return array.unsqueeze(0) if array.dim() == 2 else array.permute(2, 0, 1).contiguous()


class ImageFiles(Dataset):
    """Images from a list of files, decoded when accessed, with their labels."""

    def __init__(self, files: Sequence[Path], labels: Tensor, size: tuple[int, int] | None) -> None:
        self.files = list(files)
        self.labels = labels
        self.size = size

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return decode(self.files[index], self.size, str(self.files[index])), self.labels[index]


def image_files(folder: Path) -> list[Path]:
    """All image files below a folder, sorted by path."""
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and os.path.isfile(path))


def read_imagefolder(place: str, section: DataSection) -> Raw:
    """`imagefolder:DIR`: DIR/CLASS/image, or DIR/train/CLASS/image with test and val (or validation) beside train."""
    root = Path(place)
    if not os.path.isdir(root):
        raise DataError(f"data.name: {root}: no such folder")
    split: dict[str, Any] = {
        name: next((root / n for n in names if os.path.isdir(root / n)), None) for name, names in _SPLITS.items()
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
        raise DataError(f"data: {folder}: contains no images in class folders")
    names = [file.relative_to(folder).parts[0] for file in files]
    if any(file.parent == folder for file in files):
        raise DataError(f"data: {folder}: images are next to the class folders; move each into the folder of its class")
    labels, classes = encode_classes(names, classes, f"data: {folder}")
    first = decode(files[0], section.image_size, str(files[0]))
    if first.numel() * len(files) > IN_MEMORY_BYTES:
        if section.image_size is None:
            raise DataError("data.image_size: needed for images that do not fit in memory, such as [224, 224]")
        workers = section.workers if section.workers is not None else sensible_workers()
        return Table(str(folder), dataset=ImageFiles(files, labels, section.image_size), workers=workers), classes
    images = [decode(file, section.image_size, str(file)) for file in files]
    return Table(str(folder), stacked(images, [str(file) for file in files]), labels), classes


def stacked(images: list[Tensor], names: list[str]) -> Tensor:
    """Images as one tensor, with three channels each if any has color. Raises DataError, naming two images, if sizes differ."""
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


def sensible_workers() -> int:
    """The number of loader processes if none is set: one for each processor but the first, up to 8."""
    return max(0, min(8, (os.cpu_count() or 1) - 1))
