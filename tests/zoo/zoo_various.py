"""What the well-known families lack: gates by chunk, branches by softmax, spectra, norms, position-dependent constants."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from zoo_register import entry, image


class ChannelAndPlace(nn.Module):
    """CBAM: a gate for each channel from two poolings, and one for each position from mean and maximum over the channels."""

    def __init__(self, channels: int = 12) -> None:
        super().__init__()
        self.stem, self.out = nn.Conv2d(3, channels, 3, padding=1), nn.Conv2d(channels, 8, 3)
        self.mlp = nn.Sequential(nn.Linear(channels, 6), nn.ReLU(), nn.Linear(6, channels))
        self.place, self.tail, self.head = nn.Conv2d(2, 1, 3, padding=1), nn.Conv2d(8, 10, 1), nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        gate = torch.sigmoid(self.mlp(x.mean((2, 3))) + self.mlp(x.amax((2, 3))))
        x = x * gate[:, :, None, None]
        x = x * torch.sigmoid(self.place(torch.cat([x.mean(1, keepdim=True), x.max(1, keepdim=True)[0]], 1)))
        return self.head(F.relu(self.tail(F.relu(self.out(x)))).mean((2, 3)))


@entry("cbam", image(8))
def cbam() -> nn.Module:
    return ChannelAndPlace()


class Selective(nn.Module):
    """SKNet: a softmax weights the branches; the number of channels is used in a view in the outermost module."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.channels = channels
        self.stem, self.out = nn.Conv2d(3, channels, 1), nn.Conv2d(channels, 3, 1)
        self.near, self.far = nn.Conv2d(channels, channels, 3, padding=1), nn.Conv2d(channels, channels, 5, padding=2)
        self.squeeze, self.choose = nn.Linear(channels, 6), nn.Linear(6, 2 * channels)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        both = torch.stack([F.relu(self.near(x)), F.relu(self.far(x))], 1)
        weights = self.choose(F.relu(self.squeeze(both.sum(1).mean((2, 3))))).view(len(x), 2, self.channels, 1, 1).softmax(1)
        return self.out((both * weights).sum(1))


@entry("sknet", image(8))
def sknet() -> nn.Module:
    return Selective()


class Gates(nn.Module):
    """Three gates by chunk, and a block used three times."""

    def __init__(self) -> None:
        super().__init__()
        self.gates, self.out = nn.Linear(8, 48), nn.Linear(16, 3)
        self.block = nn.Sequential(nn.Linear(16, 20), nn.ReLU(), nn.Linear(20, 16))

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.gates(x).chunk(3, -1)
        x = torch.sigmoid(first) * torch.tanh(second) + F.silu(third)
        for _ in range(3):
            x = x + self.block(F.relu(x))
        return self.out(x)


@entry("chunk-gates", lambda: torch.randn(4, 8))
def gates() -> nn.Module:
    return Gates()


class Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(8, 16), nn.Linear(16, 3)
        self.up, self.down = nn.Linear(16, 20), nn.Linear(20, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.into(x))
        x = x + 0.1 * torch.fft.fft2(x).real
        return self.out(x + self.down(F.relu(self.up(x))))


@entry("fft", lambda: torch.randn(2, 6, 8))
def fft() -> nn.Module:
    return Spectral()


@entry("other-norms", image(8))
def norms() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1, padding_mode="circular"), nn.InstanceNorm2d(8, affine=True), nn.PReLU(8)),
        *(nn.Conv2d(8, 16, 3, padding=1, padding_mode="reflect"), nn.GroupNorm(4, 16), nn.ReLU(), nn.Conv2d(16, 12, 1)),
        *(nn.ReLU(), nn.PixelUnshuffle(2), nn.Conv2d(48, 8, 3), nn.InstanceNorm2d(8), nn.Conv2d(8, 3, 1)),
    )


class WeightNormed(nn.Module):
    """Layers with computed weights stay; the layers after them must not count as constant."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.utils.parametrizations.weight_norm(nn.Linear(6, 12))
        self.b, self.c, self.d = nn.Linear(12, 10), nn.Linear(10, 14), nn.Linear(14, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.d(F.relu(self.c(F.relu(self.b(F.relu(self.a(x)))))))


@entry("weight-norm", lambda: torch.randn(4, 6))
def weight_norm() -> nn.Module:
    return WeightNormed()


@entry("sequence-first", lambda: torch.randn(7, 2, 16))
def sequence_first() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 4, 24)
    return nn.Sequential(nn.Linear(16, 16), nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Linear(16, 3))


class Positions(nn.Module):
    """A dead unit carries its position's embedding: one constant at the first positions, others later on."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.inner, self.out = nn.Linear(6, 12), nn.Linear(12, 8), nn.Linear(8, 3)
        self.places = nn.Parameter(torch.cat([torch.zeros(2, 12), torch.randn(18, 12)]))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.relu(self.inner(self.into(x) + self.places[: len(x)][:, None])))


@entry("positions-first", lambda: torch.randn(10, 3, 6))
def positions() -> nn.Module:
    return Positions()


@entry("mobilenet-small-image", image(4))
def small_image() -> nn.Module:
    """The depthwise convolution sees one pixel here; on larger images it sees several, with a border of zeros."""
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 24, 1), nn.ReLU6(), nn.Conv2d(24, 24, 3, 2, 1, groups=24)),
        *(nn.ReLU6(), nn.Conv2d(24, 10, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(10, 3)),
    )


class Experts(nn.Module):
    """A mixture of experts by index: the inputs of an expert are only known at run time."""

    def __init__(self) -> None:
        super().__init__()
        self.choose, self.into, self.out = nn.Linear(8, 4), nn.Linear(8, 8), nn.Linear(8, 3)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 14), nn.ReLU(), nn.Linear(14, 8)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        shares = self.choose(x).softmax(-1)
        best, out = shares.argmax(-1), torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            at = torch.where(best == i)[0]
            out = out.index_add(0, at, expert(x[at]) * shares[at, i : i + 1])
        return self.out(x + out)


@entry("experts", lambda: torch.randn(9, 8))
def experts() -> nn.Module:
    return Experts()
