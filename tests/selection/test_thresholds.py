"""The threshold that a run reports is the one that was used."""

import pytest
import torch
from torch import nn

from svdcompress import convert
from svdcompress.errors import PruneError
from svdcompress.recipe import load_recipe
from svdcompress.relevance import as_masks, hold
from svdcompress.selection import check_some_left, choose, look_at
from svdcompress.sources import InMemory


def chosen(*overrides: str, second: dict | None = None):
    torch.manual_seed(0)
    x = torch.randn(2, 6)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    if second:
        convert(model, include=["2"], **second)
    convert(model, filter_fn=lambda module, name: type(module) is nn.Linear)
    with torch.no_grad():
        for layer in (model[0], model[2]):
            layer.log_sigma2.uniform_(-12, 4)
    return choose(model, load_recipe(None, list(overrides)), lambda m: {"error": 1.0, "nll": 0.0}, x), model


def test_a_layer_with_a_limit_of_its_own_is_told():
    found, model = chosen(second={"threshold": 8.0})
    assert found.asked is None and found.threshold == {"0": 3.0, "2": 8.0}
    assert torch.equal(found.masks["0"], model[0].log_alpha() < 3) and torch.equal(found.masks["2"], model[2].log_alpha() < 8)
    assert "threshold={'0': 3.0, '2': 8.0}" in repr(found)


def test_a_threshold_of_the_recipe_goes_over_a_layers_own():
    found, model = chosen("relevance.threshold=1", second={"threshold": 8.0})
    assert found.threshold == 1.0 and torch.equal(found.masks["2"], model[2].log_alpha() < 1)


@pytest.mark.parametrize("share", ["input", ["weight", "input"]])
def test_limits_are_those_of_the_shares_that_a_layer_has(share):
    found, _ = chosen("relevance.threshold={weight: 2, input: 5}", second={"share": share})
    assert found.limits["0"] == {"weight": 2.0}
    assert found.threshold == {"0": 2.0, "2": 5.0 if share == "input" else {"weight": 2.0, "input": 5.0}}


@pytest.mark.parametrize("posterior", ["independent", "rank-one"])
def test_the_curve_counts_non_zeros_whatever_the_posterior_keeps_its_variances_in(posterior):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
    means = sum(parameter.numel() for parameter in model.parameters())
    convert(model, posterior=posterior, share="weight" if posterior == "independent" else "input")
    found = choose(model, load_recipe(None), lambda m: {"error": 1.0, "nll": 0.0}, torch.randn(2, 8))
    biases = 32 + 2
    assert all(biases <= point["nonzero"] <= means for point in found.curve)
    at_three = next(point for point in found.curve if point["threshold"] == 3.0)
    assert at_three["nonzero"] == biases + found.masks.kept


def test_a_look_leaves_the_masks_that_a_model_holds():
    model = convert(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2)))
    own = {name: torch.rand(model[int(name)].weight.shape) > 0.5 for name in ("0", "2")}
    hold(model, own)
    others = as_masks(model, {"0": torch.ones(8, 6, dtype=torch.bool), "2": torch.zeros(2, 8, dtype=torch.bool)})
    seen = []
    look_at(model, others, lambda m: seen.append(m[0].mask.clone()) or {})
    assert seen[0].all() and torch.equal(model[0].mask, own["0"]) and torch.equal(model[2].mask, own["2"])
    with pytest.raises(PruneError, match="nothing is left of layer '2'"):
        check_some_left(model, others, InMemory(torch.randn(4, 6), torch.zeros(4)))
    with pytest.raises(ZeroDivisionError):
        look_at(model, others, lambda m: 1 / 0)
    assert torch.equal(model[0].mask, own["0"]) and torch.equal(model[2].mask, own["2"])
