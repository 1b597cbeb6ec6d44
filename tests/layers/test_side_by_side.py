"""Images laid side by side for a convolution, against the convolution itself in float64."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from svdcompress.layers import _arranged, _side_by_side, arranged_convolutions

EXACT = 1e-12


@pytest.fixture(autouse=True)
def tiles(monkeypatch):
    """Pretend that the CPU multiplies tiles, and use the method even for few weights."""
    for module in (_arranged, _side_by_side):
        monkeypatch.setattr(module, "AMX", True)
    monkeypatch.setattr(_side_by_side, "MANY", 30)


def random(*size, seed=0):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


ASKED = [
    ((3, 3), {"padding": 1}),
    ((3, 3), {"padding": (1, 2)}),
    ((3, 3), {}),
    ((2, 2), {"padding": 1}),
    ((1, 5), {"padding": (0, 3)}),
    ((3, 1), {"padding": (2, 0)}),
    ((3, 3), {"padding": 2, "dilation": (1, 2)}),
    ((4, 2), {"padding": (1, 0)}),
]


@pytest.mark.parametrize(("kernel", "more"), ASKED)
def test_values_and_gradients_are_those_of_the_convolution(kernel, more):
    x, weight, bias = random(5, 8, 4, 4), random(6, 8, *kernel, seed=1), random(6, seed=2)
    given = [tensor.requires_grad_() for tensor in (x, weight, bias)]
    how = _side_by_side.laid(x, weight, 1, more.get("padding", 0), more.get("dilation", 1), 1)
    assert how is not None
    found = _side_by_side.side_by_side(lambda *args: F.conv2d(*args, **more), x, weight, bias, *how)
    expected = F.conv2d(*given, **more)
    assert found.shape == expected.shape and found.is_contiguous()  # a model may call view
    torch.testing.assert_close(found, expected, atol=EXACT, rtol=0)
    pull = random(*expected.shape, seed=3)
    for one, other in zip(torch.autograd.grad(found, given, pull), torch.autograd.grad(expected, given, pull), strict=True):
        torch.testing.assert_close(one, other, atol=EXACT * 100, rtol=0)


LEFT = [
    (random(5, 8, 4, 4), random(6, 8, 3, 3), (2, 1, 1, 1)),  # a stride
    (random(5, 8, 4, 4), random(6, 4, 3, 3), (1, 1, 1, 2)),  # groups
    (random(5, 8, 4, 4), random(6, 8, 3, 3), (1, "same", 1, 1)),
    (random(5, 8, 4, 5), random(6, 8, 3, 3), (1, 1, 1, 1)),  # many positions
    (random(1, 8, 4, 4), random(6, 8, 3, 3), (1, 1, 1, 1)),  # one image
    (random(0, 8, 4, 4), random(6, 8, 3, 3), (1, 1, 1, 1)),  # none
    (random(8, 4, 4), random(6, 8, 3, 3), (1, 1, 1, 1)),  # without a batch
    (random(5, 8, 4, 4), random(60, 8, 1, 1), (1, 0, 1, 1)),  # a matrix product already
    (random(5, 8, 4, 4), random(1, 8, 3, 3), (1, 1, 1, 1)),  # few weights
    (random(5, 8, 4, 4), random(6, 8, 2, 2), (1, 2, 1, 1)),  # windows that contain nothing but padding
    (random(5, 8, 2, 2), random(6, 8, 3, 3), (1, 0, 1, 1)),  # torch refuses it
]


@pytest.mark.parametrize(("x", "weight", "more"), LEFT)
def test_what_it_is_not_for_is_left(x, weight, more):
    assert _side_by_side.laid(x, weight, *more) is None


class Recorded(nn.Module):
    """Two convolutions whose inputs are recorded."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 6, 3, padding=1, bias=False)

    def forward(self, x):
        return self.second(F.relu(self.first(x)))


def calls(monkeypatch):
    made = []
    real = _arranged.side_by_side
    monkeypatch.setattr(_arranged, "side_by_side", lambda *args: made.append(args[1].shape) or real(*args))
    return made


def test_dense_layers_in_autocast_are_laid_so_and_others_are_not(monkeypatch):
    made, model, x = calls(monkeypatch), Recorded(), random(5, 8, 4, 4).float()
    expected = model(x)
    with arranged_convolutions([model]):
        assert torch.equal(model(x), expected) and not made
        with torch.autocast("cpu", torch.bfloat16):
            found = model(x)
    assert len(made) == 2 and found.dtype == torch.bfloat16
    assert float((found - expected).detach().norm() / expected.detach().norm()) < 0.02


def test_calls_by_keyword_are_laid_so_too(monkeypatch):
    made, model, x = calls(monkeypatch), Recorded(), random(5, 8, 4, 4).float()
    weight, bias = model.first.weight, model.first.bias
    expected = F.conv2d(x, weight, bias, padding=1)
    with arranged_convolutions([model]), torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        for found in (
            F.conv2d(x, weight=weight, bias=bias, padding=np.int64(1)),
            F.conv2d(input=x, weight=weight, bias=bias, stride=[1], padding=(1, 1)),
        ):
            assert float((found - expected).norm() / expected.norm()) < 0.02
    assert len(made) == 2


def test_nothing_is_done_without_tiles_or_many_weights(monkeypatch):
    model = Recorded()
    monkeypatch.setattr(_side_by_side, "MANY", 10**6)
    assert not isinstance(arranged_convolutions([model]), _arranged._Arranged)
    monkeypatch.setattr(_side_by_side, "MANY", 30)
    assert isinstance(arranged_convolutions([model]), _arranged._Arranged)
    monkeypatch.setattr(_arranged, "AMX", False)
    assert not isinstance(arranged_convolutions([model]), _arranged._Arranged)
