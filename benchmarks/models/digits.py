"""Small networks for scikit-learn's digits, (N, 1, 8, 8) -> (N, 10), and the data they are trained on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Split = tuple[Tensor, Tensor]


def data() -> tuple[Split, Split]:
    """1,200 digits to train on and the other 597, drawn with a fixed seed."""
    from sklearn.datasets import load_digits

    digits: Any = load_digits()
    x, y = torch.tensor(digits.images / 16, dtype=torch.float32)[:, None], torch.tensor(digits.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return (x[order[:1200]], y[order[:1200]]), (x[order[1200:]], y[order[1200:]])


def mlp() -> nn.Module:
    """Two hidden layers of 200 and 100 units."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 200), nn.ReLU(), nn.Linear(200, 100), nn.ReLU(), nn.Linear(100, 10)
    )  # fmt: skip


def mlp_with_dropout(p: float) -> nn.Module:
    """`mlp` with dropout after both hidden layers."""
    hidden = nn.Linear(64, 200), nn.ReLU(), nn.Dropout(p), nn.Linear(200, 100), nn.ReLU(), nn.Dropout(p)
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(100, 10))


def cnn() -> nn.Module:
    """Three 3x3 convolutions with batch normalization, and a mean over positions."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((1, 32), (32, 64), (64, 64)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    layers.insert(6, nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


class Block(nn.Module):
    """Attention and a feed-forward network, each after a LayerNorm and with a skip connection; (N, T, width) -> the same."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """One block."""
        y = self.norm1(x)
        q, k, v = (layer(y).view(*y.shape[:2], self.heads, -1).transpose(1, 2) for layer in (self.query, self.key, self.value))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """A transformer that reads an image's eight rows as tokens."""

    def __init__(self, width: int = 48, blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.places = nn.Parameter(torch.randn(8, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.head(self.norm(self.blocks(self.embed(x[:, 0]) + self.places)).mean(1))


def transformer() -> nn.Module:
    """Two blocks of width 48."""
    return Transformer()


NETS = {"mlp": mlp, "cnn": cnn, "transformer": transformer}
