"""Shapes, groups and padding beyond any list of cases: the layer against torch.nn, with and without variance."""

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from svdcompress.layers import VARIATIONAL_CLASSES


@st.composite
def convolutions(draw):
    """(a dense convolution, an input)"""
    dims, transposed = draw(st.integers(1, 3)), draw(st.booleans())
    groups = draw(st.integers(1, 3))
    sides = st.tuples(*[st.integers(1, 3)] * dims)
    args = {
        "in_channels": groups * draw(st.integers(1, 2)),
        "out_channels": groups * draw(st.integers(1, 2)),
        "kernel_size": draw(sides),
        "stride": draw(sides),
        "dilation": draw(st.tuples(*[st.integers(1, 2)] * dims)),
        "groups": groups,
        "bias": draw(st.booleans()),
    }
    if transposed:
        args["padding"] = draw(st.tuples(*[st.integers(0, 1)] * dims))
        args["output_padding"] = tuple(min(side, 2) - 1 for side in args["stride"])
    else:
        args["padding_mode"] = draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"]))
        args["padding"] = draw(st.one_of(st.tuples(*[st.integers(0, 2)] * dims), st.sampled_from(["same", "valid"])))
        if args["padding"] == "same":
            args["stride"] = (1,) * dims
    kind = getattr(nn, f"Conv{'Transpose' * transposed}{dims}d")
    torch.manual_seed(draw(st.integers(0, 9)))
    batch = draw(st.sampled_from([(), (1,), (2,)]))
    return kind(**args), torch.randn(*batch, args["in_channels"], *[draw(st.integers(4, 5)) for _ in range(dims)])


@settings(deadline=None, max_examples=120)
@given(convolutions())
def test_any_convolution(made):
    dense, x = made
    try:
        expected = dense(x)
    except RuntimeError:
        assume(False)  # torch itself refuses this shape
    layer = VARIATIONAL_CLASSES[type(dense)].from_dense(dense)
    layer.log_sigma2.data.normal_(-3, 1)
    # The first two moments, with torch.nn's own forward on the squares.
    sigma2 = layer.log_sigma2.detach().exp()
    spread = layer._transform(x.square(), sigma2, None).sqrt()
    torch.manual_seed(11)
    y = layer(x)
    torch.manual_seed(11)
    assert y.shape == expected.shape
    assert torch.allclose(y, expected + spread * torch.randn(y.shape), atol=1e-5)
    y.sum().backward()
    layer.log_sigma2.data.fill_(-60.0)
    assert torch.allclose(layer(x), expected, atol=1e-6)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 4), max_size=3), st.integers(1, 70), st.integers(1, 40), st.booleans())
def test_any_linear(batch, inputs, outputs, bias):
    dense = nn.Linear(inputs, outputs, bias)
    x = torch.randn(*batch, inputs)
    expected = dense(x)
    layer = VARIATIONAL_CLASSES[nn.Linear].from_dense(dense)
    spread = (x.square() @ layer.log_sigma2.detach().exp().t()).sqrt()
    torch.manual_seed(11)
    y = layer(x)
    torch.manual_seed(11)
    assert torch.allclose(y, expected + spread * torch.randn(y.shape), atol=1e-5)
    y.sum().backward()


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
def test_output_size_of_a_transposed_convolution(stride, kernel, size):
    assume(stride > 1)
    dense = nn.ConvTranspose1d(2, 2, kernel, stride=stride)
    x = torch.randn(2, 2, size)
    largest = dense(x).shape[-1] + stride - 1
    expected = dense(x, output_size=[largest])
    layer = VARIATIONAL_CLASSES[nn.ConvTranspose1d].from_dense(dense, log_sigma2=-60.0)
    assert torch.allclose(layer(x, output_size=[largest]), expected, atol=1e-6)
    assert torch.allclose(layer.eval()(x, output_size=[largest]), expected, atol=1e-6)
