"""Splits into pieces of unequal lengths stored in the module as a tuple (MambaOut, InceptionNeXt): the tuple is updated."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import svdcompress as svdc


class Gated(nn.Module):
    """Splits its units into a gate, a part that passes through, and the input of a depthwise convolution."""

    def __init__(self, width: int = 8, hidden: int = 12, seen: int = 4, kind: type = tuple) -> None:
        super().__init__()
        self.lengths = kind((hidden, hidden - seen, seen))
        self.fc1, self.fc2 = nn.Linear(width, 2 * hidden), nn.Linear(hidden, width)
        self.conv = nn.Conv2d(seen, seen, 3, padding=1, groups=seen)

    def forward(self, x: Tensor) -> Tensor:
        gate, passing, seen = torch.split(self.fc1(x), self.lengths, -1)
        seen = self.conv(seen.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        return x + self.fc2(nn.functional.gelu(gate) * torch.cat([passing, seen], -1))


@pytest.mark.parametrize("kind", [tuple, list])
def test_unequal_pieces_follow_their_units(kind: type, tmp_path) -> None:
    torch.manual_seed(0)
    dense: Any = nn.Sequential(nn.Linear(3, 8), Gated(kind=kind), nn.Linear(8, 2)).eval()
    masks = {
        name: torch.rand(layer.weight.shape) > 0.1
        for name, layer in dense.named_modules()
        if isinstance(layer, nn.Linear | nn.Conv2d)
    }
    masks["1.fc2"][:, [1, 2, 5, 9]] = False  # three that pass through and one that the convolution reads
    oracle = copy.deepcopy(dense)
    with torch.no_grad():
        for name, mask in masks.items():
            oracle.get_submodule(name).weight.mul_(mask)
    small: Any = svdc.prune(svdc.convert(copy.deepcopy(dense)), torch.randn(2, 5, 5, 3), masks=masks).eval()
    assert small[1].lengths == kind((8, 5, 3))
    assert small[1].fc1.out_features == 16 and small[1].fc2.in_features == 8 and small[1].conv.groups == 3
    x = torch.randn(3, 6, 6, 3)
    with torch.no_grad():
        assert torch.allclose(small(x), oracle(x), atol=1e-5)
    svdc.save(small, tmp_path / "model.safetensors")
    again: Any = svdc.load(tmp_path / "model.safetensors", nn.Sequential(nn.Linear(3, 8), Gated(kind=kind), nn.Linear(8, 2)))
    with torch.no_grad():
        assert torch.equal(again.eval()(x), small(x))

    wide = svdc.to_dense(small)
    for model in (wide, oracle):
        model.train()
        model(x).square().sum().backward()
    found, expected = wide[1].fc2.weight.grad, oracle[1].fc2.weight.grad[:, [0, 3, 4, 6, 7, 8, 10, 11]]
    assert torch.allclose(found, expected, rtol=1e-3, atol=1e-4)
