"""Units ranked evenly over layers, and by the information in single weights: against trying every unit at every step."""

from __future__ import annotations

import pytest
import torch
from test_ranked import everything, noisy, told_by_hand, units_of, without
from torch import Tensor, nn

from svdcompress import cost
from svdcompress.prune import prune
from svdcompress.selection import Ranking


def network(seed: int) -> nn.Sequential:
    return noisy(nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), seed)


@pytest.mark.parametrize("evenness", [0.5, 1.0])
@pytest.mark.parametrize("measure", ["parameters", "macs"])
@pytest.mark.parametrize("seed", range(2))
def test_an_even_rank_divides_by_the_mean_of_the_layer(measure: str, seed: int, evenness: float) -> None:
    model, x = network(seed), torch.randn(3, 5)
    start = masks = everything(model)
    size = lambda masks: getattr(cost.measure(prune(model, x, masks=masks, verify=False), x), measure)  # noqa: E731
    plain = {
        unit: told_by_hand(model, start, *unit) / (size(start) - size(without(model, start, *unit))) for unit in units_of(model)
    }
    mean = {
        layer: sum(worth for (name, _), worth in plain.items() if name == layer) / sum(name == layer for name, _ in plain)
        for layer in ("0", "2")
    }
    ranking, alive = Ranking(model, x, masks), units_of(model)
    while len(alive) > 2:
        keys = []
        for name, unit in alive:
            left, whole = (sum(one == name for one, _ in units) for units in (alive, units_of(model)))
            if left > 1:
                saved = size(masks) - size(without(model, masks, name, unit))
                keys.append(
                    (told_by_hand(model, start, name, unit) / saved / mean[name] ** evenness * whole / left, name, unit)
                )
        _, name, unit = min(keys)
        masks = without(model, masks, name, unit)
        alive.remove((name, unit))
        found = ranking.at({measure: size(masks)}, evenness=evenness)
        assert found.reached and found.units == len(units_of(model)) - len(alive)
        assert all(torch.equal(found.masks[one], masks[one]) for one in masks)


@pytest.mark.parametrize("seed", range(4))
def test_a_number_of_weights_takes_the_units_of_the_least_relevance_per_weight(seed: int) -> None:
    model, x = network(seed), torch.randn(3, 5)
    torch.manual_seed(seed)
    start = {name: torch.rand(mask.shape) < 0.8 for name, mask in everything(model).items()}
    start["0"][:, 0] = start["2"][:, 0] = start["4"][:, 0] = True  # nothing is dead
    start["2"][0] = start["4"][0] = True
    masks, ranking, alive = start, Ranking(model, x, start), units_of(model)
    kept = lambda masks: sum(int(mask.sum()) for mask in masks.values())  # noqa: E731
    while len(alive) > 2:
        keys = []
        for name, unit in alive:
            left, whole = (sum(one == name for one, _ in units) for units in (alive, units_of(model)))
            if left > 1:
                weights = kept(start) - kept(without(model, start, name, unit))
                keys.append((told_by_hand(model, start, name, unit) / weights * whole / left, name, unit))
        _, name, unit = min(keys)
        masks = without(model, masks, name, unit)
        alive.remove((name, unit))
        found = ranking.keeping(kept(masks))
        assert found.reached and found.masks.kept == kept(masks)
        assert all(torch.equal(found.masks[one], masks[one]) for one in masks)
    assert not ranking.keeping(1).reached and ranking.keeping(kept(start)).units == 0


def test_layers_of_a_cheap_unit_are_not_emptied_by_an_even_rank() -> None:
    """A narrow layer with units of little value next to a wide one: the plain ranking leaves it only one unit."""
    net = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 20), nn.ReLU(), nn.Linear(20, 2))
    model, x = noisy(net), torch.randn(2, 6)
    with torch.no_grad():
        model[0].log_sigma2 += 4
        model[4].log_sigma2 -= 6
    widths = {}
    for evenness in (0.0, 1.0):
        masks = Ranking(model, x, everything(model)).at({"parameters": 0.4}, evenness=evenness).masks
        widths[evenness] = [int(masks[name].any(1).sum()) for name in ("0", "2")]
    assert widths[0.0][0] == 1 and widths[0.0][1] > widths[1.0][1] and widths[1.0][0] >= 2


class Biased(nn.Module):
    """Position biases from a network of their own, whose operations do not grow with the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.write = nn.Linear(6, 8), nn.Linear(8, 3)
        self.inner, self.outer = nn.Linear(1, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1]).float()[:, None]
        return self.write((self.read(x) + self.outer(self.inner(places).relu())).relu()).mean(1)


@pytest.mark.parametrize("batch", [1, 2, 8])
@pytest.mark.parametrize("goal", [0.7, 0.4, 1e-9])
def test_operations_that_do_not_depend_on_the_batch_count_in_full(batch: int, goal: float) -> None:
    model, x = noisy(Biased()), torch.randn(batch, 5, 6)
    ranking = Ranking(model, x, everything(model))
    assert ranking.total["macs"] == 5 * (6 * 8 + 8 * 3 + 1 * 16 + 16 * 8)
    found = ranking.at({"macs": goal})
    assert found.macs == cost.macs(prune(model, x, masks=found.masks), x) and found.reached == (goal > 0.1)
