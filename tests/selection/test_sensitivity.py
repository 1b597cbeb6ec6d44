"""How fast outputs change with a unit, against explicit gates in the network."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from svdcompress.convert import convert
from svdcompress.errors import UsageError
from svdcompress.layers import variational_layers
from svdcompress.prune import analyse
from svdcompress.relevance import Masks, as_masks, hold
from svdcompress.selection import Ranking, _ranked
from svdcompress.selection._sensitivity import sensitivity

WIDTH = 5


class Residual(nn.Module):
    """A stream of channels that two blocks add to, as in a ResNet; each block has an inner layer with normalization."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, WIDTH, 3, padding=1)
        self.into = nn.Conv2d(WIDTH, WIDTH + 1, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(WIDTH + 1)
        self.back = nn.Conv2d(WIDTH + 1, WIDTH, 3, padding=1)
        self.out = nn.Linear(WIDTH, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.gated(x, x.new_ones(WIDTH), x.new_ones(WIDTH + 1))

    def gated(self, x: Tensor, stream: Tensor, inner: Tensor) -> Tensor:
        """The network with a gate before each reader of a unit."""
        h = F.relu(self.first(x))
        inside = F.relu(self.norm(self.into(h * stream[:, None, None]))) * inner[:, None, None]
        h = h + self.back(inside)
        return self.out(h.mean((2, 3)) * stream)


def made(outputs: int) -> tuple[Residual, Tensor]:
    torch.manual_seed(0)
    model = Residual(outputs)
    with torch.no_grad():
        model.norm.running_mean.normal_()
        model.norm.running_var.uniform_(0.5, 2)
    return model.eval(), torch.randn(6, 2, 4, 4)


def by_hand(model: Residual, x: Tensor, masks: Masks | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Root mean squares of the full Jacobian, by central differences of each gate in double precision."""
    model = copy.deepcopy(model).double()
    with torch.no_grad():
        for name in masks or ():
            model.get_submodule(name).weight.mul_(masks[name])  # type: ignore
    found = []
    for which, width in enumerate((WIDTH, WIDTH + 1)):
        for unit in range(width):
            outputs = []
            for step in (1e-5, -1e-5):
                gates = [torch.ones(WIDTH, dtype=torch.double), torch.ones(WIDTH + 1, dtype=torch.double)]
                gates[which][unit] += step
                with torch.no_grad():
                    outputs.append(model.gated(x.double(), *gates))
            slope = (outputs[0] - outputs[1]) / 2e-5
            found.append(float(slope.square().sum(1).mean().sqrt()))
    return np.array(found[:WIDTH]), np.array(found[WIDTH:])


def by_package(model: Residual, x: Tensor, batches: list[Tensor], masks: Masks | None = None) -> tuple[np.ndarray, np.ndarray]:
    """The same from the package for the converted network, in the order of its units."""
    converted = convert(copy.deepcopy(model))
    held = masks or as_masks(
        converted, {name: torch.ones_like(layer.weight, dtype=torch.bool) for name, layer in variational_layers(converted)}
    )
    analysis = analyse(converted, x[:2], masks=held)
    assert analysis is not None
    found = sensitivity(converted, analysis, held, batches)
    readers = [next(one for one in analysis.consumers if one.owner == name) for name in ("into", "back")]
    return tuple(found[analysis.root[reader.ins]].ravel() for reader in readers)  # type: ignore


def test_of_one_output_it_is_exact() -> None:
    model, x = made(1)
    for found, wanted in zip(by_package(model, x, list(x.split(1))), by_hand(model, x), strict=True):
        assert found == pytest.approx(wanted, rel=1e-4)


def test_what_is_masked_counts_for_nothing() -> None:
    model, x = made(1)
    converted = convert(copy.deepcopy(model))
    torch.manual_seed(1)
    masks = as_masks(converted, {name: torch.rand(layer.weight.shape) > 0.4 for name, layer in variational_layers(converted)})
    for found, wanted in zip(by_package(model, x, list(x.split(1)), masks), by_hand(model, x, masks), strict=True):
        assert found == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("size", [1, 3])
def test_of_many_outputs_it_is_that_of_all_of_them_whatever_the_batches(size: int) -> None:
    """Projections are random, hence this many: 3 standard errors are 8% of a square and 4% of its root."""
    model, x = made(4)
    batches = list(x.split(size)) * (3000 * size // len(x))
    for found, wanted in zip(by_package(model, x, batches), by_hand(model, x), strict=True):
        assert found == pytest.approx(wanted, rel=0.06)


def test_the_model_and_the_random_numbers_stay_as_they_were() -> None:
    model, x = made(3)
    converted = convert(model).train()
    converted.norm.eval()
    converted.first.weight.requires_grad_(False)
    hold(converted, {name: torch.ones_like(layer.weight, dtype=torch.bool) for name, layer in variational_layers(converted)})
    before, state = {name: tensor.clone() for name, tensor in converted.state_dict().items()}, torch.random.get_rng_state()
    Ranking(converted, x[:2], examples=x.split(2))
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(torch.equal(before[name], tensor) for name, tensor in converted.state_dict().items())
    assert converted.training and not converted.norm.training and not converted.first.weight.requires_grad
    assert all(layer.mask is not None and layer.weight.grad is None for _, layer in variational_layers(converted))


def test_units_of_no_effect_go_first_though_their_weights_are_known_well() -> None:
    """The first units are never above 0, which information doesn't see; among equal units, one in two is removed."""
    torch.manual_seed(0)
    model = convert(nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)))
    with torch.no_grad():
        model[0].bias[:4] = -100
        model[0].weight[:4] *= 3
        model[2].weight[:, :4] *= 3
    x = torch.randn(200, 3)
    goal = {"parameters": 0.6}
    known, seen = Ranking(model, x[:2]).at(goal), Ranking(model, x[:2], examples=x.split(2)).at(goal)
    assert known.masks["0"].any(1)[:4].any() and not seen.masks["0"].any(1)[:4].any()
    assert seen.masks["0"].any(1)[4:].all()


class Separable(nn.Module):
    """A depthwise convolution between two others: its input and output channels are the same units."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Conv2d(2, WIDTH, 1)
        self.depthwise = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)
        self.out = nn.Conv2d(WIDTH, 1, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.gated(x, x.new_ones(WIDTH))

    def gated(self, x: Tensor, gate: Tensor) -> Tensor:
        """The network with the gate at the channel's last use."""
        return self.out(self.depthwise(self.into(x)) * gate[:, None, None]).flatten(1)


def test_a_channel_that_a_depthwise_convolution_reads_counts_once() -> None:
    """The network is linear in the gate, so the sensitivity is the change of the output when the channel is removed."""
    torch.manual_seed(0)
    model, x = Separable().eval(), torch.randn(6, 2, 4, 4)
    model.requires_grad_(False)
    whole = model(x)
    gates = [torch.ones(WIDTH).index_fill(0, torch.tensor([unit]), 0.0) for unit in range(WIDTH)]
    wanted = [float((whole - model.gated(x, gate)).square().mean().sqrt()) for gate in gates]
    converted = convert(copy.deepcopy(model))
    masks = {name: torch.ones_like(layer.weight, dtype=torch.bool) for name, layer in variational_layers(converted)}
    analysis = analyse(converted, x[:2], masks=as_masks(converted, masks))
    assert analysis is not None
    found = sensitivity(converted, analysis, as_masks(converted, masks), x.split(1))
    last = next(one for one in analysis.consumers if one.owner == "out")
    assert found[analysis.root[last.ins]].ravel() == pytest.approx(wanted, rel=1e-4)


def test_what_tells_nothing_is_an_error() -> None:
    model, x = made(1)
    converted = convert(model)
    with pytest.raises(UsageError, match="no batch"):
        Ranking(converted, x[:2], examples=iter(()))
    with pytest.raises(UsageError, match="not finite"):
        Ranking(converted, x[:2], examples=[x * float("nan")])
    with torch.inference_mode(), pytest.raises(UsageError, match="no gradients"):
        Ranking(converted, x[:2], examples=[x])


def test_a_model_visits_the_device_and_its_examples_only_for_the_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tracing, sizes and the weights' scores are computed where the model was; a record of the moves stands in for a GPU."""
    model, x = made(2)
    converted = convert(model)
    sent: list[str] = []
    monkeypatch.setattr(type(converted), "to", lambda model, device: sent.append(f"to {device}") or model)
    for name in ("analyse", "Sizes", "scores"):
        usual = getattr(_ranked, name)
        monkeypatch.setattr(
            _ranked, name, lambda *given, usual=usual, name=name, **more: sent.append(name) or usual(*given, **more)
        )
    there = Ranking(converted, x[:2], examples=x.split(2), device=torch.device("cpu", 0))
    assert [one for one in sent if one != "scores"] == ["analyse", "Sizes", "to cpu:0", "to cpu"]
    assert np.array_equal(there._score, Ranking(convert(made(2)[0]), x[:2], examples=x.split(2))._score)
