"""MC dropout: moments, modes, members, and the conversion of torch's dropout layers."""

import pytest
import torch
from torch import nn

import svdcompress as svdc
from svdcompress.errors import ModelError
from svdcompress.layers import BernoulliDropout, GaussianDropout

KINDS = [BernoulliDropout, GaussianDropout]


@pytest.mark.parametrize("kind", KINDS)
def test_moments(kind):
    layer, draws = kind(0.2), 20_000
    y = layer(torch.full((draws,), 3.0))
    # Both have mean x and variance x^2 p / (1 - p); Bernoulli's values are 0 and x / (1 - p).
    variance = 9 * 0.2 / 0.8
    assert abs(y.mean() - 3) < 5 * (variance / draws) ** 0.5
    assert abs(y.var() / variance - 1) < 0.1
    if kind is BernoulliDropout:
        assert set(y.unique().tolist()) == {0.0, 3.75}


@pytest.mark.parametrize("kind", KINDS)
def test_modes(kind):
    layer, x = kind(0.5), torch.ones(4, 50)
    layer.eval()
    assert torch.equal(layer(x), x)
    with svdc.sampling(layer, generator=torch.Generator().manual_seed(0)):
        one = layer(x)
    with svdc.sampling(layer, generator=torch.Generator().manual_seed(0)):
        assert torch.equal(layer(x), one) and not torch.equal(layer(x), one)
    assert torch.equal(layer(x), x)
    assert torch.equal(kind(0.0)(x), x)


@pytest.mark.parametrize("kind", KINDS)
def test_members_drop_the_same_units_for_every_input(kind):
    layer, x = kind(0.5).eval(), torch.ones(4, 50)
    with svdc.sampling(layer, members=True) as sampler:
        one = layer(x)
        assert torch.equal(one, one[:1].expand(4, -1)) and torch.equal(layer(x), one)
        sampler.resample()
        assert not torch.equal(layer(x), one)


def test_members_of_a_layer_that_serves_several_widths():
    layer = BernoulliDropout(0.5).eval()
    with svdc.sampling(layer, members=True):
        wide, narrow = layer(torch.ones(4, 50)), layer(torch.ones(4, 20))
        assert torch.equal(layer(torch.ones(2, 50)), wide[:2]) and torch.equal(layer(torch.ones(2, 20)), narrow[:2])


@pytest.mark.parametrize("kind", KINDS)
def test_whole_channels(kind):
    y = kind(0.5, channels=True)(torch.ones(8, 16, 3, 3))
    assert torch.equal(y, y[:, :, :1, :1].expand_as(y))
    assert y[:, :, 0, 0].std() > 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_is_the_noise(kind):
    x = torch.full((50,), 2.0, requires_grad=True)
    y = kind(0.3)(x)
    y.sum().backward()
    assert torch.allclose(x.grad * 2, y)


@pytest.mark.parametrize("p", [-0.1, 1.0, 2])
def test_rate_outside_of_its_range(p):
    with pytest.raises(ModelError, match="dropout rate p"):
        BernoulliDropout(p)


def test_conversion_of_torch_dropout():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.3), nn.Sequential(nn.Dropout2d(0.4))).eval()
    svdc.convert_dropout(model)
    assert repr(model[1]) == "BernoulliDropout(p=0.3, channels=False)"
    assert repr(model[2][0]) == "BernoulliDropout(p=0.4, channels=True)"
    assert not model[1].training
    again = svdc.convert_dropout(nn.Sequential(nn.Dropout(0.3)), p=0.1, gaussian=True)
    assert repr(again[0]) == "GaussianDropout(p=0.1, channels=False)"
    with pytest.raises(ModelError, match="no dropout layer"):
        svdc.convert_dropout(nn.Sequential(nn.Linear(1, 1)))
