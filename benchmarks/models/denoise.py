"""DnCNN, which removes noise from grayscale images, and patches of the images that it was trained and tested on.

The network is that of Zhang et al. 2017 (DnCNN-S, 17 layers, noise of 25 of 255), with the names of the weights in
SaoYan/DnCNN-PyTorch (GPL-3), which also holds the images: 400 of BSD for training, Set12, and the 68 that others report
(BSD68). Neither is part of this repository:

    git clone --depth 1 https://github.com/SaoYan/DnCNN-PyTorch dncnn
    ... --weights dncnn/logs/DnCNN-S-25/net.pth --data-arg folder=dncnn/data

The weights were trained on the 400 images, so Set12 is used for choices, and BSD68 is reported.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

NOISE = 25 / 255
PATCH = 40


class DnCNN(nn.Module):
    """Noisy images in 0 to 1 (N, 1, H, W) -> the noise in them."""

    def __init__(self, layers: int = 17, width: int = 64) -> None:
        super().__init__()
        made: list[nn.Module] = [nn.Conv2d(1, width, 3, padding=1, bias=False), nn.ReLU(inplace=True)]
        for _ in range(layers - 2):
            made += [nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
        self.dncnn = nn.Sequential(*made, nn.Conv2d(width, 1, 3, padding=1, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        """The noise."""
        return self.dncnn(x)


def dncnn() -> nn.Module:
    """DnCNN with 557 thousand parameters and 0.9 G multiply-accumulates for a patch of 40 x 40."""
    return DnCNN()


def images(folder: Path) -> list[Tensor]:
    """Grayscale images in 0 to 1, (1, H, W) each, in the order of their names."""
    files = sorted(folder.glob("*.png"))
    return [torch.from_numpy(np.asarray(Image.open(file).convert("L"), np.float32) / 255)[None] for file in files]


def noisy(clean: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """(image with noise, the noise)."""
    noise = NOISE * torch.randn(clean.shape, generator=generator)
    return clean + noise, noise


def patches(folder: Path, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Noisy patches (count, 1, 40, 40) from random places of all images, randomly rotated and mirrored; and the noise."""
    pictures, generator = images(folder), torch.Generator().manual_seed(seed)
    found = torch.empty(count, 1, PATCH, PATCH)
    for row in range(count):
        which, top, left, turns, mirrored = (int(each) for each in torch.randint(2**31, (5,), generator=generator))
        picture = pictures[which % len(pictures)]
        top, left = (place % (size - PATCH + 1) for place, size in zip((top, left), picture.shape[1:], strict=True))
        piece = picture[:, top : top + PATCH, left : left + PATCH].rot90(turns % 4, (1, 2))
        found[row] = piece.flip(2) if mirrored % 2 else piece
    return noisy(found, generator)


def data(folder: str, train: int = 20_000, held: int = 2_000) -> dict[str, tuple[Tensor, Tensor]]:
    """Patches and their noise: of the 400 images for training, of Set12 for choices, and of BSD68 to report."""
    places = {"train": ("train", train), "validation": ("Set12", held), "test": ("Set68", held)}
    return {part: patches(Path(folder) / name, count, seed) for seed, (part, (name, count)) in enumerate(places.items())}


@torch.no_grad()
def psnr(model: nn.Module, folder: Path, device: torch.device | str = "cpu", count: int | None = None) -> Tensor:
    """Peak signal-to-noise ratio in dB of each whole image (N,), with noise that is always the same."""
    found, generator = [], torch.Generator().manual_seed(25)
    for clean in images(folder)[:count]:
        image, _ = noisy(clean, generator)
        cleaned = (image - model(image[None].to(device))[0].float().cpu()).clamp(0, 1)
        found.append(-10 * (cleaned - clean).square().mean().log10())
    return torch.stack(found).double()
