"""KL, log alpha and their gradients stay finite and right for log sigma2 from -100 to +80 and weights of 0 to 1e10."""

import math

import numpy as np
import pytest
import torch

import svdcompress as svdc
from svdcompress.layers import VariationalLinear, group_log_alpha, kl_ard, kl_group_ard, kl_log_uniform, log_alpha
from svdcompress.layers._alpha import EPS, start_at
from svdcompress.layers.priors._log_uniform import K1, K2, K3

DTYPES = {torch.float32: 1e10, torch.float16: 1e4, torch.bfloat16: 1e10}
"""The largest weight that is tried; float16 ends at 65,504."""

LOG_SIGMA2 = (-100.0, -60.0, -20.0, -8.0, 0.0, 10.0, 20.0, 40.0, 80.0)
SHARES = ("weight", "input", "output", "layer")


def weights(dtype):
    largest = DTYPES[dtype]
    return torch.tensor([[0.0, 1e-4, -1e-2], [0.5, -3.0, 200.0], [largest, -largest, 0.0], [0.0, 0.0, 0.0]], dtype=dtype)


def layer_of(dtype, log_sigma2, prior, share, weight=None):
    layer = VariationalLinear(3, 4, bias=False, prior=prior, share=share, log_sigma2=0.0)
    with torch.no_grad():
        layer.weight.copy_(weights(dtype).float() if weight is None else weight)
    layer = layer.to(dtype)
    with torch.no_grad():
        layer.log_sigma2.fill_(log_sigma2)
    return layer


def softplus(value):
    return max(value, 0.0) + math.log1p(math.exp(-abs(value)))


def term(alpha, prior):
    """The KL of a weight from its log alpha, in Python floats."""
    if prior == "ard":
        return 0.5 * softplus(-alpha)
    gate = -(K2 + K3 * alpha)
    return K1 * math.exp(-softplus(-gate)) + 0.5 * softplus(-alpha)


@pytest.mark.parametrize("prior", ["ard", "log-uniform"])
@pytest.mark.parametrize("log_sigma2", LOG_SIGMA2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kl_and_gradients_are_finite_for_every_share(dtype, log_sigma2, prior):
    for share in (*SHARES, ["weight", "output"]):
        layer = layer_of(dtype, log_sigma2, prior, share)
        kl = layer.kl()
        kl.backward()
        assert kl.dtype == torch.float32 and torch.isfinite(kl) and kl >= -1e-3, (share, kl)
        for name, parameter in layer.named_parameters():
            assert parameter.grad.dtype == dtype and torch.isfinite(parameter.grad).all(), (share, name, parameter.grad)


@pytest.mark.parametrize("prior", ["ard", "log-uniform"])
@pytest.mark.parametrize("log_sigma2", LOG_SIGMA2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kl_of_extremes_is_right(dtype, log_sigma2, prior):
    layer = layer_of(dtype, log_sigma2, prior, "weight")
    noise = float(layer.log_sigma2.detach()[0, 0])
    flat = layer.weight.detach().double().flatten().tolist()
    if prior == "ard":  # 0.5 (log(mu^2 + sigma2 + EPS) - log sigma2): EPS matters where sigma2 is smaller
        expected = sum(0.5 * softplus(math.log(mu**2 + EPS) - noise) for mu in flat)
    else:
        expected = sum(term(noise - math.log(mu**2 + EPS), prior) for mu in flat)
    assert float(layer.kl().detach()) == pytest.approx(expected, rel=2e-5, abs=1e-5)


@pytest.mark.parametrize("log_sigma2", LOG_SIGMA2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_log_alpha_and_relevance_are_those_of_wide_numbers(dtype, log_sigma2):
    layer = layer_of(dtype, log_sigma2, "ard", "weight")
    noise, mu = float(layer.log_sigma2.detach()[0, 0]), layer.weight.detach().double().numpy()
    found = layer.log_alpha()
    assert found.dtype == torch.float32 and torch.isfinite(found).all()
    np.testing.assert_allclose(found.detach().numpy(), noise - np.log(mu**2 + EPS), rtol=1e-5, atol=1e-4)
    found.sum().backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in layer.parameters())
    for share in SHARES[1:]:
        groups = layer.log_alpha(share).detach()
        count = mu.size / groups.numel()
        axes = {"input": (0,), "output": (1,), "layer": (0, 1)}[share]
        expected = noise + math.log(count) - np.log((mu**2).sum(axes) + EPS)
        np.testing.assert_allclose(groups.flatten().numpy(), np.ravel(expected), rtol=1e-5, atol=1e-4)
    expected = noise - np.log(mu**2 + EPS) < 3
    assert (svdc.relevance(torch.nn.Sequential(layer), 3.0)["0"].numpy() == expected).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_plain_functions_are_finite(dtype):
    for value in LOG_SIGMA2:
        weight = weights(dtype).requires_grad_()
        log_sigma2 = torch.full_like(weight, value).requires_grad_()
        alpha = log_alpha(weight, log_sigma2)
        found = [kl_ard(alpha), kl_log_uniform(alpha), group_log_alpha(weight, log_sigma2, (0,)).sum()]
        found += [kl_group_ard(weight, log_sigma2, dims) for dims in ((0,), (1,), (0, 1))]
        torch.stack(found).sum().backward()
        assert all(torch.isfinite(one) for one in found), (value, found)
        assert torch.isfinite(weight.grad).all() and torch.isfinite(log_sigma2.grad).all(), value
        assert math.isfinite(start_at(weight.detach(), -2.0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_layer_of_zeros_is_irrelevant_not_infinite(dtype):
    for prior in ("ard", "log-uniform"):
        for share in SHARES:
            layer = layer_of(dtype, -8.0, prior, share, weight=torch.zeros(4, 3))
            kl = layer.kl()
            kl.backward()
            assert torch.isfinite(kl) and all(torch.isfinite(p.grad).all() for p in layer.parameters())
            assert torch.isfinite(layer.log_alpha()).all() and torch.isfinite(layer.log_alpha(share)).all()


@pytest.mark.parametrize("share", [*SHARES, ["layer", "weight"], ["weight", "layer"]])
def test_groups_of_many_weights_do_not_overflow(share):
    """The sum of exp(80) over 90,000 weights overflows float32, but the mean does not."""
    for prior in ("ard", "log-uniform"):
        layer = VariationalLinear(300, 300, prior=prior, share=share, log_sigma2=80.0)
        layer.kl().backward()
        assert torch.isfinite(layer.kl()) and abs(layer.kl()) < 1
        assert torch.isfinite(layer.log_sigma2.grad).all() and torch.isfinite(layer.weight.grad).all()


def test_a_held_mask_keeps_the_gradients_of_extremes_finite():
    for dtype in DTYPES:
        for value in LOG_SIGMA2:
            layer = layer_of(dtype, value, "log-uniform", ["weight", "input"])
            layer.mask = torch.tensor([[True, False, True], [False, False, True], [True, False, False], [False, False, False]])
            layer.kl().backward()
            assert all(torch.isfinite(p.grad).all() for p in layer.parameters()), (dtype, value)
