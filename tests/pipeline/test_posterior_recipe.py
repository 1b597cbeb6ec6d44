"""`convert.posterior` in a recipe: which layers get it, and a run from training to the files and back."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from svdcompress.errors import RecipeError
from svdcompress.layers import variational_layers
from svdcompress.pipeline import converted, open_run, run
from svdcompress.recipe import load_recipe

SHORT = [
    *("data.limit=200", "dense.epochs=2", "train.epochs=4", "recover.epochs=1", "train.beta={start: 0, stop: 2, final: 0.3}"),
    *("uncertainty.samples=3", "device=cpu", "report.latency=false", "convert.posterior=rank-one"),
]


def test_rules_for_layers_come_before_what_holds_for_all():
    rule = "convert.layers=[{match: '2', posterior: independent, log_sigma2: -6}]"
    model = converted(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), load_recipe("digits", [*SHORT, rule]))
    assert [layer.posterior.name for _, layer in variational_layers(model)] == ["rank-one", "independent"]
    assert load_recipe("digits", []).convert.posterior == "independent"
    with pytest.raises(RecipeError, match=r"convert\.posterior"):
        load_recipe("digits", ["convert.posterior=low-rank"])


def test_a_run_that_shrinks_comes_to_its_end_and_opens_again(tmp_path):
    recipe = load_recipe("digits", [*SHORT, "train.shrink=2"])
    results = run(recipe, tmp_path / "run", quiet=True)
    assert max(results["parity"].values()) < 1e-4
    model = open_run(tmp_path / "run").model
    layers = dict(variational_layers(model))
    assert {str(layer.posterior) for layer in layers.values()} == {"rank-one"}
    assert all((layer.log_sigma2 - recipe.convert.log_sigma2).abs().max() > 1e-3 for layer in layers.values())
    assert results["sparse"]["parameters"] == sum(p.numel() for name, p in model.named_parameters() if "log_sigma2" not in name)
    x = next(iter(open_run(tmp_path / "run").data.test.batches(3)))[0]
    assert torch.isfinite(model(x)).all()
