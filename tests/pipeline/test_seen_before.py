"""Weights trained elsewhere, perhaps on the validation examples too: a warning, wherever they come from."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from svdcompress.pipeline import run
from svdcompress.pipeline._judged import judged
from svdcompress.pipeline._search_start import _seen
from svdcompress.recipe import load_recipe
from svdcompress.sources import InMemory

X = torch.randn(300, 5, generator=torch.Generator().manual_seed(0))


def said(model, y, given=True, settings=(), task="classification", scale=None, held=None):
    """The warning for a linear model. held: other targets for the validation examples."""
    held = y[200:] if held is None else held
    data = SimpleNamespace(
        task=task, dim=1, target_scale=scale, train=InMemory(X[:200], y[:200]), validation=InMemory(X[200:], held)
    )
    recipe = load_recipe(None, ["data=npz:x.npz", *settings])
    context = SimpleNamespace(recipe=recipe, place=SimpleNamespace(device=torch.device("cpu")))
    found = judged(model, data.validation, data, "cpu")
    return _seen(context, data, SimpleNamespace(model=model, given=given), found)  # type: ignore[arg-type]


def linear(outputs, *rows):
    model = nn.Linear(5, outputs)
    with torch.no_grad():
        model.weight.zero_()
        model.bias.zero_()
        for row, value in rows:
            model.weight[row, 0] = value
    return model


def test_a_classifier_that_knows_both_by_heart_is_told_of():
    model, y = linear(2, (1, 9.0)), (X[:, 0] > 0).long()
    assert "0% error on training and 0% error on validation" in str(said(model, y))
    assert said(model, y, given=False) is None  # trained by the run itself, which keeps the examples apart
    assert said(model, y, settings=["data.validation=npz:y.npz"]) is None
    held = y[200:].clone()
    held[:5] = 1 - held[:5]
    assert said(model, y, held=held) is None


def test_training_examples_are_taken_at_random():
    """Sorted by class, the first ones may be those that the model gets right."""
    model, y = linear(2, (1, 9.0)), (X[:, 0] > 0).long()
    y[:100] = 1 - y[:100]
    order = torch.cat([torch.arange(100, 200), torch.arange(100)])  # the first 100 without an error
    x = torch.cat([X[:200][order], X[200:]])
    data = SimpleNamespace(
        task="classification",
        dim=1,
        target_scale=None,
        train=InMemory(x[:200], y[:200][order]),
        validation=InMemory(x[200:], y[200:]),
    )
    recipe = load_recipe(None, ["data=npz:x.npz"])
    context = SimpleNamespace(recipe=recipe, place=SimpleNamespace(device=torch.device("cpu")))
    given = context, data, SimpleNamespace(model=model, given=True), judged(model, data.validation, data, "cpu")
    told = str(_seen(*given))  # type: ignore[arg-type]
    share = float(told.partition("have ")[2].partition("%")[0])
    assert 35 < share < 65


@pytest.mark.parametrize("scale", [None, (3.0, 20.0)])
def test_a_regression_is_told_of_by_the_ratio_of_its_errors(scale):
    noise = torch.tensor([1.0, -1.0] * 150)
    model = linear(1, (0, 1.0))

    def asked(held, train=0.05):
        y = X[:, 0] + torch.where(torch.arange(300) < 200, train, held) * noise
        return said(model, y[:, None], task="regression", scale=scale)

    assert "an RMSE of" in str(asked(0.05)) and "--validation SOURCE" in str(asked(0.05))
    assert asked(0.07) is None  # clearly worse on unseen examples
    assert asked(0.2, train=0.2) is None  # as bad on both: an honest model with noise that cannot be learned


FILE = """
import torch

def make():
    model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    with torch.no_grad():
        for part in model.parameters():
            part.zero_()
        for unit in range(0, 8, 2):  # four times the same, so that something can go
            model[0].weight[unit, 0], model[0].weight[unit + 1, 0] = 9.0, -9.0
            model[2].weight[1, unit], model[2].weight[0, unit + 1] = 9.0, 9.0
    return model

def data():
    x = torch.randn(400, 5, generator=torch.Generator().manual_seed(0))
    return x, (x[:, 0] > 0).long()
"""


@pytest.mark.parametrize("trained", [True, False])
def test_a_model_that_arrives_trained_without_a_file_of_weights_is_told_of(tmp_path, monkeypatch, trained):
    (tmp_path / "known.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("svdcompress.pipeline._dense.arrives_trained", lambda section, model: trained)
    quick = ["dense.epochs=1", "train.epochs=1", "recover.epochs=1", "search.levels=1", "search.trials=1", "export.onnx=false"]
    more = ["uncertainty.samples=0", "report.html=false", "report.latency=false", "search.max_drop=20", "device=cpu"]
    recipe = load_recipe(None, ["model=./known.py:make", "data=./known.py:data", *quick, *more])
    warned = " ".join(run(recipe, tmp_path / "run")["warnings"])
    assert ("probably trained on both" in warned) is trained
