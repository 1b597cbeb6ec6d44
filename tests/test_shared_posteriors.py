"""The KL of layers that share parameters: each posterior counts once, with each weight that any layer uses; and their files."""

import warnings

import pytest
import torch
from torch import nn

import svdcompress as svdc
from svdcompress.layers import Posterior


class FixedNoise(Posterior):
    """Has nothing to train: the noise follows the weight."""

    name, parameters = "fixed-noise-of-test", ()

    def start(self, layer, log_sigma2):
        return {}

    def log_sigma2(self, layer):
        return -2.0 + (layer.weight.square() + 1e-12).log()


def close(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=0)


def ard(weight, log_sigma2):
    return 0.5 * torch.log1p(weight**2 / log_sigma2.exp())


def two(tie=False, bias=True):
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 6, bias=bias), nn.Linear(6, 6, bias=bias)
            if tie:
                self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(torch.relu(self.a(x)))

    return Net()


def test_a_posterior_without_parameters_counts_in_each_layer():
    model = svdc.convert(two(), posterior=FixedNoise())
    kl = svdc.kl_divergence(model)
    close(kl, sum(ard(layer.weight, layer.log_sigma2).sum() for layer in (model.a, model.b)))
    kl.backward()
    assert model.b.weight.grad.abs().max() > 0


def test_one_variance_for_two_weights_counts_twice():
    model = svdc.convert(two())
    model.b.log_sigma2 = model.a.log_sigma2
    wanted = ard(model.a.weight, model.a.log_sigma2).sum() + ard(model.b.weight, model.a.log_sigma2).sum()
    close(svdc.kl_divergence(model), wanted)


@pytest.mark.parametrize("open_one", [None, "a", "b"])
def test_tied_layers_count_what_any_of_them_uses(open_one):
    model = svdc.convert(two(tie=True))
    close(svdc.kl_divergence(model), ard(model.a.weight, model.a.log_sigma2).sum())
    masks = {name: torch.ones(6, 6, dtype=torch.bool) for name in "ab"}
    masks["a"][:4], masks["b"][3:] = False, False  # neither uses row 3
    svdc.hold(model, masks)
    union = masks["a"] | masks["b"]
    if open_one:
        getattr(model, open_one).mask, union = None, torch.ones_like(union)
    kl = svdc.kl_divergence(model)
    close(kl, (ard(model.a.weight, model.a.log_sigma2) * union).sum())
    kl.backward()
    assert torch.equal(model.a.log_sigma2.grad != 0, union)


def test_weights_of_a_parametrization_count_each():
    model = svdc.convert(two())
    for layer in (model.a, model.b):
        nn.utils.parametrizations.weight_norm(layer)
    wanted = sum(ard(layer.weight, layer.log_sigma2).sum() for layer in (model.a, model.b))
    close(svdc.kl_divergence(model), wanted)


def test_a_file_of_tied_layers_for_a_model_that_ties_none_is_warned_of(tmp_path):
    torch.manual_seed(0)
    svdc.save(svdc.convert(two(tie=True)), tmp_path / "tied.safetensors")
    with pytest.warns(
        UserWarning, match=r"tied\.safetensors: b\.\w+ and a\.\w+ share one tensor in the file but are separate in this model"
    ):
        svdc.load(tmp_path / "tied.safetensors", two())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        svdc.load(tmp_path / "tied.safetensors", two(tie=True))
        svdc.save(svdc.convert(two()), tmp_path / "two.safetensors")
        svdc.load(tmp_path / "two.safetensors", two())


@pytest.mark.parametrize("fused", [False, True])
def test_validation_within_sampling_sees_what_an_optimizer_wrote(fused):
    torch.manual_seed(0)
    x = torch.randn(64, 6)
    model = svdc.convert(nn.Sequential(nn.Linear(6, 3)), log_sigma2=-12.0, threshold=99.0).eval()
    optimizer = torch.optim.Adam(model.parameters(), 0.1, fused=fused)
    with svdc.sampling(model):
        for _ in range(5):
            with torch.no_grad():
                model(x)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        with torch.no_grad():
            now = model(x)
    wanted = nn.functional.linear(x, model[0].weight, model[0].bias)
    assert (now - wanted).detach().abs().max() < 0.05  # noise of e^-6 on each weight
