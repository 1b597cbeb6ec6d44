"""`convert.dropout: draw`: the dropout of a model is drawn together with its weights, in PyTorch, the checkpoint and ONNX."""

from __future__ import annotations

import copy

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

import svdcompress as svdc
from svdcompress.checkpoint import load, save
from svdcompress.errors import RecipeError
from svdcompress.layers import BernoulliDropout
from svdcompress.pipeline import converted, open_run, run
from svdcompress.pipeline._convert import check_dropout
from svdcompress.pipeline._search_words import untaught
from svdcompress.recipe import load_recipe
from svdcompress.uncertainty._baseline import dropout_baseline

RATE = 0.3
NET = """
from torch import nn

def net(sizes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 10))

def plain(sizes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.Dropout(0.0))
"""
SHORT = [
    *("data.limit=200", "dense.epochs=2", "train.epochs=2", "recover.epochs=1", "train.beta={start: 0, stop: 1, final: 0.01}"),
    *("uncertainty.samples=5", "device=cpu", "report.latency=false", "report.html=false", "convert.log_sigma2=-20"),
]


def recipe(tmp_path, *settings, name="net"):
    (tmp_path / "nets.py").write_text(NET)
    return load_recipe("digits", [*SHORT, f"model.name={tmp_path / 'nets.py'}:{name}", *settings])


DRAWS = 4000


def by_masks(model, x):
    """Outputs for DRAWS random masks of the hidden units, by hand; the weights are their means."""
    with torch.no_grad():
        hidden, last = model[:3](x), model[4]
        kept = torch.rand(DRAWS, *hidden.shape, generator=torch.Generator().manual_seed(0)) > RATE
        return nn.functional.linear(hidden * kept / (1 - RATE), last.weight * last.relevant(), last.bias)


def in_onnxruntime(file, x):
    session = onnxruntime.InferenceSession(file)
    found = session.run(None, {"input": x.numpy(), "samples": np.array(DRAWS)})
    return dict(zip([output.name for output in session.get_outputs()], found, strict=True))


def test_the_own_dropout_draws_in_the_small_model_and_in_its_onnx_file(tmp_path):
    results = run(recipe(tmp_path, "convert.dropout=draw", "recover.noise=false"), tmp_path / "run", quiet=True)
    assert max(results["parity"].values()) < 1e-4
    opened = open_run(tmp_path / "run", trust_code=True)
    layers = [layer for layer in opened.model.modules() if isinstance(layer, BernoulliDropout)]
    assert [layer.p for layer in layers] == [RATE]
    x = next(iter(opened.data.test.batches(4)))[0]
    with torch.no_grad():
        assert torch.equal(opened.model(x), opened.model(x))  # off outside of sampling
    spread = svdc.mc_predict(opened.model, x, DRAWS, task="regression").variance
    weights_alone = copy.deepcopy(opened.model)
    for layer in weights_alone.modules():
        if isinstance(layer, BernoulliDropout):
            layer.p = 0.0
    assert float(spread.mean()) > 5 * float(svdc.mc_predict(weights_alone, x, DRAWS, task="regression").variance.mean())
    explicit = by_masks(opened.model, x)
    assert float(spread.mean() / explicit.var(0).mean()) == pytest.approx(1.0, abs=0.1)
    told = in_onnxruntime(tmp_path / "run" / "model_mc.onnx", x)
    ours = svdc.mc_predict(opened.model, x, DRAWS)
    assert float(told["mutual_information"].mean()) == pytest.approx(float(ours.mutual_information.mean()), rel=0.1)


def test_by_default_dropout_is_as_torch_has_it():
    model = converted(nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)), load_recipe("digits", []))
    assert type(model[1]) is nn.Dropout


def test_rates_stay():
    model = converted(nn.Sequential(nn.Linear(4, 3), nn.Dropout2d(0.5)), load_recipe("digits", ["convert.dropout=draw"]))
    assert type(model[1]) is BernoulliDropout and model[1].p == 0.5 and model[1].channels


def test_a_model_without_dropout_is_told(tmp_path):
    with pytest.raises(
        RecipeError, match=r"convert\.dropout: draw: Sequential has no dropout layer.*Use convert.dropout: keep"
    ):
        run(recipe(tmp_path, "convert.dropout=draw", name="plain"), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run" / "dense.safetensors").exists()  # raised before anything is trained


def test_a_cut_at_once_says_what_its_variances_are_worth():
    at_once = ["recover.epochs=0", "train.epochs=0"]
    (line,) = untaught(load_recipe("digits", at_once))
    assert "never trained" in line and "deviations and mutual information say little" in line
    (line,) = untaught(load_recipe("digits", [*at_once, "convert.dropout=draw"]))
    assert "what the weights add to the draws of dropout says little" in line


class Attends(nn.Module):
    """Has two dropouts but uses only the rate of one of them, as attention in transformers does."""

    def __init__(self, p=0.5, own=0.1):
        super().__init__()
        self.lin, self.drop, self.idle = nn.Linear(4, 4), nn.Dropout(p), nn.Dropout(own)

    def forward(self, x):
        return self.drop(nn.functional.dropout(self.lin(x), self.idle.p, self.training))


DRAW = load_recipe("digits", ["convert.dropout=draw"])


def test_dropout_that_is_never_called_is_told():
    model, x = Attends(), torch.zeros(2, 4)
    (line,) = check_dropout(model, DRAW, x)
    assert "1 dropout layers are never called" in line and line.endswith("idle")
    assert not model.drop._forward_hooks and model.training
    with pytest.raises(RecipeError, match="Attends calls none of its 1 dropout layers"):
        check_dropout(Attends(p=0.0), DRAW, x)
    with pytest.raises(RecipeError, match="layer 'drop' has rate 1"):
        check_dropout(Attends(p=1.0), DRAW, x)
    assert check_dropout(Attends(p=0.0), load_recipe("digits", []), x) == []


def test_dropout_in_a_fused_encoder_draws():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, batch_first=True)
    model, x = nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Linear(8, 1)).eval(), torch.randn(3, 5, 8)
    assert check_dropout(model, DRAW, x) == []
    assert float(svdc.mc_predict(svdc.convert_dropout(copy.deepcopy(model)), x, 20, task="regression").variance.mean()) > 1e-3
    assert float(svdc.mc_predict(converted(model, DRAW), x, 20, task="regression").variance.mean()) > 1e-3


def test_one_dropout_in_two_places_is_so_in_the_checkpoint(tmp_path):
    def net():
        drop = nn.Dropout(0.3)
        return nn.Sequential(nn.Linear(4, 6), drop, nn.ReLU(), drop, nn.Linear(6, 2))

    save(converted(net(), DRAW), tmp_path / "model.safetensors")
    again = load(tmp_path / "model.safetensors", net())
    assert again[1] is again[3] and type(again[3]) is BernoulliDropout


def test_dropout_that_is_put_into_a_fused_encoder_draws():
    """The report's baseline: in a network trained without dropout, it is inserted before the layers."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model, x = nn.Sequential(nn.TransformerEncoder(layer, 2)).eval(), torch.randn(3, 5, 8)
    dropped, rate, inserted = dropout_baseline(model, lambda one: 0.0)
    assert inserted and rate is not None
    assert float(svdc.mc_predict(dropped, x.clone(), 20, task="regression").variance.mean()) > 1e-6
