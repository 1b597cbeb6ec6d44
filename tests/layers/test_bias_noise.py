"""The noise of a bias (from removed units) and that of a sampler, in every path that draws, with gradients too."""

import copy

import pytest
import torch
from layer_cases import CASES, layer_draws, weight_draws
from torch import nn

import svdcompress as svdc
from svdcompress.layers import drawing, variational_layers

DRAWS = 3000
NAMES = ["linear", "linear-sequence", "hf-conv1d", "conv1d", "conv2d", "conv2d-groups", "conv2d-one", "transposed2d"]


def noisy(name, log_sigma2=None):
    """A layer whose bias has a variance, its input, and the variance of each output due to weights and bias."""
    case = CASES[name]
    layer, x = case.layer(), case.x()
    if log_sigma2 is not None:
        layer.log_sigma2.data.fill_(log_sigma2)
    layer.bias_sigma2 = torch.linspace(0.2, 0.6, len(layer.bias))
    with torch.no_grad():
        weights = weight_draws(case, layer, x, DRAWS).var(0)
    shape = [-1] + [1] * case.dims
    return case, layer, x, weights + layer.bias_sigma2.view(shape)


def alike(draws, variance, slack=1.0):
    # The standard error of a normal sample's log variance is sqrt(2 / draws); here there are two of them.
    return (draws.float().var(0) / variance).log().abs().max() < slack * 5 * (4 / DRAWS) ** 0.5


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("name", NAMES)
class TestVariance:
    def test_in_training(self, name, gradients):
        case, layer, x, variance = noisy(name)
        with torch.set_grad_enabled(gradients):
            draws = layer_draws(case, layer, x, DRAWS)
        assert draws.requires_grad == gradients and alike(draws.detach(), variance)

    def test_under_sampling(self, name, gradients):
        case, layer, x, variance = noisy(name)
        layer.eval().mask = torch.ones_like(layer.weight, dtype=torch.bool)
        with torch.set_grad_enabled(gradients), svdc.sampling(layer, local=True, generator=torch.Generator().manual_seed(1)):
            draws = layer_draws(case, layer, x, DRAWS)
        assert draws.requires_grad == gradients and alike(draws.detach(), variance)
        with torch.set_grad_enabled(gradients), svdc.sampling(layer, generator=torch.Generator().manual_seed(1)):
            draws = torch.stack([layer(x) for _ in range(800)])
        assert draws.requires_grad == gradients and alike(draws.detach(), variance, 2)

    def test_in_half_precision(self, name, gradients):
        case, layer, x, variance = noisy(name)
        with torch.set_grad_enabled(gradients), torch.autocast("cpu", torch.bfloat16):
            draws = layer_draws(case, layer, x, DRAWS)
        assert draws.dtype == torch.bfloat16 and alike(draws.detach(), variance, 1.3)
        half = copy.deepcopy(layer).to(torch.bfloat16)
        with torch.set_grad_enabled(gradients):
            draws = layer_draws(case, half, x.bfloat16(), DRAWS)
        assert alike(draws.detach(), variance, 1.3)


@pytest.mark.parametrize("name", ["linear", "conv2d"])
def test_compiled(name):
    torch.compiler.reset()
    _, layer, x, variance = noisy(name)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    draws = compiled(x.expand(DRAWS, *x.shape).flatten(0, 1)).unflatten(0, (DRAWS, len(x)))
    assert draws.requires_grad and alike(draws.detach(), variance)
    torch.compiler.reset()


@pytest.mark.parametrize("name", ["linear", "conv2d-groups"])
def test_gradients_know_of_it(name):
    """Gradients of a draw with fixed noise, against numerical ones: the standard deviation includes weights and bias."""
    case, layer, x, _ = noisy(name)
    layer, x = layer.double(), case.x().double().requires_grad_()
    layer.bias_sigma2 = layer.bias_sigma2.double()
    names = [name for name, _ in layer.named_parameters()]

    def output(x, *parameters):
        torch.manual_seed(5)
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x,))

    assert torch.autograd.gradcheck(output, (x, *layer.parameters()), fast_mode=True)


def test_without_gradients_of_the_variances():
    """`recover.noise: false` trains only the means: its layers compute as in `eval()`; with bias noise, if there is any."""
    _, layer, x, variance = noisy("linear")
    layer.log_sigma2.requires_grad_(False)
    draws = layer_draws(CASES["linear"], layer, x, DRAWS)
    assert draws.requires_grad and alike(draws.detach(), variance)
    layer.eval()
    assert torch.equal(layer(x), layer(x))


def network():
    torch.manual_seed(0)
    dense = nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(5, 8)
    )
    return dense.append(nn.ReLU()).append(nn.Linear(8, 3))


def test_a_pruned_model_that_is_trained_on_has_the_noise_of_what_was_removed(tmp_path):
    """As `recover` does: pruned, saved, loaded into a new model from the factory, trained with gradients."""
    model = svdc.convert(network(), log_sigma2=-4.0)
    masks = {}
    with torch.no_grad():
        for name, layer in variational_layers(model):
            layer.bias.add_(0.5)
            masks[name] = torch.ones_like(layer.weight, dtype=torch.bool)
    masks["0"][:3], masks["3"][:2], masks["6"][:4] = False, False, False
    x = torch.rand(2, 1, 8, 8)
    svdc.hold(model, masks)
    svdc.save(svdc.prune(model, x, masks=masks), tmp_path / "pruned.safetensors")
    small = svdc.load(tmp_path / "pruned.safetensors", network())
    assert small[0].out_channels == 3 and all(small[i].bias_sigma2.any() for i in (3, 6, 8))
    for each in (model, small):
        each.train()
    rows = x.repeat(DRAWS, 1, 1, 1)
    a, b = (each(rows).detach().unflatten(0, (DRAWS, 2)) for each in (small, model))
    assert (a.var(0) / b.var(0)).log().abs().max() < 5 * (4 / DRAWS) ** 0.5
    error = ((a.var(0) + b.var(0)) / DRAWS).sqrt()
    assert ((a.mean(0) - b.mean(0)).abs() / error).max() < 4.5
    # It is a large part of the variance: without it the test above would fail.
    for i in (3, 6, 8):
        small[i].bias_sigma2 = None
    without = small(rows).detach().unflatten(0, (DRAWS, 2))
    assert (without.var(0) / b.var(0)).log().abs().min() > 0.3
    small(rows).square().mean().backward()
    assert all(parameter.grad.isfinite().all() for parameter in small.parameters())


def test_a_samplers_own_noise_is_used_as_it_is():
    """Fixed noise, with and without gradients: the output is exactly mean + spread * noise."""
    _, layer, x, _ = noisy("linear")
    layer.eval()

    class Fixed(svdc.layers.Sampler):
        def normal(self, like):
            return torch.full_like(like, 1.5)

    for gradients in (False, True):
        with torch.set_grad_enabled(gradients), drawing([layer], Fixed()):
            got = layer(x)
        keep = layer.relevant()
        spread = (x.square() @ (layer.log_sigma2.exp() * keep).t() + layer.bias_sigma2).sqrt()
        torch.testing.assert_close(got.detach(), (x @ (layer.weight * keep).t() + layer.bias + 1.5 * spread).detach())
