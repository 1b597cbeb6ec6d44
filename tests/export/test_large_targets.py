"""Monte-Carlo files of targets that are large compared with their deviation, against explicit draws in float64."""

import copy

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

import svdcompress as svdc
from svdcompress.errors import UsageError
from svdcompress.export import export_onnx
from svdcompress.likelihoods import Gaussian, Regression
from svdcompress.pipeline import sets_of
from svdcompress.pipeline._baked import Baked
from svdcompress.pipeline._onnx_model import OnnxModel

LARGE = (12345678.25, 1.5)
RESULTS = {"promises": {"coverage": {"samples": {"kind": "intervals", "coverage": 0.9, "width": 1.7, "examples": 99}}}}


def network(likelihood, outputs):
    torch.manual_seed(0)
    model = svdc.convert(nn.Linear(3, outputs), log_sigma2=-5.0).eval()
    with torch.no_grad():
        model.weight.copy_(torch.linspace(0.3, 1, 3 * outputs).view(outputs, 3))  # all are relevant
    return svdc.set_likelihood(model, likelihood), torch.randn(7, 3)


def by_hand(model, x, noise):
    """Each draw's output in float64: noise is on the output of the layer, one number for each row and output."""
    wide, x = copy.deepcopy(model).double(), x.double()
    mean = x @ wide.weight.T + wide.bias
    return mean + (x.square() @ wide.log_sigma2.exp().T).sqrt() * noise.double().view(len(noise), *mean.shape)


@pytest.mark.parametrize("target", [(0.5, 2.0), LARGE, (-1e9, 1e3)])
@pytest.mark.parametrize("likelihood", [Regression(tau=20.0), Gaussian(temperature=2.0)], ids=repr)
def test_variances_are_those_of_draws_in_float64(tmp_path, likelihood, target):
    gaussian = likelihood.name == "gaussian"
    model, x = network(likelihood, 2 if gaussian else 1)
    units = Baked(target=target, likelihood=likelihood.plain())
    own, small = sets_of(RESULTS, "samples", likelihood), units.drawn(model)
    path = export_onnx(small, tmp_path / "mc.onnx", x, monte_carlo=True, noise="input", target_scale=target, further=own).path
    session = onnxruntime.InferenceSession(str(path))
    noise = torch.randn(50, x.shape[0] * (2 if gaussian else 1))
    names = [value.name for value in session.get_outputs()]
    got = session.run(names, {"input": x.numpy(), "noise": noise.numpy(), "samples": np.array(50)})
    found = {name: array.astype(np.float64) for name, array in zip(names, got, strict=True)}

    shift, scale = target
    with torch.no_grad():
        mean, variance = likelihood.moments(likelihood.heads(by_hand(model, x, noise).flatten(0, 1)))
        mean, variance = (each.view(50, -1, 1).numpy() * unit for each, unit in ((mean, scale), (variance, scale**2)))
    epistemic, aleatoric = mean.var(0), variance.mean(0)
    assert (epistemic > 1e-3 * scale**2).all()
    assert np.allclose(found["epistemic"], epistemic, rtol=1e-4)
    assert np.allclose(found["aleatoric"], aleatoric, rtol=1e-4)
    assert np.allclose(found["variance"], epistemic + aleatoric, rtol=1e-4)
    half = 1.7 * np.sqrt(epistemic + aleatoric)
    for name, wanted in (("mean", 0.0), ("lower", -half), ("upper", half)):
        wanted = mean.mean(0) + wanted + shift
        rounding = np.spacing(np.abs(wanted).astype(np.float32)) / 2  # no float32 can be closer
        assert (np.abs(found[name] - wanted) <= 1.01 * rounding + 1e-5 * scale).all(), name


@pytest.mark.parametrize("target", [(0.5, 2.0), LARGE, (1e9, 1e3)])
def test_the_mean_of_the_deterministic_file_is_the_nearest_number(tmp_path, target):
    model, x = network(Regression(), 1)
    units = Baked(target=target, likelihood=Regression())
    path = export_onnx(units.model(model), tmp_path / "model.onnx", x).path
    (found,) = onnxruntime.InferenceSession(str(path)).run(None, {"input": x.numpy()})
    shift, scale = target
    standard = model(x).detach().double().numpy()
    rounding = np.spacing(np.abs(found)).astype(np.float64) / 2
    assert (np.abs(found - (standard * scale + shift)) <= 1.01 * rounding + 1e-5 * scale).all()
    assert (np.abs(OnnxModel(path, units)(x).numpy() - standard) <= 1.01 * rounding / scale + 1e-5).all()


def test_units_belong_to_monte_carlo(tmp_path):
    model, x = network(Regression(), 1)
    with pytest.raises(UsageError, match="noise, tau, target_scale and parts belong to monte_carlo=True"):
        export_onnx(model, tmp_path / "model.onnx", x, target_scale=LARGE)
