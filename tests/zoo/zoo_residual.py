"""Chains and residual networks, written as in torchvision and timm."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from zoo_register import entry, flat, image

# Chains


@entry("mlp", flat(20))
def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(20, 30), nn.ReLU(), nn.Dropout(), nn.Linear(30, 24), nn.BatchNorm1d(24), nn.Tanh(), nn.Linear(24, 5)
    )


@entry("lenet5", image(28, 1))
def lenet5() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 12, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(12 * 16, 40), nn.ReLU(), nn.Linear(40, 10)),
    )


@entry("vgg-bn", image())
def vgg() -> nn.Module:
    layers: list[nn.Module] = []
    channels = 3
    for width in (12, "M", 16, 16, "M"):
        if width == "M":
            layers.append(nn.MaxPool2d(2))
        else:
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
            channels = width
    head = (nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 24), nn.ReLU(True), nn.Dropout(), nn.Linear(24, 10))
    return nn.Sequential(*layers, *head)


@entry("conv1d", lambda: torch.randn(3, 2, 40))
def conv1d() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv1d(2, 12, 5, padding="same"), nn.BatchNorm1d(12), nn.LeakyReLU(), nn.AvgPool1d(2)),
        *(nn.Conv1d(12, 16, 3, padding=1, padding_mode="replicate"), nn.GELU(), nn.Conv1d(16, 16, 3, stride=2), nn.ELU()),
        *(nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(16, 4)),
    )


@entry("conv3d", lambda: torch.randn(2, 2, 6, 6, 6))
def conv3d() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv3d(2, 8, 3, padding=1), nn.BatchNorm3d(8), nn.SiLU(), nn.MaxPool3d(2), nn.Conv3d(8, 8, 3), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(8, 3)),
    )


@entry("autoencoder", image(8, 1))
def autoencoder() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(128, 16), nn.ReLU(), nn.Linear(16, 128), nn.ReLU()),
        *(
            nn.Unflatten(1, (8, 4, 4)),
            nn.ConvTranspose2d(8, 6, 2, 2),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.Conv2d(6, 1, 3, padding=1),
        ),
    )


# Residual nets


class Block(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or inside != outside:
            self.downsample = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


class Bottleneck(nn.Module):
    def __init__(self, inside: int, width: int, outside: int, stride: int = 1, groups: int = 1, squeeze: int = 0) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, groups=groups, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.squeeze = SqueezeExcite(width, squeeze) if squeeze else nn.Identity()
        self.conv3 = nn.Conv2d(width, outside, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outside)
        self.down = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.squeeze(F.relu(self.bn2(self.conv2(out))))
        return F.relu(self.bn3(self.conv3(out)) + self.down(x))


class SqueezeExcite(nn.Module):
    def __init__(self, channels: int, inner: int) -> None:
        super().__init__()
        self.fc1 = nn.Conv2d(channels, inner, 1)
        self.fc2 = nn.Conv2d(inner, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * F.hardsigmoid(self.fc2(F.relu(self.fc1(x.mean((2, 3), keepdim=True)))))


def classifier(*body: nn.Module, channels: int, classes: int = 5, stem: int = 8) -> nn.Module:
    first = (nn.Conv2d(3, stem, 3, padding=1, bias=False), nn.BatchNorm2d(stem), nn.ReLU())
    return nn.Sequential(*first, *body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


@entry("resnet-basic", image())
def resnet_basic() -> nn.Module:
    return classifier(Block(8, 8), Block(8, 16, 2), Block(16, 16), channels=16)


@entry("resnet-bottleneck", image())
def resnet_bottleneck() -> nn.Module:
    return classifier(Bottleneck(8, 6, 24), Bottleneck(24, 8, 32, 2), channels=32)


@entry("resnext", image())
def resnext() -> nn.Module:
    return classifier(Bottleneck(8, 16, 24, groups=4), Bottleneck(24, 16, 32, 2, groups=4), channels=32)


@entry("regnet-y", image())
def regnet() -> nn.Module:
    return classifier(Bottleneck(8, 16, 24, groups=2, squeeze=4), Bottleneck(24, 24, 32, 2, groups=3, squeeze=6), channels=32)


class Preactivation(nn.Module):
    """A residual block with the norm first, and a shortcut padded with zero channels (option A of He et al.)."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(inside), nn.Conv2d(inside, outside, 3, 2, 1)
        self.bn2, self.conv2 = nn.BatchNorm2d(outside), nn.Conv2d(outside, outside, 3, 1, 1)
        self.pad = (outside - inside) // 2

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv2(F.relu(self.bn2(self.conv1(F.relu(self.bn1(x))))))
        return out + F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.pad, self.pad))


@entry("resnet-option-a", image())
def option_a() -> nn.Module:
    return classifier(Preactivation(8, 12), Preactivation(12, 16), nn.ReLU(), channels=16)


class Res2Block(nn.Module):
    def __init__(self, channels: int, scale: int = 4) -> None:
        super().__init__()
        self.width = channels // scale
        self.conv1, self.conv3 = nn.Conv2d(channels, channels, 1), nn.Conv2d(channels, channels, 1)
        self.convs = nn.ModuleList(nn.Conv2d(self.width, self.width, 3, padding=1) for _ in range(scale - 1))

    def forward(self, x: Tensor) -> Tensor:
        pieces = torch.split(F.relu(self.conv1(x)), self.width, 1)
        out = [pieces[0]]
        for conv, piece in zip(self.convs, pieces[1:], strict=True):
            out.append(F.relu(conv(piece + out[-1] if len(out) > 1 else piece)))
        return F.relu(x + self.conv3(torch.cat(out, 1)))


@entry("res2net", image())
def res2net() -> nn.Module:
    return classifier(Res2Block(16), channels=16, stem=16)
