"""Removing units beyond the dead ones: which, how many, at what cost, and that the result is the masked model."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from masking import gap, masked, other_inputs, outputs, random_masks, shake
from torch import Tensor, nn
from zoo_models import ZOO

from svdcompress import cost
from svdcompress.convert import convert
from svdcompress.errors import UsageError
from svdcompress.layers import variational_layers
from svdcompress.prune import groups, prune
from svdcompress.relevance import information, relevance
from svdcompress.selection import Ranking, ranked


def noisy(model: nn.Module, seed: int = 0) -> nn.Module:
    """A converted model with variances of all sizes, so that units differ."""
    torch.manual_seed(seed)
    model = convert(shake(model).eval())
    with torch.no_grad():
        for _, layer in variational_layers(model):
            layer.log_sigma2.copy_(2 * torch.randn(layer.weight.shape) - 7)
    return model


def everything(model: nn.Module) -> dict[str, Tensor]:
    return {name: torch.ones_like(layer.weight, dtype=torch.bool) for name, layer in variational_layers(model)}


ARCHITECTURES = [
    "mlp",
    "resnet-basic",
    "resnet-bottleneck",
    "resnext",
    "densenet",
    "unet",
    "mobilenet-v3",
    "gated-mlp",
    "timm-vit",
    "hf-bert",
    "hf-llama",
]


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name in ZOO])
@pytest.mark.parametrize("goal", [{"macs": 0.5}, {"parameters": 0.4}], ids=str)
def test_what_is_left_is_the_masked_model_at_the_cost_that_was_told(name: str, goal: dict[str, float]) -> None:
    torch.manual_seed(1)
    factory, inputs = ZOO[name]
    model, x = noisy(factory()), inputs()
    masks = random_masks(model, 0.1, 0.1, 0.1)
    found = Ranking(model, x, masks, examples=[x, x] if "macs" in goal else None).at(goal)
    small = prune(model, x, masks=found.masks)
    left = cost.measure(small, x)
    constants = name == "mobilenet-v3"  # from units that lose everything they read
    assert left.parameters <= found.parameters if constants else left.parameters == found.parameters
    assert left.macs <= found.macs if constants else left.macs == found.macs
    (measure,) = goal
    before = cost.measure(model, x)
    if found.reached:
        assert getattr(found, measure) <= goal[measure] * getattr(before, measure)
    else:
        assert name == "hf-llama"
    assert left.parameters < cost.measure(prune(model, x, masks=masks), x).parameters
    assert all(layer.weight.numel() for _, layer in variational_layers(small))
    assert all((found.masks[one] <= masks[one]).all() for one in masks)
    fresh = other_inputs(x)
    assert gap(outputs(small.eval(), fresh), outputs(masked(model, dict(found.masks)), fresh)) <= 1e-5


# The order, against brute force


def units_of(model: nn.Sequential) -> list[tuple[str, int]]:
    """The hidden units of a chain of Linear layers, by the layer that writes them."""
    names = [name for name, layer in model.named_children() if isinstance(layer, nn.Linear)]
    return [(name, unit) for name in names[:-1] for unit in range(model.get_submodule(name).out_features)]


def told_by_hand(model: nn.Sequential, masks: dict[str, Tensor], name: str, unit: int) -> float:
    """Nats of the weights that write and read a hidden unit, summed one by one."""
    names = [one for one, layer in model.named_children() if isinstance(layer, nn.Linear)]
    reader = names[names.index(name) + 1]
    total = 0.0
    for layer, own in ((name, lambda o, i: o == unit), (reader, lambda o, i: i == unit)):
        module = model.get_submodule(layer)
        for o, i in itertools.product(*map(range, module.weight.shape)):
            if own(o, i) and masks[layer][o, i]:
                mean, variance = module.weight[o, i].item(), module.log_sigma2[o, i].exp().item()
                total += 0.5 * torch.tensor(1 + (mean**2 + 1e-8) / variance, dtype=torch.float64).log().item()
    return total


def without(model: nn.Sequential, masks: dict[str, Tensor], name: str, unit: int) -> dict[str, Tensor]:
    names = [one for one, layer in model.named_children() if isinstance(layer, nn.Linear)]
    fewer = {one: mask.clone() for one, mask in masks.items()}
    fewer[name][unit] = False
    fewer[names[names.index(name) + 1]][:, unit] = False
    return fewer


@pytest.mark.parametrize("measure", ["parameters", "macs"])
@pytest.mark.parametrize("seed", range(3))
def test_the_order_is_that_of_trying_every_unit_at_every_step(measure: str, seed: int) -> None:
    """Costs by pruning and measuring, information by hand, everything recomputed at each step."""
    model = noisy(nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), seed)
    x = torch.randn(3, 5)
    start = masks = everything(model)
    ranking = Ranking(model, x, masks)
    alive = units_of(model)
    size = lambda masks: getattr(cost.measure(prune(model, x, masks=masks, verify=False), x), measure)  # noqa: E731
    while len(alive) > 2:
        best = None
        for name, unit in alive:
            if sum(one == name for one, _ in alive) == 1:
                continue  # the last of its layer
            saved = size(masks) - size(without(model, masks, name, unit))
            left, whole = (sum(one == name for one, _ in units) for units in (alive, units_of(model)))
            key = told_by_hand(model, start, name, unit) / saved * whole / left
            best = min(best, (key, name, unit)) if best is not None else (key, name, unit)
        assert best is not None
        _, name, unit = best
        masks = without(model, masks, name, unit)
        alive.remove((name, unit))
        found = ranking.at({measure: size(masks)})
        assert found.reached and found.units == len(units_of(model)) - len(alive)
        assert all(torch.equal(found.masks[one], masks[one]) for one in masks)


def test_information_by_its_definition() -> None:
    layer = noisy(nn.Sequential(nn.Linear(3, 2)))[0]
    expected = [
        [0.5 * torch.log1p((m.double() ** 2 + 1e-8) / s.double().exp()).item() for m, s in zip(row, noise, strict=True)]
        for row, noise in zip(layer.weight, layer.log_sigma2, strict=True)
    ]
    torch.testing.assert_close(information(layer).double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=1e-6)


# Constraints


class Grouped(nn.Module):
    """A convolution in two groups; the second one is pure noise."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.pairs, self.head = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 12, 3, groups=2), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.pairs(torch.relu(self.stem(x)))).mean((2, 3)))


def test_groups_of_a_convolution_lose_equally_many() -> None:
    model, x = noisy(Grouped()), torch.randn(2, 3, 5, 5)
    with torch.no_grad():
        model.pairs.log_sigma2[6:] += 6  # all units of the second group are less relevant
        model.stem.log_sigma2[4:] += 6
    found = Ranking(model, x).at({"macs": 0.5})
    small = prune(model, x, masks=found.masks)
    assert found.reached and small.pairs.groups == 2
    stem = found.masks["stem"].flatten(1).any(1).view(2, 4).sum(1)
    pairs = found.masks["pairs"].flatten(1).any(1).view(2, 6).sum(1)
    assert stem[0] == stem[1] and pairs[0] == pairs[1]
    assert small.stem.out_channels == stem.sum() and small.pairs.out_channels == pairs.sum()


def test_smaller_goals_take_more_of_the_same_order() -> None:
    """Of goals close to each other, the larger one may have other units back than the smaller one; these are far apart."""
    model, x = noisy(ZOO["resnet-basic"][0]()), ZOO["resnet-basic"][1]()
    ranking = Ranking(model, x)
    found = [ranking.at({"parameters": share}) for share in (1.0, 0.8, 0.6, 0.4, 0.2)]
    assert found[0].units == 0
    for more, less in itertools.pairwise(found):
        assert less.units > more.units and less.parameters < more.parameters
        assert all((less.masks[name] <= more.masks[name]).all() for name in less.masks)


def test_no_layer_is_emptied_and_an_unreachable_goal_is_said_to_be() -> None:
    model, x = noisy(ZOO["resnet-bottleneck"][0]()), ZOO["resnet-bottleneck"][1]()
    with pytest.warns(UserWarning, match=r"goal: parameters 2 cannot be reached.*leaves [\d,]+"):
        masks = ranked(model, x, goal={"parameters": 2})
    assert all(mask.any() for mask in masks.values())
    small = prune(model, x, masks=masks)
    assert gap(outputs(small.eval(), x), outputs(masked(model, dict(masks)), x)) <= 1e-5
    stays = [group for group in small.pruning.groups if group.removed]
    assert stays and all(group.kept >= 1 for group in stays)


def test_the_model_is_left_as_it_was() -> None:
    model, x = noisy(ZOO["resnet-basic"][0]()), ZOO["resnet-basic"][1]()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    masks = ranked(model, x, goal={"macs": 0.5})
    assert masks.kept < relevance(model).kept
    assert before.keys() == model.state_dict().keys()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_protected_units_and_those_that_a_dense_layer_reads_stay() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)))
    model, x = convert(shake(net), exclude=["6"]), torch.randn(2, 6)
    with pytest.warns(UserWarning, match="cannot be reached"):
        masks = ranked(model, x, goal={"parameters": 2}, protect=["0"])
    small = prune(model, x, masks=masks, protect=["0"])
    assert [layer.out_features for layer in small if isinstance(layer, nn.Linear)] == [8, 1, 8, 3]


def test_inputs_are_units_where_they_may_go() -> None:
    model, x = noisy(nn.Sequential(nn.Linear(30, 4), nn.ReLU(), nn.Linear(4, 2))), torch.randn(2, 30)
    with torch.no_grad():
        model[0].log_sigma2[:, :20] = 8.0
    masks = ranked(model, x, everything(model), goal={"parameters": 54}, remove_inputs=True)
    small = prune(model, x, masks=masks, remove_inputs=True)
    assert small.pruning.inputs_kept == list(range(20, 30))
    assert cost.measure(small, x[:, 20:]).parameters == 54


@pytest.mark.parametrize("goal", [{}, {"latency": 0.5}, {"macs": 0}, {"macs": -1}, {"macs": 0.5, "parameters": 0.5}], ids=str)
def test_goals_of_another_form_are_refused(goal: dict[str, float]) -> None:
    model, x = noisy(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))), torch.randn(2, 4)
    with pytest.raises(UsageError, match=r"goal: .* is not one of parameters, macs"):
        ranked(model, x, goal=goal)


def test_a_graph_that_cannot_be_followed_keeps_its_masks_and_says_so() -> None:
    class Reads(nn.Module):
        """Its layer's weight is also read directly: no smaller dense model computes the same as the masked one."""

        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Any:
            return self.two(torch.relu(self.one(x))) + (x @ self.two.weight.T)

    model, x = noisy(Reads()), torch.randn(2, 4)
    found = Ranking(model, x).at({"parameters": 0.5})
    assert not found.reached and found.units == 0
    assert found.parameters == cost.measure(model, x).parameters


def test_multiples_are_kept_by_the_most_relevant() -> None:
    """If rounding did not come first, the units it keeps would be arbitrary ones of those to be removed."""
    net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 3))
    model, x = noisy(net), torch.randn(2, 6)
    masks = everything(model)
    found = Ranking(model, x, masks, round_to=4).at({"macs": 0.5})
    small = prune(model, x, masks=found.masks, round_to=4)
    assert found.reached and cost.macs(small, x) == found.macs <= 0.5 * cost.macs(model, x)
    told = {(name, unit): told_by_hand(model, masks, name, unit) for name, unit in units_of(model)}
    for name in ("0", "2"):
        width = small.get_submodule(name).out_features
        alive = found.masks[name].any(1)
        assert width % 4 == 0 and int(alive.sum()) == width
        worth = torch.tensor([told[name, unit] for unit in range(len(alive))])
        assert worth[alive].min() > worth[~alive].max()


def test_dead_units_count_as_gone() -> None:
    model, x = noisy(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))), torch.randn(2, 4)
    masks = everything(model)
    masks["0"][:5] = False
    masks["2"][:, :5] = False
    found = Ranking(model, x, masks).at({"parameters": 30})
    assert found.units == 0 and found.parameters == 23
    assert groups(model, x, masks=found.masks).groups[0].removed == 5
