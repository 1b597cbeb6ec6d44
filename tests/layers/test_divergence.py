"""The KL terms against their definitions: numerical integration, and torch.distributions at the best prior variance."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributions import Normal, kl_divergence

import svdcompress as svdc
from svdcompress.layers import (
    PRIORS,
    REDUCED,
    VariationalConv2d,
    VariationalConvTranspose2d,
    VariationalLinear,
    check_prior,
    group_log_alpha,
    kl_ard,
    kl_group_ard,
    kl_log_uniform,
    log_alpha,
)
from svdcompress.layers.priors import _groups

SHARES = ["weight", "input", "output", "layer", ["weight", "input"], {"weight": 0.25, "input": 0.5, "layer": 0.25}]


def layer_of(kind=VariationalLinear, *args, share="weight", prior="ard", seed=0, **kwargs):
    torch.manual_seed(seed)
    layer = kind(*(args or (7, 5)), share=share, prior=prior, **kwargs).double()
    with torch.no_grad():
        layer.weight.mul_(3)
        layer.log_sigma2.normal_(-2, 2)
    return layer


def groups(layer, share):
    """The indices of the kept weights of each group, written out by loops over the canonical view."""
    shape = layer.canonical(layer.weight).shape
    numbers = layer.canonical(torch.arange(layer.weight.numel()).view(layer.weight.shape))
    keep = torch.ones_like(layer.weight, dtype=torch.bool) if layer.mask is None else layer.mask
    found = {}
    for g in range(shape[0]):
        for o in range(shape[1]):
            for i in range(shape[2]):
                for k in range(shape[3]):
                    key = {"weight": (g, o, i, k), "input": (g, i), "output": (g, o), "layer": ()}[share]
                    number = int(numbers[g, o, i, k])
                    found.setdefault(key, []).extend([number] if keep.view(-1)[number] else [])
    return [group for group in found.values() if group]


def slow_kl(layer):
    """The layer's KL group by group, from the definitions."""
    mu, sigma2 = layer.weight.reshape(-1), layer.log_sigma2.exp().reshape(-1)
    total = 0.0
    for name, part in layer.share.items():
        for group in groups(layer, name):
            square, noise = mu[group].square(), sigma2[group]
            if layer.prior == "ard":
                best = (square + noise).mean() + 1e-8
                term = kl_divergence(Normal(mu[group], noise.sqrt()), Normal(0, best.sqrt())).sum()
                # At the best variance the quadratic part of a normal's KL is 0, except for the 1e-8 that is added to it.
                term = term - (0.5 * (square + noise) / best - 0.5).sum()
            else:
                alpha = noise.sum() / (square.sum() + 1e-8)
                term = len(group) * kl_log_uniform(alpha.log())
            total = total + part * term
    return total


# The formulas


def test_log_uniform_against_numerical_integration():
    """KL(N(mu, alpha mu^2) || log-uniform) = E log|1 + sqrt(alpha) z| - 0.5 log alpha, up to the constant that makes it 0
    for alpha without bounds: -E log|z| = (gamma + log 2) / 2."""
    z = (torch.arange(4_000_000, dtype=torch.float64) + 0.5) / 4_000_000 * 20 - 10
    density = torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi) * (20 / 4_000_000)
    constant = (0.5772156649 + math.log(2)) / 2
    for value in (-8.0, -4.0, -2.0, -1.0, 0.0, 1.0, 2.0, 4.0, 8.0):
        expected = (density * (1 + math.exp(value / 2) * z).abs().log()).sum().item() - value / 2 + constant
        # The paper's approximation; what is left is its own error, at most 0.01.
        assert kl_log_uniform(torch.tensor(value, dtype=torch.float64)).item() == pytest.approx(expected, abs=0.012)


def test_ard_is_the_kl_to_the_best_prior():
    mu, sigma = torch.randn(50, dtype=torch.float64), torch.rand(50, dtype=torch.float64) + 0.01
    best = kl_divergence(Normal(mu, sigma), Normal(0, (mu**2 + sigma**2).sqrt()))
    assert torch.allclose(kl_ard(log_alpha(mu, (sigma**2).log())), best.sum(), rtol=1e-6)
    for factor in (0.9, 1.1):
        assert (kl_divergence(Normal(mu, sigma), Normal(0, factor * (mu**2 + sigma**2).sqrt())) > best).all()


def test_group_ard_is_the_kl_to_the_best_shared_prior():
    mu, sigma = torch.randn(4, 6, dtype=torch.float64), torch.rand(4, 6, dtype=torch.float64) + 0.01
    shared = (mu**2 + sigma**2).mean(0, keepdim=True).sqrt()
    best = kl_divergence(Normal(mu, sigma), Normal(0, shared)).sum(0)
    assert torch.allclose(kl_group_ard(mu, (sigma**2).log(), (0,)), best.sum(), rtol=1e-6)
    for factor in (0.9, 1.1):
        assert (kl_divergence(Normal(mu, sigma), Normal(0, factor * shared)).sum(0) > best).all()
    alone = kl_group_ard(mu[..., None], (sigma**2).log()[..., None], (2,))
    assert torch.allclose(alone, kl_ard(log_alpha(mu, (sigma**2).log())), rtol=1e-6)


def test_group_log_alpha():
    mu, sigma2 = torch.randn(4, 6).double(), torch.rand(4, 6).double()
    assert torch.allclose(group_log_alpha(mu, sigma2.log(), (1,)).exp(), sigma2.sum(1) / mu.square().sum(1), rtol=1e-5)


@pytest.mark.parametrize("prior", PRIORS)
def test_kl_falls_to_zero_as_noise_grows(prior):
    layer = VariationalLinear(3, 3, prior=prior)
    values = []
    for log_sigma2 in (-20.0, -10.0, 0.0, 10.0, 20.0):
        layer.log_sigma2.data.fill_(log_sigma2)
        values.append(float(layer.kl().detach()))
    assert values == sorted(values, reverse=True)
    assert abs(values[-1]) < 1e-4


# The layers


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("share", SHARES, ids=str)
@pytest.mark.parametrize("prior", PRIORS)
class TestLayer:
    def layer(self, prior, share, masked):
        layer = layer_of(VariationalConv2d, 4, 6, (2, 1), groups=2, prior=prior, share=share)
        if masked:
            layer.mask = torch.rand(layer.weight.shape) > 0.5
            layer.canonical(layer.mask)[0, :, 1] = False  # a whole input
            layer.canonical(layer.mask)[1, 2] = False  # a whole output
        return layer

    def test_value(self, prior, share, masked):
        layer = self.layer(prior, share, masked)
        assert layer.kl().shape == ()
        assert torch.allclose(layer.kl(), slow_kl(layer), rtol=1e-9)

    def test_gradients(self, prior, share, masked):
        layer = self.layer(prior, share, masked)
        parameters = [layer.weight, layer.log_sigma2]
        ours, oracle = (torch.autograd.grad(kl, parameters) for kl in (layer.kl() * 3, slow_kl(layer) * 3))
        for one, other in zip(ours, oracle, strict=True):
            assert torch.allclose(one, other, rtol=1e-9, atol=1e-12)
            assert layer.mask is None or (one[~layer.mask] == 0).all()

    def test_gradcheck(self, prior, share, masked):
        layer = self.layer(prior, share, masked)

        def kl(weight, log_sigma2):
            return torch.func.functional_call(Kl(layer), {"layer.weight": weight, "layer.log_sigma2": log_sigma2}, ())

        assert torch.autograd.gradcheck(kl, (layer.weight, layer.log_sigma2))

    def test_float32_and_lower(self, prior, share, masked):
        layer = self.layer(prior, share, masked)
        exact = layer.kl().detach()
        single = layer.float().kl()
        assert single.dtype == torch.float32
        assert torch.allclose(single.double(), exact, rtol=1e-5)
        half = layer.to(torch.bfloat16)
        half.kl().backward()
        assert half.kl().dtype == torch.float32  # bfloat16 is too coarse for a sum over weights
        assert torch.allclose(half.kl().double(), exact, rtol=0.03)
        assert half.log_sigma2.grad.isfinite().all()

    def test_frozen_parameters(self, prior, share, masked):
        layer = self.layer(prior, share, masked)
        layer.weight.requires_grad_(False)
        layer.kl().backward()
        assert layer.weight.grad is None and layer.log_sigma2.grad.abs().sum() > 0
        layer.log_sigma2.requires_grad_(False)
        assert not layer.kl().requires_grad


class Kl(nn.Module):
    """A layer's KL as a forward pass."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self):
        return self.layer.kl()


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("share", SHARES, ids=str)
def test_masked_weights_count_as_if_they_were_not_there(prior, share):
    """A layer with weights held at zero has the KL of the smaller layer without them."""
    layer = layer_of(VariationalLinear, 6, 4, prior=prior, share=share)
    layer.mask = torch.zeros(4, 6, dtype=torch.bool)
    layer.mask[:2, 1:5] = True
    small = layer_of(VariationalLinear, 4, 2, prior=prior, share=share)
    small.weight.data, small.log_sigma2.data = layer.weight.data[:2, 1:5], layer.log_sigma2.data[:2, 1:5]
    assert torch.allclose(layer.kl(), small.kl(), rtol=1e-12)
    for name in layer.share:
        if name != "weight":
            ours = layer.log_alpha(name)
            assert torch.allclose(ours[ours.isfinite()].sort()[0], small.log_alpha(name).flatten().sort()[0])
    layer.mask = torch.zeros_like(layer.mask)
    layer.kl().backward()
    assert layer.kl() == 0 and not layer.weight.grad.any() and not layer.log_sigma2.grad.any()
    assert not layer.relevant(3.0).any()


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("share", ["weight", "input"])
def test_values_at_the_edge_are_finite(prior, share):
    layer = VariationalLinear(4, 4, prior=prior, share=share)
    layer.weight.data[0] = 0
    for log_sigma2 in (-80.0, -30.0, 20.0, 40.0):
        layer.log_sigma2.data.fill_(log_sigma2)
        layer.zero_grad()
        layer.kl().backward()
        assert layer.kl().isfinite() and layer.weight.grad.isfinite().all() and layer.log_sigma2.grad.isfinite().all()


@settings(deadline=None, max_examples=40)
@given(
    groups_=st.integers(1, 3),
    outputs=st.integers(1, 3),
    inputs=st.integers(1, 3),
    kernel=st.tuples(st.integers(1, 2), st.integers(1, 3)),
    transposed=st.booleans(),
    share=st.dictionaries(st.sampled_from(sorted(REDUCED)), st.floats(0.1, 2), min_size=1),
    prior=st.sampled_from(PRIORS),
    masked=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_shape(groups_, outputs, inputs, kernel, transposed, share, prior, masked, seed):
    kind = VariationalConvTranspose2d if transposed else VariationalConv2d
    layer = layer_of(kind, inputs * groups_, outputs * groups_, kernel, groups=groups_, share=share, prior=prior, seed=seed)
    if masked:
        layer.mask = torch.rand(layer.weight.shape) > 0.6
    assert torch.allclose(layer.kl(), torch.as_tensor(slow_kl(layer)).double(), rtol=1e-9)


def test_a_tied_weight_counts_once():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    svdc.convert(model)
    assert torch.equal(svdc.kl_divergence(model), model[0].kl())


def test_memory_format_does_not_matter():
    layer = layer_of(VariationalConv2d, 4, 6, 3, share=["weight", "input"])
    expected = torch.autograd.grad(layer.kl(), [layer.weight, layer.log_sigma2])
    layer.to(memory_format=torch.channels_last)
    for one, other in zip(torch.autograd.grad(layer.kl(), [layer.weight, layer.log_sigma2]), expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-12)


@pytest.mark.parametrize("left", [0, 5, 18])
@pytest.mark.parametrize(("shape", "layout"), [((12, 10), (1, False)), ((6, 4, 3), (2, False)), ((6, 4, 3), (2, True))])
@pytest.mark.parametrize("prior", ["ard", "log-uniform"])
def test_few_kept_weights_are_taken_out_with_the_same_result(prior, shape, layout, left, monkeypatch):
    torch.manual_seed(left)
    weight, log_sigma2 = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(2))
    keep = torch.zeros(shape).flatten()
    keep[torch.randperm(len(keep))[:left]] = 1
    keep = keep.view(shape).bool()

    def found():
        value = check_prior(prior).kl(weight, log_sigma2, keep, {"weight": 1.0}, layout)
        return value, *torch.autograd.grad(3 * value, (weight, log_sigma2))

    alone = ((), 1.0)
    assert len(_groups._few(keep, (alone,))) == left
    assert _groups._few(keep, (alone, ((1, 3), 1.0))) is None and _groups._few(~keep, (alone,)) is None
    packed = found()
    monkeypatch.setattr(_groups, "FEW", -1.0)
    for one, other in zip(packed, found(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_weights_apart_are_what_the_general_function_gives():
    """The compiler uses the general one."""
    layer = layer_of(VariationalConv2d, 4, 6, 3, groups=2)
    assert layer.apart
    parameters = [layer.weight, layer.log_sigma2]
    general = check_prior("ard").kl(*parameters, None, {"weight": 1.0}, (2, False))
    assert torch.allclose(layer.kl(), general, rtol=1e-12)
    for one, other in zip(torch.autograd.grad(layer.kl(), parameters), torch.autograd.grad(general, parameters), strict=True):
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-14)


def test_gradients_of_weights_far_from_their_noise():
    """`0.5 (sigma2 / m - 1)` would be 0 in float32 for each of these."""
    layer = VariationalLinear(3, 1)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1e-3, 1e-2, 0.0]]))
        layer.log_sigma2.fill_(4.0)
    layer.kl().backward()
    exact = -0.5 * (layer.weight.detach().double().square() + 1e-8) / math.exp(4)
    torch.testing.assert_close(layer.log_sigma2.grad.double(), exact, rtol=1e-4, atol=0)


class Doubled(VariationalLinear):
    def kl(self):
        return 2 * super().kl()


@pytest.mark.parametrize("small", [0, 30, 2**20])
def test_layers_together_are_the_sum_of_each(small, monkeypatch):
    monkeypatch.setattr(svdc.objective, "SMALL", small)
    layers = [
        layer_of(seed=1),
        layer_of(VariationalConv2d, 3, 4, 3, seed=2),
        layer_of(share="input", seed=3),
        layer_of(prior="log-uniform", seed=4),
        layer_of(seed=5).float(),
        layer_of(seed=6).bfloat16(),
        layer_of(seed=7),
        layer_of(Doubled, 4, 3, seed=8),
        layer_of(seed=9),
    ]
    layers[6].mask = torch.rand(layers[6].weight.shape) > 0.5
    layers[8].weight.requires_grad_(False)
    model = nn.Sequential(*layers)
    slow = [slow_kl(layer) * (2 if isinstance(layer, Doubled) else 1) for layer in layers]
    # the sum has the dtype of the first term
    assert svdc.kl_divergence(model).item() == pytest.approx(sum(float(value) for value in slow), rel=1e-3)
    parameters = [p for layer in layers for p in (layer.weight, layer.log_sigma2) if p.requires_grad]
    svdc.kl_divergence(model).backward()
    want = torch.autograd.grad(sum(value.double() for value in slow), parameters)
    for parameter, other in zip(parameters, want, strict=True):
        wide = parameter.dtype == torch.float64
        torch.testing.assert_close(parameter.grad, other, rtol=1e-9 if wide else 0.05, atol=1e-12 if wide else 0.02)
    assert layers[8].weight.grad is None
