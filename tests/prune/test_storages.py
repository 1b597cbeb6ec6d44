"""A write into part of one tensor does not affect another tensor that is later allocated at the same address."""

import pytest
import torch
from torch import nn

import svdcompress as svdc
from svdcompress.layers import variational_layers
from svdcompress.prune._tensors import mark, marked


def test_a_storage_that_is_gone_leaves_no_mark_on_others():
    storages, gone = {}, 0
    for _ in range(50):
        written = torch.zeros(4)
        mark(storages, written)
        assert marked(storages, written) and marked(storages, written[:2])
        del written
        others = [torch.zeros(4) for _ in range(20)]
        gone += sum(marked(storages, other) for other in others)
    assert gone == 0 and len(storages) == 50


class Writing(nn.Module):
    """Before each of its layers, writes into part of a copy of a parameter and discards it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(6, 6) for _ in range(12)))
        self.other = nn.Parameter(torch.ones(6))

    def forward(self, x):
        for layer in self.layers:
            for _ in range(3):
                written = self.other.clone()
                written[:1].zero_()
                del written
            x = torch.relu(layer(x))
        return x.sum(1, keepdim=True)


def test_units_go_on_each_call():
    torch.manual_seed(0)
    model = svdc.convert(Writing()).eval()
    masks = {name: torch.ones_like(layer.weight, dtype=torch.bool) for name, layer in variational_layers(model)}
    for name, layer in variational_layers(model):
        if name != "layers.11":
            masks[name][:3] = False
            layer.bias.data.fill_(-1)  # dead after the ReLU
    for _ in range(5):
        groups = svdc.prune(model, torch.randn(2, 6), masks=masks).pruning.groups
        assert [group.removed for group in groups] == 11 * [3] + [0], [group.reason for group in groups]


class Beside(nn.Module):
    """Adds apparent constants to its units; the input is written into them later through another view."""

    def __init__(self, through_view):
        super().__init__()
        self.through_view, self.shift = through_view, nn.Parameter(torch.ones(6))
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x):
        beside = self.shift.expand(len(x), 6).clone()
        flat = beside.view(-1)
        if self.through_view:
            flat.add_(x.reshape(-1))
        else:
            beside.add_(x)
            beside = flat.view(len(x), 6)
        return self.last(torch.relu(self.first(x)) + beside)


@pytest.mark.parametrize("through_view", [True, False])
def test_what_is_written_by_another_name_is_seen(through_view):
    torch.manual_seed(0)
    model = svdc.convert(Beside(through_view)).eval()
    masks = {name: torch.ones_like(layer.weight, dtype=torch.bool) for name, layer in variational_layers(model)}
    masks["first"][[0, 4]] = False
    model.first.bias.data.fill_(-1)  # dead, except for what is added
    small, x = svdc.prune(model, torch.randn(2, 6), masks=masks), torch.randn(5, 6)
    assert small.pruning.groups[0].removed == 0 and not small.pruning.groups[0].reason  # all are in use
    torch.testing.assert_close(small(x), svdc.hold(model, masks)(x))
