"""Masks of whole units against their definition: a weight stays if its output and its input each have a weight that stays."""

import itertools

import pytest
import torch
from torch import nn

import svdcompress as svdc
from svdcompress.layers import variational_layers
from svdcompress.selection import whole_units


@pytest.mark.parametrize(
    ("layer", "groups", "transposed"),
    [
        (nn.Linear(5, 4), 1, False),
        (nn.Conv2d(6, 4, 3, groups=2), 2, False),
        (nn.Conv1d(4, 6, 2), 1, False),
        (nn.ConvTranspose2d(4, 6, 2, groups=2), 2, True),
    ],
)
def test_each_weight_by_the_words(layer, groups, transposed):
    torch.manual_seed(0)
    model = svdc.convert(nn.Sequential(layer))
    ((name, variational),) = variational_layers(model)
    shape = variational.weight.shape
    mask = torch.rand(shape) < 0.15
    found = whole_units(model, {name: mask})[name]
    first, second = shape[0] // groups, shape[1]
    for i, j in itertools.product(range(shape[0]), range(second)):
        part = mask[i // first * first : (i // first + 1) * first]  # in the same group
        assert bool(found[i, j].all()) == bool(found[i, j].any()) == bool(mask[i].any() and part[:, j].any())
    assert 0 < int(found.sum()) < found.numel() and bool((found | ~mask).all())


def test_the_same_shapes_come_of_it():
    torch.manual_seed(1)
    model = svdc.convert(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)))
    x = torch.randn(4, 6)
    masks = {name: torch.rand(layer.weight.shape) < 0.3 for name, layer in variational_layers(model)}
    shapes = [
        [tuple(p.shape) for p in svdc.prune(model, x, masks=chosen).parameters()]
        for chosen in (masks, whole_units(model, masks))
    ]
    assert shapes[0] == shapes[1] and shapes[0][0][0] < 8
