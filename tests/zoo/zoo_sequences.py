"""Recurrent networks, transformers, gated networks, and unusual inputs and outputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from zoo_register import entry, image

# Sequences


class LSTMClassifier(nn.Module):
    def __init__(self, kind: type[nn.Module] = nn.LSTM) -> None:
        super().__init__()
        self.embed, self.project = nn.Embedding(30, 12), nn.Linear(12, 16)
        self.rnn = kind(16, 10, batch_first=True)
        self.fc1, self.fc2 = nn.Linear(10, 14), nn.Linear(14, 3)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = torch.relu(self.project(self.embed(ids)))
        out, _ = self.rnn(hidden)
        return self.fc2(torch.relu(self.fc1(out[:, -1])))


@entry("lstm", lambda: torch.randint(0, 30, (3, 6)))
def lstm() -> nn.Module:
    return LSTMClassifier()


@entry("gru", lambda: torch.randint(0, 30, (3, 6)))
def gru() -> nn.Module:
    return LSTMClassifier(nn.GRU)


class Attention(nn.Module):
    """As in timm: one projection to q, k and v, and `num_heads` in a reshape."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = heads, dim // heads
        self.attn_dim = dim
        self.scale = self.head_dim**-0.5
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(x).reshape(batch, length, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        attention = (q * self.scale) @ k.transpose(-2, -1)
        x = attention.softmax(dim=-1) @ v
        return self.proj(x.transpose(1, 2).reshape(batch, length, self.attn_dim))


class EncoderBlock(nn.Module):
    def __init__(self, dim: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(dim), Attention(dim, heads), nn.LayerNorm(dim)
        self.fc1, self.fc2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class TimmViT(nn.Module):
    def __init__(self, dim: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, dim, 4, 4)
        self.cls, self.pos = nn.Parameter(torch.randn(1, 1, dim)), nn.Parameter(torch.randn(1, 17, dim))
        self.blocks = nn.Sequential(EncoderBlock(dim, heads, 32), EncoderBlock(dim, heads, 32))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], 1) + self.pos
        return self.head(self.norm(self.blocks(x))[:, 0])


@entry("timm-vit", image())
def timm_vit() -> nn.Module:
    return TimmViT()


@entry("torch-transformer", lambda: torch.randn(2, 5, 16))
def torch_transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 4, 24, batch_first=True)
    return nn.Sequential(nn.Linear(16, 16), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(16, 3))


class Mixer(nn.Module):
    def __init__(self, patches: int = 9, dim: int = 12) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, dim, 2, 2), nn.BatchNorm1d(patches)
        self.token1, self.token2 = nn.Linear(patches, 14), nn.Linear(14, patches)
        self.channel1, self.channel2, self.head = nn.Linear(dim, 20), nn.Linear(20, dim), nn.Linear(dim, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).flatten(2).transpose(1, 2)
        x = x + self.token2(F.gelu(self.token1(self.norm(x).transpose(1, 2)))).transpose(1, 2)
        return self.head((x + self.channel2(F.gelu(self.channel1(x)))).mean(1))


@entry("mixer", image(6))
def mixer() -> nn.Module:
    return Mixer()


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(10, 16), nn.Linear(10, 16, bias=False), nn.Linear(16, 10)
        self.both, self.out = nn.Linear(10, 24), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(F.silu(self.gate(x)) * self.up(x))
        return self.out(F.glu(self.both(x), -1))


@entry("gated-mlp", lambda: torch.randn(3, 4, 10))
def gated() -> nn.Module:
    return Gated()


# Unusual inputs and outputs


@dataclass
class Result:
    scores: Tensor
    hidden: Tensor
    note: str = "not a tensor"


class TwoTowers(nn.Module):
    """Two keyword inputs, one reused module, tied weights, a frozen layer, a dataclass with two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.shared = nn.Linear(6, 12), nn.Linear(4, 12), nn.Linear(12, 12)
        self.frozen = nn.Linear(12, 9).requires_grad_(False)
        self.encode, self.decode = nn.Linear(9, 9, bias=False), nn.Linear(9, 9, bias=False)
        self.decode.weight = self.encode.weight
        self.score, self.aux = nn.Linear(9, 2), nn.Linear(12, 3)

    def forward(self, *, a: Tensor, b: Tensor) -> Result:
        x = torch.relu(self.shared(torch.relu(self.left(a)))) + torch.relu(self.shared(torch.relu(self.right(b))))
        y = self.decode(torch.relu(self.encode(torch.tanh(self.frozen(x)))))
        return Result(self.score(y), self.aux(x))


@entry("two-towers", lambda: {"a": torch.randn(3, 6), "b": torch.randn(3, 4)})
def two_towers() -> nn.Module:
    return TwoTowers()
