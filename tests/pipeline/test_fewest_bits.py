"""The fewest bits that the validation error allows, on a model in which it is known which layer needs more."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

import svdcompress as svdc
from svdcompress.errors import UsageError
from svdcompress.export import export_onnx, importance, pack, unpack
from svdcompress.pipeline import fewest_bits
from svdcompress.pipeline._allowed import Allowed
from svdcompress.pipeline._baked import Baked
from svdcompress.sources import Data
from svdcompress.sources._examples import InMemory


@pytest.fixture
def opened(tmp_path, monkeypatch):
    """A run whose first layer has a decisive weight that is a fiftieth of the largest."""
    torch.manual_seed(0)
    model = svdc.convert(nn.Sequential(nn.Linear(40, 4), nn.Linear(4, 2)), threshold=1e6).eval()
    with torch.no_grad():
        for layer in (model[0], model[1]):
            layer.weight.zero_()
            layer.bias.zero_()
            layer.log_sigma2.fill_(-12.0)
        model[0].weight[:, 2:] = torch.randn(4, 38)
        model[0].weight[0, 0], model[0].weight[0, 1] = 5.0, 0.1
        model[0].weight[0, 2:] = 0
        model[1].weight[0, 0], model[1].weight[1, 0] = 1.0, -1.0
    x = torch.zeros(400, 40)
    x[:, 1] = torch.linspace(-1, 1, 400)
    x[:, 2:] = 0.1 * torch.randn(400, 38)
    y = (x[:, 1] < 0).long()
    examples = InMemory(x, y)
    data = Data(train=examples, validation=examples, test=examples, task="classification", outputs=2)
    export_onnx(model, tmp_path / "model.onnx", x[:2])
    monkeypatch.setattr("svdcompress.pipeline._fewest_bits.baked", lambda *_: Baked())
    recipe = SimpleNamespace(task="classification", search=SimpleNamespace(max_drop=None, max_error=None))
    facts = {"folder": tmp_path, "file": tmp_path.joinpath, "preprocessing": {}, "dim": 1, "results": {}}
    return SimpleNamespace(model=model, data=data, recipe=recipe, **facts)


def test_the_layer_that_decides_gets_more(opened, tmp_path):
    bits = fewest_bits(opened)
    assert bits["0"] > bits["1"] == 3
    bits = {f"{name}.weight": count for name, count in bits.items()}
    file = pack(tmp_path / "model.onnx", tmp_path / "a.svdc", "int8", bits=bits, importance=importance(opened.model))
    path = unpack(file.path, tmp_path / "back.onnx").path
    x, y = opened.data.validation.inputs.numpy(), opened.data.validation.targets.numpy()

    def error(file):
        return 100 * float(np.mean(onnxruntime.InferenceSession(str(file)).run(None, {"input": x})[0].argmax(1) != y))

    assert error(path) <= error(tmp_path / "model.onnx") + 100 / 400 + 1e-9
    fewer = {**bits, "0.weight": bits["0.weight"] - 1}
    pack(tmp_path / "model.onnx", tmp_path / "b.svdc", "int8", bits=fewer, importance=importance(opened.model))
    assert error(unpack(tmp_path / "b.svdc", tmp_path / "b.onnx").path) > error(path)


def test_a_runs_own_budget_counts(opened):
    opened.recipe.search.max_drop, opened.results = 100.0, {"dense": {"validation": {"error": 0.0}}}
    assert set(fewest_bits(opened).values()) == {3}


def test_where_eight_bits_are_too_few_it_says_so(opened, monkeypatch):
    monkeypatch.setattr(Allowed, "limit", -1.0)
    with pytest.raises(UsageError, match=r"with 8 bits the validation error is .*, and the limit is -1; use float16"):
        fewest_bits(opened)
    opened.model = nn.Linear(2, 2)
    with pytest.raises(UsageError, match="no variational layers with weights left"):
        fewest_bits(opened)
