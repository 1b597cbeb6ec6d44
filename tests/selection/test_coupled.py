"""Units that several layers share are judged as one."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from masking import gap, masked, outputs, shake
from torch import Tensor, nn
from zoo_models import ZOO

from svdcompress.convert import convert
from svdcompress.errors import UsageError
from svdcompress.layers import variational_layers
from svdcompress.prune import prune
from svdcompress.relevance import hold, relevance
from svdcompress.selection import coupled_relevance


class Residual(nn.Module):
    """A stream of 6 units that three layers read: `inner`, `outer` and `head`."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.inner, self.outer, self.head = nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        return self.head(x + self.outer(torch.tanh(self.inner(x))))


def alpha(layers: list[nn.Module], column: int) -> float:
    """From the definition: log of the sum of variances over the sum of squared means of all weights that read a unit."""
    noise = sum(layer.log_sigma2[:, column].double().exp().sum().item() for layer in layers)
    signal = sum(layer.weight[:, column].double().square().sum().item() for layer in layers)
    return math.log(noise) - math.log(signal + 1e-8)


def test_a_stream_goes_or_stays_as_a_whole() -> None:
    torch.manual_seed(0)
    model = convert(shake(Residual()), share="input")
    with torch.no_grad():
        for _, layer in variational_layers(model):
            layer.log_sigma2.fill_(-4)
        model.inner.log_sigma2[:, 0] = 4.0  # unit 0 is irrelevant for `inner`, but `head` needs it: it stays for both
        model.head.weight[:, 0] = 40.0
        for layer in (model.inner, model.head):  # unit 2 is irrelevant for both
            layer.log_sigma2[:, 2] = 5.0
    own, masks = relevance(model), coupled_relevance(model, torch.randn(2, 4))
    assert not own["inner"][:, 0].any() and own["head"][:, 0].all()
    for unit in range(6):
        lives = alpha([model.inner, model.head], unit) < 3
        for name in ("inner", "head"):
            assert bool(masks[name][:, unit].any()) is lives and bool(masks[name][:, unit].all()) is lives
    assert masks["inner"][:, 0].all() and not masks["inner"][:, 2].any()
    x = torch.randn(3, 4)
    small = prune(model, x, masks=masks)
    assert small.stem.out_features == small.outer.out_features == small.head.in_features == 5
    assert gap(outputs(small.eval(), x), outputs(masked(model, dict(masks)), x)) <= 1e-5


def test_single_weights_are_still_judged_in_units_that_stay() -> None:
    torch.manual_seed(0)
    model = convert(shake(Residual()), share=["weight", "input"])
    with torch.no_grad():
        for _, layer in variational_layers(model):
            layer.log_sigma2.fill_(-12)
        model.head.weight[1, 4] = 1e-4
    masks = coupled_relevance(model, torch.randn(2, 4))
    assert masks["head"].sum() == 17 and not masks["head"][1, 4]


@pytest.mark.parametrize("side", ["input", "output"])
def test_rows_and_columns_that_the_other_side_drops_stay_dropped(side: str) -> None:
    torch.manual_seed(0)
    model = convert(shake(Residual()), share=["input", "output"])
    with torch.no_grad():
        for _, layer in variational_layers(model):
            layer.weight.fill_(1.0)
            layer.log_sigma2.fill_(-8)
        noise = model.inner.log_sigma2
        (noise[:2] if side == "input" else noise[:, :2]).fill_(5.0)
    own, masks = relevance(model), coupled_relevance(model, torch.randn(2, 4), side=side)
    assert own["inner"].sum() < 30 and torch.equal(masks["inner"], own["inner"])


SHARES = ["weight", "input", "output", "layer"]


@settings(deadline=None, max_examples=25)
@given(
    share=st.lists(st.sampled_from(SHARES), min_size=1, unique=True),
    side=st.sampled_from(["input", "output"]),
    limits=st.none() | st.fixed_dictionaries({name: st.floats(-1, 6) for name in SHARES}),
    held=st.booleans(),
    seed=st.integers(0, 99),
)
def test_coupling_judges_one_side_and_leaves_the_rest(
    share: list[str], side: str, limits: dict[str, float] | None, held: bool, seed: int
) -> None:
    """No weight stays that another share drops; units that stay keep everything that the other shares leave."""
    torch.manual_seed(seed)
    model = convert(Residual(), share=share)
    layers = dict(variational_layers(model))
    with torch.no_grad():
        for layer in layers.values():
            layer.weight.normal_()
            layer.log_sigma2.copy_(torch.randn(layer.weight.shape) * 2 + torch.randn(layer.weight.shape[1]) * 3)
            if held:
                layer.mask = torch.rand(layer.weight.shape) > 0.1
    masks = coupled_relevance(model, torch.randn(2, 4), threshold=limits, side=side)
    for name, layer in layers.items():
        others = layer.relevant(limits, ignoring=side)
        assert not (masks[name] & ~others).any()
        dim = 0 if side == "input" else 1
        whole = (masks[name] == others).all(dim) | ~masks[name].any(dim)
        assert whole.all()
        if held:
            assert not (masks[name] & ~layer.mask).any()


@pytest.mark.parametrize("name", ["resnet-basic", "mobilenet-v3", "gated-mlp", "timm-vit", "densenet", "resnext"])
@pytest.mark.parametrize("side", ["input", "output"])
def test_units_of_real_networks_go_as_a_whole(name: str, side: str) -> None:
    torch.manual_seed(1)
    factory, inputs = ZOO[name]
    model, x = convert(shake(factory()).eval(), share=side), inputs()
    with torch.no_grad():
        for _, layer in variational_layers(model):
            layer.log_sigma2.copy_(torch.randn_like(layer.log_sigma2) * 0.5 + layer.weight.square().mean().log() + 2.9)
    masks = coupled_relevance(model, x, side=side)
    small = prune(model, x, masks=masks)
    assert gap(outputs(small.eval(), x), outputs(masked(model, dict(masks)), x)) <= 1e-5
    for layer in (layer for _, layer in variational_layers(small)):
        groups = layer.canonical(layer.mask)
        dims = (1, 3) if side == "input" else (2, 3)
        assert torch.equal(groups.any(dims[1]).any(dims[0]), groups.all(dims[1]).all(dims[0]))


def test_other_sides_are_refused() -> None:
    with pytest.raises(UsageError, match="side"):
        coupled_relevance(convert(Residual()), torch.randn(2, 4), side="both")


def test_a_mask_that_a_layer_holds_is_kept_unless_a_threshold_is_asked_for():
    torch.manual_seed(0)
    model = convert(Residual(), share="input", log_sigma2=-10.0)
    x = torch.randn(2, 4)
    hold(model, relevance(model))
    with torch.no_grad():
        for layer in (model.inner, model.outer, model.head):
            layer.log_sigma2[:, 0] = 12.0
    assert coupled_relevance(model, x).kept == relevance(model).kept == relevance(model).total
    assert coupled_relevance(model, x, threshold=3.0).kept < relevance(model).total
    model.head.mask = None  # alone, log alpha of everything that reads the unit decides
    masks = coupled_relevance(model, x)
    assert not masks["head"][:, 0].any() and masks["head"][:, 1:].all() and masks["inner"].all()


def test_a_side_that_the_threshold_does_not_name_keeps_the_layers_own_limit():
    torch.manual_seed(0)
    model = convert(shake(Residual()), share=["weight", "input"], threshold={"weight": 1.0, "input": -2.0})
    with torch.no_grad():
        for _, layer in variational_layers(model):
            layer.log_sigma2.uniform_(-6, 2)
    x = torch.randn(2, 4)
    found, named = (
        coupled_relevance(model, x, threshold=limits) for limits in ({"weight": 1.0}, {"weight": 1.0, "input": -2.0})
    )
    assert found.kept < found.total and all(torch.equal(found[name], named[name]) for name in found)
