"""A search for latency also tries units in blocks, where the measured times reward it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_ways import mlp, ways_of
from torch import Tensor, nn

from svdcompress.convert import convert
from svdcompress.layers import variational_layers
from svdcompress.pipeline._measure import Measure
from svdcompress.pipeline._unit_ways import Units
from svdcompress.pipeline._way import Way
from svdcompress.prune import prune
from svdcompress.selection import Ranking

WIDTHS, SIDE = (32, 64, 32), 6


def convnet() -> nn.Module:
    """Three convolutions, with variances of all sizes so that units differ."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    before = 3
    for width in WIDTHS:
        layers += [nn.Conv2d(before, width, 3, padding=1), nn.ReLU()]
        before = width
    model = convert(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 4))).eval()
    with torch.no_grad():
        for _, layer in variational_layers(model):
            layer.log_sigma2.copy_(2 * torch.randn(layer.weight.shape[0])[(...,) + (None,) * (layer.weight.dim() - 1)] - 7)
    return model


def widths(model: nn.Module) -> list[int]:
    return [module.out_channels for module in model.modules() if isinstance(module, nn.Conv2d)]


def macs(model: nn.Module) -> float:
    """Of the convolutions, by their shapes."""
    return float(sum(m.weight.numel() * SIDE**2 for m in model.modules() if isinstance(m, nn.Conv2d)))


def blocky(model: nn.Module, block: int = 16) -> float:
    """Milliseconds of a kernel that takes twice as long for outputs that are no multiple of a block."""
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    return sum(m.weight.numel() * SIDE**2 * (1 if m.out_channels % block == 0 else 2) for m in convolutions) * 1e-6


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes latencies a function of the model, and lists the widths of all models that were measured."""

    def given(time: Any) -> list[list[int]]:
        seen: list[list[int]] = []

        def of_small(self: Measure, small: nn.Module, dense: nn.Module) -> dict[str, float]:
            seen.append(widths(small))
            return {"macs": macs(small), "latency": time(small)}

        monkeypatch.setattr(Measure, "of_small", of_small)
        return seen

    return given


def images() -> Tensor:
    return torch.randn(20, 3, SIDE, SIDE)


def searched(model: nn.Module, x: Tensor, target: float) -> Units:
    found = ways_of(model, x, "latency", target)
    assert isinstance(found, Units)
    return found


def pruned(to_size: Units, masks: Any) -> nn.Module:
    return prune(to_size.model, to_size.opened.inputs, masks=masks)


def by_name(to_size: Units) -> dict[str, Way]:
    usual = to_size.usual()
    assert usual.name == "global"
    return {way.name: way for way in [usual, *to_size.others_than(usual)]}


@pytest.mark.parametrize("block", [8, 16])
def test_a_way_in_the_blocks_that_the_kernels_compute_leaves_more_at_the_same_latency(timed: Any, block: int) -> None:
    model, x = convnet(), images()
    timed(lambda small: blocky(small, block))
    target = blocky(model, block) / 2
    to_size = searched(model, x, target)
    found = by_name(to_size)
    way = found[f"global-in-{block}s"]
    small = pruned(to_size, way.masks)
    assert all(width % block == 0 for width in widths(small)) and widths(small) != [*WIDTHS]
    assert way.size == pytest.approx(blocky(small, block)) and blocky(small, block) <= target
    assert macs(pruned(to_size, found["global"].masks)) < macs(small) / 1.05
    assert to_size.aim() == found["global"].count and to_size.aim(way.name) == way.count
    part = to_size.part(macs(small), way.name)
    assert part is not None and all(width % block == 0 for width in widths(pruned(to_size, part)))
    other = to_size.fitted(found[f"half-even-in-{block}s"], found["global"])
    assert other is not None and all(width % block == 0 for width in widths(pruned(to_size, other.masks)))
    assert other.size == pytest.approx(blocky(pruned(to_size, other.masks), block))


def test_where_blocks_gain_nothing_each_costs_one_measurement(timed: Any) -> None:
    model, x = convnet(), images()
    seen = timed(lambda small: macs(small) * 1e-6)
    to_size = searched(model, x, macs(model) * 0.5e-6)
    usual = to_size.usual()
    assert usual.size == pytest.approx(macs(model) * 0.5e-6, rel=0.03)
    before = len(seen)
    assert not any("-in-" in name for name in by_name(to_size))
    assert len(seen) == before + 2 and all(width % 8 == 0 for each in seen[before:] for width in each)


def test_a_choice_in_blocks_is_made_again_without_measuring(timed: Any) -> None:
    model, x = convnet(), images()
    seen = timed(blocky)
    way = by_name(searched(model, x, blocky(model) / 2))["global-in-16s"]
    del seen[:]
    again = searched(model, x, blocky(model) / 2).again(way.stored())
    assert not seen
    assert all(torch.equal(mask, again[name]) for name, mask in way.masks.items())


def test_blocks_are_tried_for_latencies_of_convolutions_alone_and_beyond_the_recipes_own_multiple(timed: Any) -> None:
    timed(lambda small: float(sum(parameter.numel() for parameter in small.parameters())))
    linear = mlp(torch.randn(32, 8).tolist(), torch.randn(2, 32).tolist())
    assert searched(convert(linear).eval(), torch.randn(20, 8), 0.5)._worth_trying() == []
    by_macs = ways_of(convnet(), images(), "macs", 1e5)
    assert isinstance(by_macs, Units) and by_macs._worth_trying() == []
    to_size = searched(convnet(), images(), 0.5)
    assert to_size._worth_trying() == ["-in-8s", "-in-16s"]
    for own, left in {2: ["-in-8s", "-in-16s"], 3: [], 8: ["-in-16s"], 16: []}.items():
        to_size.pruning["round_to"] = own
        assert to_size._worth_trying() == left


def test_a_ranking_in_multiples_keeps_the_most_relevant_of_each_layer() -> None:
    model, x = convnet(), images()
    ranking = Ranking(model, x)
    found = ranking.at({"macs": 0.5}, round_to=8)
    small = prune(model, x, masks=found.masks)
    assert found.reached and all(width % 8 == 0 for width in widths(small)) and widths(small) != [*WIDTHS]
    plain = ranking.at({"macs": 0.5})
    assert any(width % 8 for width in widths(prune(model, x, masks=plain.masks)))
    layers = dict(variational_layers(model))
    for name, after in {"0": "2", "2": "4", "4": "8"}.items():
        layer, following = layers[name], layers[after]
        nats = 0.5 * torch.log1p(layer.weight.double().square() / layer.log_sigma2.double().exp()).flatten(1).sum(1)
        read = 0.5 * torch.log1p(following.weight.double().square() / following.log_sigma2.double().exp())
        nats = nats + read.transpose(0, 1).flatten(1).sum(1)
        kept = found.masks[name].flatten(1).any(1)
        assert kept.all() or nats[kept].min() > nats[~kept].max()
