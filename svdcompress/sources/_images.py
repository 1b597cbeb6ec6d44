"""Images: which files are images, and one way of decoding for all sources."""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from svdcompress.errors import DataError, shortened
from svdcompress.sources._raw import optional

SUFFIXES = (".jpg", ".jpeg", ".jfif", ".png", ".bmp", ".webp", ".ppm", ".pgm", ".tif", ".tiff", ".gif")
FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "PPM", "TIFF", "GIF")
"""Formats that Pillow may decode, whatever a file's name: others run programs (EPS), or are rarely used and rarely tested."""

MOST_PIXELS = 2**26
"""Most pixels that an image may have, as a small file can claim any number."""

NO_IMAGES = ("__MACOSX", "@eaDir")
"""Folders that systems put beside images, with files of the same names."""

CHANNELS = (1, 3, 4)
"""Channels of gray images, of color images, and of color images with opacity."""

LOOKED_AT = 20_000
"""The most images whose headers are read before training; of more, evenly spaced ones."""

ORIENTATION = 274
"""The EXIF tag for how the camera was held; 1 is upright."""


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
    except DataError as error:
        raise error if origin in str(error) else DataError(f"data: {origin}: {error}") from None
    except Exception as error:  # Pillow raises many kinds of errors, also for decompression bombs
        reason = shortened(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
        raise DataError(f"data: {origin}: not a readable image ({reason})") from error


def pixels(image: Any, size: tuple[int, int] | None) -> Tensor:
    """A Pillow image as bytes (C, H, W), C 1 for gray and 3 for color; size: (height, width) to resize to, bilinearly.

    Gray images of 16 bits keep the upper 8 (Pillow's own conversion would turn all values above 255 white); 32-bit integers
    are taken for 8 bits if none is above 255, else for 16. Raises DataError for numbers without a known range: floating-point
    pixels, and integers above 65,535.
    """
    image_module = optional("PIL.Image", "pillow", "images")
    if image.mode == "F":
        raise DataError("floating-point pixels have no known range: store 8 or 16 bits, or arrays (npz)")
    if image.mode.startswith("I"):
        values = np.asarray(image)
        most, wide = int(values.max(initial=0)), image.mode != "I" or image.format in ("PNG", "PPM")  # 16 bits at most
        if most > 65_535:
            raise DataError("32-bit pixels above 65,535 have no known range: store 8 or 16 bits, or arrays (npz)")
        image = image_module.fromarray((values // 256 if wide or most > 255 else values).clip(0, 255).astype(np.uint8))
    image = image.convert("L" if image.mode in ("1", "L") else "RGB")
    if size is not None and image.size != (size[1], size[0]):
        image = image.resize((size[1], size[0]), image_module.Resampling.BILINEAR)
    array = torch.from_numpy(np.array(image))
    return array.unsqueeze(0) if array.dim() == 2 else array.permute(2, 0, 1).contiguous()


def image_files(folder: Path) -> list[Path]:
    """All image files below a folder, sorted by path; links are followed, and names that begin with a dot left out."""
    return sorted(path for path in files_below(folder) if is_image(path) and os.path.isfile(path))


def is_image(path: Path) -> bool:
    """Whether a file has the suffix of an image that is read."""
    return path.suffix.lower() in SUFFIXES


def files_below(folder: Path) -> Iterator[Path]:
    """All files below a folder, links to nothing among them. Links to folders are followed, each folder once on a way down."""
    above: dict[str, frozenset[str]] = {str(folder): frozenset([os.path.realpath(folder)])}
    for place, folders, files in os.walk(folder, followlinks=True):
        known = above.pop(place)
        named = [name for name in folders if not name.startswith(".") and name not in NO_IMAGES]
        real = {name: os.path.realpath(os.path.join(place, name)) for name in named}
        folders[:] = sorted(name for name, path in real.items() if path not in known)
        above |= {os.path.join(place, name): known | {real[name]} for name in folders}
        yield from (Path(place, name) for name in files if not name.startswith("."))


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


@dataclass(frozen=True)
class Seen:
    """What the headers of image files say.

    looked: how many were read. channels: 3 if any image is in color, else 1. wide: whether any has more than 8 bits. warnings:
    about rotated images.
    """

    looked: int = 0
    channels: int = 1
    wide: bool = False
    warnings: tuple[str, ...] = ()


def look_at(files: Sequence[Path]) -> Seen:
    """Read the headers of image files; those that cannot be read are left out, as decoding them will say why."""
    image_module = optional("PIL.Image", "pillow", "images")
    color, wide, turned = False, False, []
    some = spread(len(files), LOOKED_AT)
    for index in some:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with image_module.open(files[index], formats=FORMATS) as image:
                    more = image.mode.startswith("I")
                    color, wide = color or not (more or image.mode in ("1", "L", "F")), wide or more
                    exif = image_module.Image.getexif(image)  # that of a PNG would decode it
                    if image.format != "TIFF" and exif.get(ORIENTATION, 1) != 1:  # Pillow turns TIFFs itself
                        turned.append(files[index])
        except Exception:  # nosec B112
            continue
    said = ()
    if turned:
        others = f" and {len(turned) - 1:,} more" if len(turned) > 1 else ""
        said = (
            f"data: {turned[0]}{others}: stored rotated or mirrored (EXIF orientation), and read as stored, as torchvision "
            "does; the datasets package (hf:) turns images upright. If the network was trained on upright ones, turn the files "
            "(such as mogrify -auto-orient)",
        )
    return Seen(len(some), 3 if color else 1, wide, said)


def spread(count: int, most: int) -> list[int]:
    """Up to `most` evenly spaced numbers below count."""
    return [index * count // most for index in range(most)] if count > most else list(range(count))
