"""Bits from the posterior, against sums over single weights and a search over all allocations."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn

import svdcompress as svdc
from svdcompress.errors import UsageError
from svdcompress.export._bits import added_error, allocate, allocated_bits, round_weights, rounded, suggested_bits


@pytest.fixture
def model():
    torch.manual_seed(0)
    net = svdc.convert(nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3), nn.ConvTranspose1d(3, 2, 2)))
    with torch.no_grad():
        for layer, level in ((net[0], -12.0), (net[2], -6.0), (net[3], -3.0)):
            layer.log_sigma2.uniform_(level - 1, level + 1)
            layer.log_sigma2[layer.weight.abs() < 0.1] = 5.0
    return net.eval()


def slow_cost(weight, log_sigma2, kept, bits, axis):
    total, count = 0.0, 0
    for place in itertools.product(*(range(size) for size in weight.shape)):
        if kept[place]:
            channel = [
                float(abs(weight[at]) * kept[at])
                for at in itertools.product(*(range(size) for size in weight.shape))
                if at[axis] == place[axis]
            ]
            step = max(channel) / (2 ** (bits - 1) - 1)
            total, count = total + step**2 / 12 / math.exp(float(log_sigma2[place])), count + 1
    return total / count


def test_suggested_are_the_fewest_bits_within_the_share(model):
    rows = suggested_bits(model, 0.3)
    layers = ((model[0], 0), (model[2], 0), (model[3], 1))
    assert [row.name for row in rows] == ["0", "2", "3"]
    for row, (layer, axis) in zip(rows, layers, strict=True):
        args = layer.weight.detach(), layer.log_sigma2.detach(), layer.relevant()
        costs = {bits: slow_cost(*args, bits, axis) for bits in range(2, 17)}
        assert row.bits == min(bits for bits, cost in costs.items() if cost <= 0.3**2)
        assert row.added == pytest.approx(math.sqrt(costs[row.bits]), rel=1e-5)
        assert row.weights == int(layer.relevant().sum())
        assert added_error(model, {row.name: 8}) == {row.name: pytest.approx(math.sqrt(costs[8]), rel=1e-5)}
    assert rows[0].bits > rows[1].bits > rows[2].bits  # more certain weights get more bits


def test_allocation_costs_no_more_than_any_other_of_the_size():
    costs = {
        "a": {b: 40 * 4.0**-b for b in range(2, 17)},
        "b": {b: 3 * 4.0**-b for b in range(2, 17)},
        "c": {b: 900 * 4.0**-b for b in range(2, 17)},
    }
    sizes = {"a": 10, "b": 10, "c": 10}
    for average in (2.0, 3.0, 4.0, 5.3):
        found = allocate(costs, sizes, average)
        assert sum(sizes[n] * b for n, b in found.items()) <= average * 30 + 1e-9
        total = sum(sizes[n] * costs[n][b] for n, b in found.items())
        for bits in itertools.product(range(2, 9), repeat=3):
            if sum(10 * b for b in bits) <= average * 30:
                assert total <= sum(10 * costs[n][b] for n, b in zip(costs, bits, strict=True)) + 1e-9


def test_a_layer_with_nothing_left_gets_the_fewest(model):
    with torch.no_grad():
        model[0].log_sigma2.fill_(9.0)
    rows = suggested_bits(model)
    assert (rows[0].weights, rows[0].bits, rows[0].added) == (0, 2, 0.0)
    assert allocated_bits(model, 6.0)["0"] == 2


def test_rounding_takes_the_nearest_step_of_each_channel():
    weight = torch.tensor([[1.0, -0.5, 0.2], [0.0, 0.0, 0.0], [30.0, 8.0, -4.0]])
    found = rounded(weight, 3, search=False)
    for row, expected in zip(weight.tolist(), found.tolist(), strict=True):
        step = max(map(abs, row)) / 3
        for w, r in zip(row, expected, strict=True):
            assert r == pytest.approx(min((k * step for k in range(-3, 4)), key=lambda level: abs(level - w)), abs=1e-6)


def test_rounding_in_place(model):
    before = {name: p.clone() for name, p in model.named_parameters()}
    assert round_weights(model, {"2": 4}) is model
    assert torch.equal(model[0].weight, before["0.weight"]) and torch.equal(model[2].bias, before["2.bias"])
    assert not torch.equal(model[2].weight, before["2.weight"])
    assert all(len(row.unique()) <= 15 for row in model[2].weight)


def test_a_model_without_a_posterior_is_refused():
    with pytest.raises(UsageError, match="no variational layers"):
        suggested_bits(nn.Linear(2, 2))
