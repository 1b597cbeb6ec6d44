"""Some of CIFAR-10's images for a network that was trained on all of them, and the test images in two fixed halves."""

from __future__ import annotations

import io
import os
import random
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""The values by which akamaster/pytorch_resnet_cifar10 normalizes."""

Split = tuple[Tensor, Tensor]


def archive(path: Path, count: int | None = None) -> Split:
    """Images as bytes (N, 3, 32, 32) and classes (N,) of an archive of class folders: all, or a fixed sample of `count`."""
    with tarfile.open(path) as tar:
        found = sorted((member for member in tar if member.isfile()), key=lambda member: member.name)
        names = sorted({Path(member.name).parent.name for member in found})
        chosen = found if count is None else random.Random(0).sample(found, count)
        images, labels = [], []
        for member in sorted(chosen, key=lambda member: member.offset):
            file = tar.extractfile(member)
            assert file is not None
            images.append(np.asarray(Image.open(io.BytesIO(file.read())).convert("RGB")).transpose(2, 0, 1))
            labels.append(names.index(Path(member.name).parent.name))
    return torch.from_numpy(np.stack(images)), torch.tensor(labels)


def data(folder: str, train: int = 6000, cache: str | None = None) -> tuple[Split, Split, Split]:
    """Training images, one half of the test images (for choices) and the other half (to report).

    folder: where train.tar.gz and test.tar.gz are. cache: a file that keeps the decoded images.
    """
    if cache and Path(cache).is_file():
        kept = np.load(cache)
        if len(kept["y0"]) == train:  # otherwise it was made for another number of images
            parts = [(torch.from_numpy(kept[f"x{i}"]), torch.from_numpy(kept[f"y{i}"])) for i in range(3)]
            return parts[0], parts[1], parts[2]
    x, y = archive(Path(folder) / "test.tar.gz")
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    halves = order[: len(y) // 2], order[len(y) // 2 :]
    parts = [archive(Path(folder) / "train.tar.gz", train), *((x[half], y[half]) for half in halves)]
    if cache:
        arrays: dict[str, Any] = {f"{name}{i}": part[j].numpy() for i, part in enumerate(parts) for j, name in enumerate("xy")}
        own = Path(f"{cache}.{os.getpid()}.npz")  # another process may be writing it, too
        np.savez(own, **arrays)
        own.replace(cache)
    return parts[0], parts[1], parts[2]


def whole(folder: str, cache: str | None = None) -> tuple[Split, Split]:
    """All training images and all test images, for a network that the run trains. The arguments are those of `data`."""
    train, *halves = data(folder, 50_000, cache)
    return train, (torch.cat([half[0] for half in halves]), torch.cat([half[1] for half in halves]))
