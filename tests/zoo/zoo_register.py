"""Small networks of many kinds: {name: (factory, example inputs)}; the register and how inputs are made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

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
