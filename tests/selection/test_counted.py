"""Non-zeros after pruning, predicted without pruning: against pruning and counting."""

from __future__ import annotations

import pytest
import torch
from masking import random_masks
from test_ranked import noisy
from torch import Tensor, nn
from zoo_models import ZOO

from svdcompress import cost
from svdcompress.prune import prune
from svdcompress.selection import Ranking, count_nonzero


@pytest.mark.parametrize("name", ["mlp", "resnet-basic", "resnext", "densenet", "gated-mlp"])
@pytest.mark.parametrize("dead", [0.1, 0.5])
def test_it_is_what_pruning_leaves(name: str, dead: float) -> None:
    torch.manual_seed(2)
    factory, inputs = ZOO[name]
    model, x = noisy(factory()), inputs()
    masks = random_masks(model, dead, 0.2, 0.2)
    # Both trace the model themselves. Which constants are multiples of each other depends on the last bits, and about one trace
    # in two hundred of the same numbers misses one (which then stays masked): hence three tries.
    pairs = [(count_nonzero(model, x, masks), cost.measure(prune(model, x, masks=masks).eval(), x).nonzero) for _ in range(3)]
    assert any(counted == left for counted, left in pairs), pairs
    assert max(max(pair) for pair in pairs) < cost.measure(model, x).nonzero


def test_weights_of_units_that_go_do_not_count() -> None:
    model, x = noisy(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))), torch.randn(5, 3)
    masks = {name: torch.ones_like(model.get_submodule(name).weight, dtype=torch.bool) for name in ("0", "2")}
    masks["2"][:, 1] = False  # its three weights are kept, but nothing reads it
    assert count_nonzero(model, x, masks) == 3 * 3 + 3 + 2 * 3 + 2
    masks["0"][0, 0] = False
    assert count_nonzero(model, x, masks) == 3 * 3 + 3 + 2 * 3 + 2 - 1
    assert count_nonzero(model, x, masks, protect=["0"]) == 4 * 3 - 1 + 4 + 2 * 3 + 2


def test_a_graph_that_cannot_be_followed_is_counted_by_its_masks() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.two(torch.relu(self.one(x))) + (x @ self.two.weight.T)

    model, x = noisy(Reads()), torch.randn(2, 4)
    masks = {name: torch.ones_like(getattr(model, name).weight, dtype=torch.bool) for name in ("one", "two")}
    masks["one"][0] = False
    assert count_nonzero(model, x, masks) == 16 - 4 + 4 + 8 + 2
    kept = Ranking(model, x, masks).keeping(10)
    assert not kept.reached and kept.units == 0 and kept.masks.kept == 20
