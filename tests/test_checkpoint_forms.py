"""Checkpoints edited by hand: masks and variances of another shape are refused, settings in other forms are understood."""

import pytest
import torch
from test_checkpoint import rewritten
from torch import nn

import svdcompress as svdc
from svdcompress.checkpoint import read_manifest
from svdcompress.errors import CheckpointError
from svdcompress.layers import variational_layers


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3, bias=False))


def masked():
    model = svdc.convert(net(), log_sigma2=-5.0)
    return svdc.hold(model, {name: torch.rand(layer.weight.shape) > 0.4 for name, layer in variational_layers(model)})


@pytest.mark.parametrize(
    ("name", "shape"),
    [("0.mask", (1, 6)), ("0.mask", (6,)), ("2.mask", ()), ("0.bias_sigma2", (1,)), ("2.bias_sigma2", (3,))],
)
@pytest.mark.parametrize("fresh", [net, masked])
def test_masks_and_variances_that_would_be_spread_are_refused(fresh, name, shape, tmp_path):
    path, model = tmp_path / "model.safetensors", fresh()
    svdc.save(masked(), path)
    rewritten(path, {name: torch.ones(shape, dtype=torch.bool if name.endswith("mask") else torch.float32)})
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=f"{name}.*shape"):
        svdc.load(path, model)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_those_of_a_layers_own_shape_are_taken(tmp_path):
    path = tmp_path / "model.safetensors"
    svdc.save(masked(), path)
    rewritten(path, {"0.mask": torch.zeros(12, 6, dtype=torch.bool), "0.bias_sigma2": torch.ones(12)})
    layer = svdc.load(path, net())[0]
    assert not layer.mask.any() and bool((layer.bias_sigma2 == 1).all())


def test_shares_and_thresholds_may_be_written_in_any_form(tmp_path):
    path = tmp_path / "model.safetensors"
    svdc.save(svdc.convert(net(), log_sigma2=-1.0), path)
    layers = read_manifest(path)["layers"]
    rewritten(path, layers={name: {**layer, "share": ["weight", "input"], "threshold": -2.0} for name, layer in layers.items()})
    for model in (svdc.load(path, net()), svdc.load(path, svdc.convert(net()))):
        for _, layer in variational_layers(model):
            assert layer.share == {"weight": 0.5, "input": 0.5} and set(layer.threshold.values()) == {-2.0}
        assert torch.isfinite(svdc.kl_divergence(model))
        assert svdc.relevance(model).kept < svdc.relevance(model, threshold=3.0).kept
