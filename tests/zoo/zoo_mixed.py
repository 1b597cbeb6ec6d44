"""Depthwise, concatenating, shuffling and up-sampling networks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from zoo_register import entry, image
from zoo_residual import SqueezeExcite, classifier

# Depthwise, dense, shuffled


class Inverted(nn.Module):
    def __init__(self, inside: int, hidden: int, outside: int, act: Callable[[], nn.Module], squeeze: int = 0) -> None:
        super().__init__()
        layers = [
            *(nn.Conv2d(inside, hidden, 1, bias=False), nn.BatchNorm2d(hidden), act()),
            *(nn.Conv2d(hidden, hidden, 3, 1, 1, groups=hidden, bias=False), nn.BatchNorm2d(hidden), act()),
        ]
        if squeeze:
            layers.append(SqueezeExcite(hidden, squeeze))
        layers += [nn.Conv2d(hidden, outside, 1, bias=False), nn.BatchNorm2d(outside)]
        self.layers = nn.Sequential(*layers)
        self.residual = inside == outside

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x) if self.residual else self.layers(x)


@entry("mobilenet-v2", image())
def mobilenet_v2() -> nn.Module:
    return classifier(Inverted(8, 24, 8, nn.ReLU6), Inverted(8, 24, 12, nn.ReLU6), Inverted(12, 36, 12, nn.ReLU6), channels=12)


@entry("mobilenet-v3", image())
def mobilenet_v3() -> nn.Module:
    return classifier(Inverted(8, 24, 8, nn.Hardswish, 6), Inverted(8, 24, 12, nn.Hardswish, 6), channels=12)


@entry("efficientnet-like", image())
def efficientnet() -> nn.Module:
    return classifier(
        Inverted(8, 24, 8, nn.SiLU, 4), Inverted(8, 32, 16, nn.SiLU, 4), Inverted(16, 32, 16, nn.SiLU, 4), channels=16
    )


@entry("depthwise-multiplier", image())
def multiplier() -> nn.Module:
    return classifier(
        nn.Conv2d(8, 24, 3, padding=1, groups=8), nn.BatchNorm2d(24), nn.ReLU(), nn.Conv2d(24, 8, 1), nn.ReLU(), channels=8
    )


class DenseLayer(nn.Module):
    def __init__(self, inside: int, growth: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(inside), nn.Conv2d(inside, 2 * growth, 1, bias=False)
        self.norm2, self.conv2 = nn.BatchNorm2d(2 * growth), nn.Conv2d(2 * growth, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.conv2(F.relu(self.norm2(self.conv1(F.relu(self.norm1(x))))))], 1)


@entry("densenet", image())
def densenet() -> nn.Module:
    transition = (nn.BatchNorm2d(20), nn.ReLU(), nn.Conv2d(20, 10, 1, bias=False), nn.AvgPool2d(2))
    return classifier(
        DenseLayer(8, 6), DenseLayer(14, 6), *transition, DenseLayer(10, 6), nn.BatchNorm2d(16), nn.ReLU(), channels=16
    )


class ShuffleUnit(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        half = channels // 2
        self.branch = nn.Sequential(
            *(nn.Conv2d(half, half, 1, bias=False), nn.BatchNorm2d(half), nn.ReLU()),
            *(nn.Conv2d(half, half, 3, 1, 1, groups=half, bias=False), nn.BatchNorm2d(half)),
            *(nn.Conv2d(half, half, 1, bias=False), nn.BatchNorm2d(half), nn.ReLU()),
        )

    def forward(self, x: Tensor) -> Tensor:
        left, right = x.chunk(2, 1)
        x = torch.cat([left, self.branch(right)], 1)
        batch, channels, height, width = x.shape
        x = x.view(batch, 2, channels // 2, height, width).transpose(1, 2).contiguous()
        return x.view(batch, channels, height, width)


@entry("shufflenet", image())
def shufflenet() -> nn.Module:
    return classifier(ShuffleUnit(16), ShuffleUnit(16), nn.Conv2d(16, 24, 1), nn.ReLU(), channels=24, stem=16)


class Inception(nn.Module):
    def __init__(self, inside: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(inside, 4, 1)
        self.three = nn.Sequential(nn.Conv2d(inside, 6, 1), nn.ReLU(), nn.Conv2d(6, 8, 3, padding=1))
        self.pool = nn.Sequential(nn.MaxPool2d(3, 1, 1), nn.Conv2d(inside, 4, 1))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(torch.cat([self.one(x), self.three(x), self.pool(x)], 1))


@entry("inception", image(8))
def inception() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), Inception(8), Inception(16), nn.Flatten(), nn.Linear(16 * 36, 5))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = self._pair(3, 8), self._pair(8, 16)
        self.up = nn.ConvTranspose2d(16, 8, 2, 2)
        self.out1, self.out = self._pair(16, 8), nn.Conv2d(8, 2, 1)

    @staticmethod
    def _pair(a: int, b: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.Conv2d(b, b, 3, padding=1), nn.ReLU()
        )

    def forward(self, x: Tensor) -> Tensor:
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        return self.out(self.out1(torch.cat([a, self.up(b)], 1)))


@entry("unet", image(8))
def unet() -> nn.Module:
    return UNet()


@entry("super-resolution", image(6))
def super_resolution() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 12, 3, padding=1), nn.PReLU(12), nn.Conv2d(12, 16, 3, padding=1), nn.PixelShuffle(2)),
        *(nn.ReLU(), nn.Conv2d(4, 3, 3, padding=1)),
    )


class InputFirst(nn.Module):
    """The raw input comes first in a concatenation, and again after a flatten."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.mix, self.head = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(9, 8, 1), nn.Linear(3 * 36 + 8 * 36, 4)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.mix(torch.cat([x, F.relu(self.conv(x))], 1)))
        return self.head(torch.cat([x.flatten(1), out.permute(0, 2, 3, 1).flatten(1).flip(1)], 1))


@entry("input-first", image(6))
def input_first() -> nn.Module:
    return InputFirst()
