"""The cost of a unit, counted by hand and by removing one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from masking import shake
from torch import Tensor, nn

from svdcompress import cost
from svdcompress.convert import convert
from svdcompress.layers import variational_layers
from svdcompress.prune import groups, prune
from svdcompress.prune._unit_costs import _elements
from svdcompress.prune._units import Units


def test_a_small_network_counted_by_hand() -> None:
    net = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 3), nn.Flatten(), nn.Linear(12, 5)
    )
    x = torch.randn(6, 2, 4, 4)  # the first convolution has 16 output positions, the second 4
    for model in (net, convert(net)):
        told = [(g.name, g.units, g.unit_parameters, g.unit_macs, g.reason) for g in groups(model, x).groups]
        assert told == [
            # its filter, bias, scale and shift, and the weights of the second convolution's three filters that read it
            ("0", 4, 2 * 9 + 1 + 2 + 3 * 9, 16 * 2 * 9 + 4 * 3 * 9, ""),
            # its filter, bias, and four columns of the last layer
            ("3", 3, 4 * 9 + 1 + 4 * 5, 4 * 4 * 9 + 4 * 5, ""),
            ("5", 5, 12 + 1, 12, "output of the model"),
        ]


class Depthwise(nn.Module):
    """A stream of 6 channels with a depthwise convolution inside, with two outputs for each channel."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 6, 1), nn.BatchNorm2d(6)
        self.each, self.mix = nn.Conv2d(6, 12, 3, groups=6, padding=1), nn.Conv2d(12, 8, 1)
        self.back, self.head = nn.ConvTranspose2d(8, 6, 2, stride=2), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x))
        y = nn.functional.interpolate(self.back(torch.relu(self.mix(self.each(x)))), scale_factor=0.5)
        return self.head((x + y).mean((2, 3)))


def test_it_is_what_taking_the_unit_out_saves() -> None:
    model, x = convert(shake(Depthwise()).eval()), torch.randn(2, 3, 4, 4)
    masks = {name: torch.ones_like(layer.weight, dtype=torch.bool) for name, layer in variational_layers(model)}
    masks["each"][[4, 5]] = False  # the third channel of the stream, wherever it is read
    masks["mix"][:, [4, 5]] = False
    masks["head"][:, 2] = False
    (group,) = (group for group in groups(model, x).groups if group.name == "stem")
    small = prune(model, x, masks=masks)
    before, after = cost.measure(model, x), cost.measure(small, x)
    assert group.units == 6 and small.stem.out_channels == 5
    assert group.unit_parameters == before.parameters - after.parameters == 3 + 1 + 2 + 2 * 9 + 2 + 2 * 8 + 8 * 4 + 1 + 4
    assert group.unit_macs == before.macs - after.macs == 16 * (3 + 2 * 9 + 2 * 8 + 8 * 4) + 4


@pytest.mark.parametrize("transposed", [False, True])
def test_elements_of_grouped_weights(transposed: bool) -> None:
    """Against a mask of the elements, for units with any indices on both sides."""
    kind = nn.ConvTranspose1d if transposed else nn.Conv1d
    conv = kind(8, 12, 3, groups=2)
    units = Units()
    parameter = units.add(conv.weight, ["weight"], conv, None)
    generator = np.random.default_rng(0)
    root = np.concatenate([[0], generator.integers(1, 5, units.count - 1)])
    roots, elements = _elements(parameter, root)
    outs = root[parameter.axes[0] : parameter.axes[0] + 12].reshape(2, 6)
    ins = root[parameter.axes[1] : parameter.axes[1] + 8].reshape(2, 4)
    for unit, number in zip(roots, elements, strict=True):
        touched = (outs == unit)[:, :, None] | (ins == unit)[:, None, :]
        assert number == 3 * touched.sum()
