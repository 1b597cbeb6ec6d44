"""Attention as in LeViT, EfficientFormer and TinyViT: positional biases that the module caches between passes, a key as long as
the number of heads, and queries, keys and values in pieces of different lengths."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

import svdcompress as svdc


class Attention(nn.Module):
    def __init__(self, width: int = 12, heads: int = 4, key_dim: int = 8, ratio: int = 2, places: int = 5) -> None:
        super().__init__()
        self.num_heads, self.key_dim, self.val_dim = heads, key_dim, ratio * key_dim
        self.val_attn_dim = self.val_dim * heads
        self.qkv = nn.Linear(width, self.val_attn_dim + 2 * key_dim * heads)
        self.proj = nn.Linear(self.val_attn_dim, width)
        self.attention_biases = nn.Parameter(torch.randn(heads, places))
        offsets = (torch.arange(places)[:, None] - torch.arange(places)).abs()
        self.register_buffer("attention_bias_idxs", offsets, persistent=False)
        self.kept: dict[str, Tensor] = {}

    @torch.no_grad()
    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        if mode:
            self.kept = {}
        return self

    def biases(self) -> Tensor:
        if self.training:
            return self.attention_biases[:, self.attention_bias_idxs]
        if "cpu" not in self.kept:
            self.kept["cpu"] = self.attention_biases[:, self.attention_bias_idxs]
        return self.kept["cpu"]

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        parts = self.qkv(x).view(b, n, self.num_heads, -1).split([self.key_dim, self.key_dim, self.val_dim], 3)
        q, k, v = parts[0].permute(0, 2, 1, 3), parts[1].permute(0, 2, 3, 1), parts[2].permute(0, 2, 1, 3)
        attention = (q @ k * self.key_dim**-0.5 + self.biases()).softmax(-1)
        return self.proj(torch.nn.functional.hardswish((attention @ v).transpose(1, 2).reshape(b, n, self.val_attn_dim)))


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.attention, self.out = nn.Linear(6, 12), Attention(), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        return self.out(x + self.attention(x))


def test_heads_go_with_the_biases_that_are_kept() -> None:
    """Two examples with four heads give eight, which is the key's length too."""
    torch.manual_seed(0)
    dense: Any = Network().eval()
    with torch.no_grad():
        dense(torch.randn(2, 5, 6))  # the biases are cached from here on
    masks = {name: torch.ones_like(dense.get_submodule(name).weight, dtype=torch.bool) for name in ("into", "out")}
    for name in ("qkv", "proj"):
        masks[f"attention.{name}"] = torch.rand(getattr(dense.attention, name).weight.shape) > 0.2
    masks["attention.proj"][:, 16:32] = False  # the second head's values
    oracle = copy.deepcopy(dense)
    with torch.no_grad():
        for name, mask in masks.items():
            oracle.get_submodule(name).weight.mul_(mask)
    small: Any = svdc.prune(svdc.convert(copy.deepcopy(dense)), torch.randn(2, 5, 6), masks=masks).eval()
    assert small.attention.num_heads == 3 and small.attention.key_dim == 8
    assert small.attention.attention_biases.shape == (3, 5)
    assert small.attention.proj.in_features == 48 and small.attention.qkv.out_features == 96
    for x in (torch.randn(2, 5, 6), torch.randn(3, 5, 6)):
        with torch.no_grad():
            assert torch.allclose(small(x), oracle(x), atol=1e-5)

    wide = svdc.to_dense(small)
    x = torch.randn(4, 5, 6)
    for model in (wide, oracle):
        model.train()
        model(x).square().sum().backward()
    living = [0, 2, 3]
    assert torch.allclose(
        wide.attention.attention_biases.grad, oracle.attention.attention_biases.grad[living], rtol=1e-3, atol=1e-5
    )
