"""What stays makes up for what goes in a search: at each step, before recovery, in the choice of ways; not where it is off."""

from types import SimpleNamespace

import pytest
import torch
from test_cool import SHAPES
from test_search import searching
from torch import nn

from svdcompress.convert import convert
from svdcompress.errors import RecipeError
from svdcompress.layers import variational_layers
from svdcompress.pipeline import _reconstruct, run
from svdcompress.pipeline._choose_masks import option
from svdcompress.pipeline._reconstruct import Reconstructor
from svdcompress.pipeline._ways import Way
from svdcompress.recipe import load_recipe
from svdcompress.reconstruction import reconstruct
from svdcompress.relevance import as_masks, hold
from svdcompress.sources import InMemory


class Cuts:
    """What was asked of `Reconstructor.cut`, and what it changed."""

    def __init__(self, patch):
        self.masks, self.before, self.moved, self.found = [], [], [], []
        cut = Reconstructor.cut

        def noted(reconstructor, model, masks, before):
            weights = {name: layer.weight.detach().clone() for name, layer in variational_layers(model)}
            self.masks.append(masks)
            self.before.append(before)
            self.found.append(cut(reconstructor, model, masks, before))
            self.moved.append(
                {name for name, layer in variational_layers(model) if not torch.equal(weights[name], layer.weight)}
            )
            return self.found[-1]

        patch.setattr(Reconstructor, "cut", noted)


def test_each_step_and_the_last_cut_are_reconstructed_and_told(tiny_recipe, tmp_path, monkeypatch):
    cuts = Cuts(monkeypatch)
    results = run(searching(tiny_recipe, *SHAPES), tmp_path / "run")
    (trial,) = results["search"]["trials"]
    assert len(cuts.masks) == 4 and cuts.before[0] is None
    for before, masks in zip(cuts.before[1:], cuts.masks, strict=False):  # each goes on from the last one
        assert all(torch.equal(before[name], masks[name]) for name in masks)
    assert all(moved for moved in cuts.moved)
    assert trial["reconstruction"] == cuts.found[-1].to_dict()
    assert 0 < trial["reconstruction"]["after"] < trial["reconstruction"]["before"] and trial["reconstruction"]["left"] == {}


@pytest.mark.parametrize("other", [["search.reconstruct=off"], ["search.goal='nonzero=6x'"], ["search.goal='parameters=1x'"]])
def test_not_where_it_is_off_or_no_unit_goes_that_lives(tiny_recipe, tmp_path, monkeypatch, other):
    cuts = Cuts(monkeypatch)
    results = run(searching(tiny_recipe, *SHAPES, *other), tmp_path / "run")
    assert cuts.masks == [] and results["search"]["trials"][0]["reconstruction"] is None


def test_off_and_auto_are_all_there_is():
    assert load_recipe(None, ["search.reconstruct=off"]).search.reconstruct == "off"  # which YAML reads as false
    with pytest.raises(RecipeError, match=r"search\.reconstruct"):
        load_recipe(None, ["search.reconstruct=always"])


def opened_of(x):
    return SimpleNamespace(data=SimpleNamespace(train=InMemory(x, torch.zeros(len(x), dtype=torch.long))), inputs=x[:2])


@pytest.mark.parametrize(("numbers", "count"), [(2**25, 1024), (30 * 200, 200), (30, 64)])
def test_as_many_examples_as_memory_allows(monkeypatch, numbers, count):
    monkeypatch.setattr(_reconstruct, "NUMBERS", numbers)
    model = convert(nn.Sequential(nn.Linear(4, 30), nn.Linear(30, 3)))
    assert len(Reconstructor(opened_of(torch.randn(5000, 4)), model, torch.device("cpu")).inputs) == count
    assert len(Reconstructor(opened_of(torch.randn(50, 4)), model, torch.device("cpu")).inputs) == min(50, count)


def test_ways_are_judged_as_they_are_reconstructed():
    torch.manual_seed(0)
    model = convert(nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 3)), log_sigma2=-40.0).eval()
    x = torch.randn(400, 4)
    y = model(x).argmax(1)
    masks = {name: torch.ones_like(layer.weight, dtype=torch.bool) for name, layer in variational_layers(model)}
    masks["0"][:6], masks["2"][:, :6] = False, False
    train = InMemory(x, y)
    data = SimpleNamespace(train=train, task="classification", dim=1, target_scale=None)
    opened = SimpleNamespace(data=data, inputs=x[:2])
    reconstructor = Reconstructor(opened, model, torch.device("cpu"))
    way, before = Way("even", as_masks(model, masks), 9.0, None, 9.0), model[2].weight.detach().clone()
    found = option(model, way, train, data, "cpu", None, reconstructor)
    plain = option(model, way, train, data, "cpu")
    assert torch.equal(model[2].weight, before) and model[2].mask is None
    reconstruct(model, reconstructor.fewer, masks, rows=4096)
    with torch.no_grad():
        wanted = nn.functional.cross_entropy(hold(model, masks)(x), y)
    assert found.nll == pytest.approx(float(wanted), rel=1e-5) and found.nll < plain.nll
