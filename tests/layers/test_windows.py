"""Layers as matrix products: output rows are the inputs listed by `windows`, times the weight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from svdcompress.convert import convert

CASES = {
    "linear": (nn.Linear(5, 3), (7, 5)),
    "linear on tokens": (nn.Linear(5, 3, bias=False), (2, 4, 5)),
    "linear, one example": (nn.Linear(5, 3), (5,)),
    "conv1d": (nn.Conv1d(4, 6, 3, stride=2, padding=1), (3, 4, 11)),
    "conv2d": (nn.Conv2d(3, 5, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2)), (2, 3, 9, 8)),
    "conv2d, groups": (nn.Conv2d(4, 6, 3, padding=1, groups=2, bias=False), (2, 4, 5, 6)),
    "depthwise": (nn.Conv2d(4, 4, 3, groups=4), (2, 4, 5, 6)),
    "conv3d": (nn.Conv3d(2, 3, (1, 2, 3), padding=(0, 1, 1)), (2, 2, 3, 4, 5)),
    "same padding, even kernel": (nn.Conv2d(3, 4, (4, 2), padding="same"), (2, 3, 6, 7)),
    "reflected": (nn.Conv2d(3, 4, 3, padding=2, padding_mode="reflect"), (2, 3, 6, 7)),
    "circular": (nn.Conv1d(3, 4, 3, padding=1, padding_mode="circular"), (2, 3, 6)),
    "channels last": (nn.Conv2d(3, 4, 3, padding=1), (2, 3, 6, 7)),
    "conv2d, one example": (nn.Conv2d(3, 4, 3, padding=1), (3, 6, 7)),
    "convolution of nothing": (nn.Conv2d(3, 4, 3), (0, 3, 6, 7)),
}


@pytest.mark.parametrize("name", CASES)
def test_rows_are_windows_times_the_weight(name: str) -> None:
    torch.manual_seed(0)
    layer, shape = CASES[name]
    model: Any = convert(nn.Sequential(layer), log_sigma2=-40.0).eval()
    converted = model[0].double()
    x = torch.randn(shape, dtype=torch.float64)
    if name == "channels last":
        x = x.to(memory_format=torch.channels_last)
    with torch.no_grad():
        y = converted(x)
    rows = converted.rows(y, x)
    assert rows.numel() == y.numel() and rows.shape[1] == len(layer.weight)
    at = torch.randperm(len(rows))[: max(1, len(rows) // 2)] if len(rows) else torch.zeros(0, dtype=torch.long)
    seen = converted.windows(x, at)
    weight = converted.canonical(converted.weight.detach())
    assert seen.shape == (len(at), len(weight), *weight.shape[2:])
    found = torch.einsum("rgik,goik->rgo", seen, weight).flatten(1)
    if layer.bias is not None:
        found = found + layer.bias.detach()
    assert torch.allclose(found, rows[at], atol=1e-12)


def test_of_gpt2_too() -> None:
    utils = pytest.importorskip("transformers.pytorch_utils")
    torch.manual_seed(0)
    model: Any = convert(nn.Sequential(utils.Conv1D(3, 5)), log_sigma2=-40.0).eval()
    x, layer = torch.randn(2, 4, 5), model[0]
    with torch.no_grad():
        rows = layer.rows(model(x), x)
        seen = layer.windows(x, torch.arange(len(rows)))
        found = torch.einsum("rgik,goik->rgo", seen, layer.canonical(layer.weight)).flatten(1) + layer.bias
    assert torch.allclose(found, rows, atol=1e-6)
