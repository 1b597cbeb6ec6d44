"""Images: decoded in one way wherever they come from, and folders of classes."""

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
"""What Pillow may take a file for, whatever its name: others run programs (EPS), or are seldom used and seldom tested."""

MOST_PIXELS = 2**26
"""Pixels of one image; a small file can promise any number."""

CHANNELS = (1, 3, 4)
"""Of grey images, of coloured ones, and of coloured ones with their opacity."""

IN_MEMORY_BYTES = 2**30
"""Folders whose decoded images are larger than this are read anew in each epoch, by loader processes."""


def channels_last(inputs: Any) -> str:
    """What to say of images that a model fails on, where they seem to lie as (N, H, W, C); "" for all else."""
    last = isinstance(inputs, Tensor) and inputs.dim() == 4 and inputs.shape[3] in CHANNELS and inputs.shape[1] not in CHANNELS
    return ". (N, H, W, C)? PyTorch takes (N, C, H, W): x.transpose(0, 3, 1, 2)" if last else ""


def decode(content: bytes | Path, size: tuple[int, int] | None, origin: str) -> Tensor:
    """One image as bytes (C, H, W), C 1 for grey and 3 for colour; size: (height, width) to resize to.

    Raises DataError that names the file if it is not an image.
    """
    image_module = optional("PIL.Image", "pillow", "images")
    try:
        source = io.BytesIO(content) if isinstance(content, bytes) else content
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of sizes, which are looked at here, and of damaged notes beside the pixels
            with image_module.open(source, formats=FORMATS) as image:
                width, height = image.size
                if width * height > MOST_PIXELS:
                    raise DataError(
                        f"data: {origin}: {width:,} x {height:,}; images of at most {MOST_PIXELS:,} pixels are read"
                    )
                return pixels(image, size)
    except DataError:
        raise
    except Exception as error:  # Pillow has many kinds for damaged files, its error for bombs among them
        reason = shortened(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
        raise DataError(f"data: {origin}: not a readable image ({reason})") from error


def pixels(image: Any, size: tuple[int, int] | None) -> Tensor:
    """A Pillow image as bytes (C, H, W), C 1 for grey and 3 for colour; size: (height, width) to resize to, bilinearly.

    Grey images of more than 8 bits keep their upper 8 (Pillow's own conversion would make all above 255 white).
    """
    image_module = optional("PIL.Image", "pillow", "images")
    if image.mode.startswith("I"):
        values = np.asarray(image)
        wide = image.mode != "I" or values.max(initial=0) > 255  # 16-bit files come as I in some versions of Pillow
        image = image_module.fromarray((values // 256 if wide else values).clip(0, 255).astype(np.uint8))
    image = image.convert("L" if image.mode in ("1", "L", "F") else "RGB")
    if size is not None and image.size != (size[1], size[0]):
        image = image.resize((size[1], size[0]), image_module.Resampling.BILINEAR)
    array = torch.from_numpy(np.array(image))
    return array.unsqueeze(0) if array.dim() == 2 else array.permute(2, 0, 1).contiguous()


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
        raise DataError(f"data: {folder}: no images in class folders below it")
    names = [file.relative_to(folder).parts[0] for file in files]
    if any(file.parent == folder for file in files):
        raise DataError(f"data: {folder}: images lie beside the class folders; each belongs into the folder of its class")
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
    """Images as one tensor, grey ones in colour among coloured ones. Raises DataError for sizes that differ, naming two."""
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
    """Loader processes where nobody says how many: as many as there are further processors, up to 8."""
    return max(0, min(8, (os.cpu_count() or 1) - 1))
