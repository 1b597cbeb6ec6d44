"""Moments through dense layers whose weight is computed from other tensors: right, and without writing anything."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import svdcompress as svdc
from svdcompress.errors import ModelError
from svdcompress.uncertainty import mc_predict

DERIVED = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "weight_norm hook": nn.utils.weight_norm,
    "spectral_norm hook": nn.utils.spectral_norm,
    "prune": lambda layer: prune.random_unstructured(layer, "weight", 0.5),
    "plain": lambda layer: layer,
}
LAYERS = {
    "linear": (lambda: nn.Linear(5, 6), lambda: nn.Linear(6, 4), (3, 5)),
    "conv": (
        lambda: nn.Conv2d(2, 4, 3),
        lambda: nn.Conv2d(4, 2, 3, stride=2, padding=1, groups=2, padding_mode="circular"),
        (3, 2, 6, 7),
    ),
    "transposed": (lambda: nn.Conv1d(2, 4, 3), lambda: nn.ConvTranspose1d(4, 6, 3, stride=2, groups=2), (3, 2, 7)),
}


def made(layer, derive):
    torch.manual_seed(0)
    first, second, shape = LAYERS[layer]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch deprecates these hooks
        model = nn.Sequential(first(), DERIVED[derive](second()))
    svdc.convert(model, include=["0"], log_sigma2=-3.0)
    return model.eval(), torch.randn(shape)


def through_the_jacobian(model, x):
    """The diagonal of J v J^T for the second layer as it runs, where v are the variances of its independent inputs."""
    with torch.no_grad():
        mean, variance = model[0].moments(x)
        mean, variance = mean[:1], variance[:1]
        jacobian = torch.autograd.functional.jacobian(model[1], mean).flatten(0, -1 - mean.dim()).flatten(1)
        return (jacobian.square() @ variance.flatten()).double()


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("derive", DERIVED)
def test_variances_are_those_of_the_weight_that_runs(layer, derive):
    if layer == "transposed" and derive == "orthogonal":
        pytest.skip("torch has none of it")
    model, x = made(layer, derive)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    got = mc_predict(model, x, task="regression", method="moments").epistemic[0].flatten()
    torch.testing.assert_close(got, through_the_jacobian(model, x), rtol=1e-4, atol=1e-9)
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in state.items())


def test_a_hook_that_changes_the_output_has_no_rule():
    model, x = made("linear", "plain")
    seen = []
    handle = model[1].register_forward_hook(lambda layer, args, output: seen.append(output.shape))
    mc_predict(model, x, task="regression", method="moments")
    assert seen  # a hook that only observes is no reason to refuse
    handle.remove()
    model[1].register_forward_hook(lambda layer, args, output: 2 * output)
    with pytest.raises(ModelError, match="no rule for a Linear whose hooks change"):
        mc_predict(model, x, task="regression", method="moments")
