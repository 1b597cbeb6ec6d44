"""Small networks of many kinds: {name: (factory, example inputs)}. What torchvision and timm have is written out here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ZOO: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {}


def entry(name: str, inputs: Callable[[], Any]) -> Callable:
    """Register a factory."""

    def register(factory: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        ZOO[name] = (factory, inputs)
        return factory

    return register


def image(size: int = 16, channels: int = 3) -> Callable[[], Tensor]:
    return lambda: torch.randn(2, channels, size, size)


def flat(features: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(3, features)


def tokens(length: int = 7, words: int = 50) -> Callable[[], dict[str, Tensor]]:
    return lambda: {
        "input_ids": torch.randint(3, words, (2, length)),
        "attention_mask": torch.ones(2, length, dtype=torch.long),
    }


# Chains


@entry("mlp", flat(20))
def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Dropout(), nn.Linear(30, 24), nn.BatchNorm1d(24), nn.Tanh(), nn.Linear(24, 5))


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
        *(nn.Unflatten(1, (8, 4, 4)), nn.ConvTranspose2d(8, 6, 2, 2), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 1, 3, padding=1)),
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


def _net(*body: nn.Module, channels: int, classes: int = 5, stem: int = 8) -> nn.Module:
    first = (nn.Conv2d(3, stem, 3, padding=1, bias=False), nn.BatchNorm2d(stem), nn.ReLU())
    return nn.Sequential(*first, *body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


@entry("resnet-basic", image())
def resnet_basic() -> nn.Module:
    return _net(Block(8, 8), Block(8, 16, 2), Block(16, 16), channels=16)


@entry("resnet-bottleneck", image())
def resnet_bottleneck() -> nn.Module:
    return _net(Bottleneck(8, 6, 24), Bottleneck(24, 8, 32, 2), channels=32)


@entry("resnext", image())
def resnext() -> nn.Module:
    return _net(Bottleneck(8, 16, 24, groups=4), Bottleneck(24, 16, 32, 2, groups=4), channels=32)


@entry("regnet-y", image())
def regnet() -> nn.Module:
    return _net(Bottleneck(8, 16, 24, groups=2, squeeze=4), Bottleneck(24, 24, 32, 2, groups=3, squeeze=6), channels=32)


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
    return _net(Preactivation(8, 12), Preactivation(12, 16), nn.ReLU(), channels=16)


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
    return _net(Res2Block(16), channels=16, stem=16)


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
    return _net(Inverted(8, 24, 8, nn.ReLU6), Inverted(8, 24, 12, nn.ReLU6), Inverted(12, 36, 12, nn.ReLU6), channels=12)


@entry("mobilenet-v3", image())
def mobilenet_v3() -> nn.Module:
    return _net(Inverted(8, 24, 8, nn.Hardswish, 6), Inverted(8, 24, 12, nn.Hardswish, 6), channels=12)


@entry("efficientnet-like", image())
def efficientnet() -> nn.Module:
    return _net(Inverted(8, 24, 8, nn.SiLU, 4), Inverted(8, 32, 16, nn.SiLU, 4), Inverted(16, 32, 16, nn.SiLU, 4), channels=16)


@entry("depthwise-multiplier", image())
def multiplier() -> nn.Module:
    return _net(nn.Conv2d(8, 24, 3, padding=1, groups=8), nn.BatchNorm2d(24), nn.ReLU(), nn.Conv2d(24, 8, 1), nn.ReLU(), channels=8)


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
    return _net(DenseLayer(8, 6), DenseLayer(14, 6), *transition, DenseLayer(10, 6), nn.BatchNorm2d(16), nn.ReLU(), channels=16)


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
    return _net(ShuffleUnit(16), ShuffleUnit(16), nn.Conv2d(16, 24, 1), nn.ReLU(), channels=24, stem=16)


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
        return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.Conv2d(b, b, 3, padding=1), nn.ReLU())

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
    """As timm writes it: one projection to q, k and v, and `num_heads` in a reshape."""

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


# Ways in and out


@dataclass
class Result:
    scores: Tensor
    hidden: Tensor
    note: str = "not a tensor"


class TwoTowers(nn.Module):
    """Two keyword inputs, one reused module, tied weights, a frozen layer, a dataclass of two outputs."""

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


# From transformers, small and random


def _from(name: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    def factory() -> nn.Module:
        import transformers

        return getattr(transformers, name)(getattr(transformers, config)(**settings)).eval()

    return factory


_ENCODER = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
_TEXT = {**_ENCODER, "vocab_size": 50, "max_position_embeddings": 32}
_PICTURE = {"image_size": 16, "patch_size": 4, "num_labels": 4}
_HF = {
    "hf-bert": (_from("BertForSequenceClassification", "BertConfig", **_TEXT), tokens()),
    "hf-distilbert": (
        _from(
            "DistilBertForSequenceClassification",
            "DistilBertConfig",
            **{"vocab_size": 50, "dim": 16, "n_layers": 2, "n_heads": 4, "hidden_dim": 24, "max_position_embeddings": 32},
        ),
        tokens(),
    ),
    "hf-gpt2": (
        _from("GPT2LMHeadModel", "GPT2Config", vocab_size=50, n_embd=16, n_layer=2, n_head=4, n_positions=32, use_cache=False),
        tokens(),
    ),
    "hf-llama": (
        _from("LlamaForCausalLM", "LlamaConfig", **{**_TEXT, "num_key_value_heads": 2, "use_cache": False}),
        tokens(),
    ),
    "hf-vit": (_from("ViTForImageClassification", "ViTConfig", **_ENCODER, **_PICTURE), image()),
    "hf-swin": (
        _from(
            "SwinForImageClassification",
            "SwinConfig",
            **{"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [2, 1], "num_heads": [2, 4], "window_size": 4},
        ),
        image(),
    ),
    "hf-convnext": (
        _from("ConvNextForImageClassification", "ConvNextConfig", hidden_sizes=[8, 12], depths=[1, 1], num_stages=2),
        image(),
    ),
    "hf-resnet": (
        _from("ResNetForImageClassification", "ResNetConfig", embedding_size=8, hidden_sizes=[16, 24], depths=[1, 2]),
        image(),
    ),
    "hf-regnet": (
        _from("RegNetForImageClassification", "RegNetConfig", hidden_sizes=[16, 24], depths=[1, 1], groups_width=4, embedding_size=8),
        image(),
    ),
    "hf-mobilenet-v2": (
        _from("MobileNetV2ForImageClassification", "MobileNetV2Config", depth_multiplier=0.25, image_size=32),
        image(32),
    ),
    "hf-efficientnet": (
        _from(
            "EfficientNetForImageClassification",
            "EfficientNetConfig",
            **{"image_size": 32, "width_coefficient": 0.25, "depth_coefficient": 0.25, "hidden_dim": 320},
        ),
        image(32),
    ),
}
ZOO.update(_HF)
