"""A run of a model with everything that conversion has to detect: a weight that is read directly, derived weights, a subclass,
a head used only in training."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from svdcompress.layers import variational_layers
from svdcompress.pipeline import estimate, open_run, run
from svdcompress.pipeline._convert import converted
from svdcompress.pipeline._dense import check_patterns, dense_model
from svdcompress.recipe import load_recipe

MODEL = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm


class Same(nn.Linear):
    pass


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = weight_norm(nn.Linear(64, 24))
        self.hidden, self.past, self.head = Same(24, 20), nn.Linear(20, 20), nn.Linear(20, 10)
        self.aux = nn.Linear(24, 10)

    def forward(self, x):
        x = torch.relu(self.first(x.flatten(1)))
        aux = self.aux(x) if self.training else None
        x = torch.relu(self.hidden(x))
        x = self.head(torch.relu(F.linear(x, self.past.weight, self.past.bias)))
        return (x, aux) if self.training else x


make = Net
"""

SETTINGS = [
    *("data.limit=200", "dense.epochs=2", "dense.lr=0.01", "train.epochs=3", "train.lr=0.01", "recover.epochs=1"),
    *("train.beta={start: 0, stop: 2, final: 0.3}", "convert.share=input", "uncertainty.samples=3", "device=cpu"),
    *("report.latency=false", "convert.derived=fold"),
]


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "odd.py").write_text(MODEL, encoding="utf-8")
    return load_recipe("digits", [f"model.name={tmp_path}/odd.py:make", "model.args={}", *SETTINGS])


def test_the_plan_says_what_is_done_with_each(recipe):
    found = {entry.name: entry for entry in estimate(recipe).plan}
    assert found["first"].converted and "WeightNorm (torch.nn.utils.parametrize)" in found["first"].note
    assert found["hidden"].converted and found["aux"].converted
    assert "its weight is read directly by the model itself" in found["past"].reason
    kept = recipe.model_copy(deep=True)
    kept.convert.derived = "keep"
    assert "convert.derived: fold" in {entry.name: entry for entry in estimate(kept).plan}["first"].reason


@pytest.mark.slow
def test_a_run_comes_to_its_end_and_opens_again(recipe, tmp_path):
    results = run(recipe, tmp_path / "run", quiet=True)
    assert max(results["parity"].values()) < 1e-4 and results["pruning"]["notes"] == []
    opened = open_run(tmp_path / "run", trust_code=True)
    assert {name for name, _ in variational_layers(opened.model)} == {"first", "hidden", "head", "aux"}
    x = torch.randn(4, 64)
    assert opened.model(x).shape == (4, 10) and opened.dense(x).shape == (4, 10)
    assert opened.model.train()(x)[1].shape == (4, 10)


def test_a_model_in_half_precision_is_told_of(tmp_path):
    (tmp_path / "half.py").write_text(
        "from torch import nn\nmake = lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).half()\n"
    )
    recipe = load_recipe("digits", [f"model.name={tmp_path}/half.py:make", "model.args={}", "device=cpu"])
    notes = []
    model, trained = dense_model(recipe, notes)
    assert model[1].weight.dtype == torch.float32 and not trained
    assert "has float16 weights but is trained in float32" in notes[0] and "train.precision" in notes[0]
    assert notes[0] in estimate(recipe).notes


def test_a_rule_for_a_container_is_one_for_what_is_inside():
    rules = "convert.layers=[{match: body, log_sigma2: -4}]"
    recipe = load_recipe(None, ["model=mlp", "data=digits", rules, "prune.protect=[body]"])
    model = nn.ModuleDict({"body": nn.Sequential(nn.Linear(4, 4), nn.ReLU()), "head": nn.Linear(4, 2)})
    check_patterns(model, recipe)
    model = converted(model, recipe)
    assert [layer.log_sigma2[0, 0].item() for _, layer in variational_layers(model)] == [-4.0, -10.0]


def log_alphas(model):
    """log alpha of each layer's root-mean-square weight, from its definition."""
    return {n: float((m.log_sigma2 - m.weight.square().mean().log()).mean().detach()) for n, m in variational_layers(model)}


def test_the_nearest_start_of_the_variances_counts():
    def starts(*settings):
        torch.manual_seed(0)
        model = converted(nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4)), load_recipe(None, list(settings)))
        return [float(m.log_sigma2.mean().detach()) for _, m in variational_layers(model)], list(log_alphas(model).values())

    sigmas, _ = starts("convert.log_sigma2=-8", "convert.layers=[{match: '2', prior: log-uniform}]")
    assert sigmas == [-8, -8]
    sigmas, alphas = starts("convert.log_alpha=-6", "convert.layers=[{match: '2', log_sigma2: -9}]")
    assert alphas[0] == pytest.approx(-6, abs=1e-4) and sigmas[1] == -9
    sigmas, alphas = starts("convert.log_sigma2=-8", "convert.layers=[{match: '2', log_alpha: -5}]")
    assert sigmas[0] == -8 and alphas[1] == pytest.approx(-5, abs=1e-4)
