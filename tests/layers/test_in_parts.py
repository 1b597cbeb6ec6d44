"""Wide kernels in bfloat16, whose convolutions some CPUs compute wrongly: against float64, whatever CPU this is."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from svdcompress import convert
from svdcompress.layers import arranged_convolutions, in_parts

CHANNELS, OUTPUTS, KERNEL, LENGTH = 768, 128, 64, 127
"""For these sizes, torch 2.13 on a CPU with AMX returns 64 times the result."""

ROUNDED = 0.01


def away(found, expected):
    """Distance relative to what is expected."""
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).norm() / expected.norm())


def tensors(*sizes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator) for size in sizes]


def exact(x, weight, bias, **more):
    return F.conv1d(x.double(), weight.double(), None if bias is None else bias.double(), **more)


@pytest.fixture
def wide():
    return tensors((2, CHANNELS, LENGTH), (OUTPUTS, CHANNELS, KERNEL), (OUTPUTS,))


@pytest.mark.parametrize("more", [{}, {"stride": 3, "padding": 5}, {"dilation": 2}])
def test_values_and_gradients_are_those_of_float64(wide, more):
    half = [tensor.bfloat16().requires_grad_() for tensor in wide]
    full = [tensor.detach().double().requires_grad_() for tensor in half]
    found = in_parts(lambda x, weight, bias: F.conv1d(x, weight, bias, **more), *half)
    expected = F.conv1d(*full, **more)
    assert found.dtype == torch.bfloat16 and away(found, expected) < ROUNDED
    pull = tensors(expected.shape, seed=1)[0]
    ours = torch.autograd.grad(found, half, pull.bfloat16())
    theirs = torch.autograd.grad(expected, full, pull.bfloat16().double())
    assert all(away(one, other) < ROUNDED for one, other in zip(ours, theirs, strict=True))


def test_an_input_without_a_batch_and_a_kernel_in_two_dimensions(wide):
    x, weight, _ = (tensor.bfloat16() for tensor in wide)
    assert away(in_parts(F.conv1d, x[0], weight, None), exact(x[0], weight, None)) < ROUNDED
    flat = in_parts(F.conv2d, x[:, :, None], weight[:, :, None], None)
    assert away(flat[:, :, 0], exact(x, weight, None)) < ROUNDED


def counted(x, weight, bias=None, **more):
    """The number of convolutions that one is split into."""
    calls = []
    in_parts(lambda *given: calls.append(given) or F.conv1d(*given, **more), x, weight, bias)
    return len(calls)


def test_only_wide_kernels_over_many_channels_in_bfloat16_are_divided(wide):
    x, weight, bias = wide
    assert counted(x.bfloat16(), weight.bfloat16(), bias.bfloat16()) == 6
    assert counted(x, weight, bias) == 1
    assert counted(x[:, :128].bfloat16(), weight[:, :128].bfloat16()) == 1
    assert counted(torch.zeros(1, 4096, 9).bfloat16(), torch.zeros(4, 4096, 3).bfloat16()) == 1
    with torch.autocast("cpu", torch.bfloat16):
        assert counted(x, weight, bias) == 6
    with torch.autocast("cpu", torch.float16):
        assert counted(x, weight, bias) == 1
    half = weight[:, : CHANNELS // 2].bfloat16()
    assert counted(x.bfloat16(), half, groups=2) == 1  # each group has its own channels


@pytest.mark.parametrize("dims", [1, 2])
def test_layers_compute_in_autocast_what_float32_does(wide, dims):
    x, weight, bias = wide
    kind, extra = (nn.Conv1d, ()) if dims == 1 else (nn.Conv2d, (1,))
    layer = kind(CHANNELS, OUTPUTS, (*extra, KERNEL))
    layer.weight.data, layer.bias.data = weight.reshape(layer.weight.shape), bias
    x = x.reshape(2, CHANNELS, *extra, LENGTH)
    with torch.no_grad():
        expected = layer(x)
    model = convert(nn.Sequential(layer), log_sigma2=-60.0)
    for training in (True, False):
        with torch.autocast("cpu", torch.bfloat16):
            assert away(model.train(training)(x), expected) < ROUNDED


def test_variances_in_bfloat16_are_as_large_as_in_float32(wide):
    """A layer's noise is computed in bfloat16 if the CPU is fast at it, even when training in float32."""
    x, _, _ = wide
    deviations = {}
    for dtype in ("float32", "bfloat16"):
        model = convert(nn.Sequential(nn.Conv1d(CHANNELS, OUTPUTS, KERNEL)), log_sigma2=-4.0)
        model[0].variance_dtype = dtype
        model[0].weight.data.zero_()
        model[0].bias.data.zero_()
        torch.manual_seed(0)
        deviations[dtype] = float(model.train()(x).detach().std())
    assert deviations["bfloat16"] == pytest.approx(deviations["float32"], rel=0.02)
    assert deviations["float32"] == pytest.approx((torch.tensor(-4.0).exp() * CHANNELS * KERNEL).sqrt().item(), rel=0.05)


def test_dense_layers_are_right_within_the_mode_and_others_pay_nothing(wide):
    x, weight, bias = wide
    dense, small = nn.Conv1d(CHANNELS, OUTPUTS, KERNEL), nn.Conv1d(8, 8, 3)
    dense.weight.data, dense.bias.data = weight, bias
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), arranged_convolutions([small, dense]) as mode:
        assert mode is not None and away(dense(x), exact(x, weight, bias)) < ROUNDED
        assert away(torch.convolution(x, weight, bias, [1], [0], [1], False, [0], 1), exact(x, weight, bias)) < ROUNDED
        turned = torch.convolution(x[:, :OUTPUTS], weight, None, [1], [0], [1], True, [0], 1)
        assert away(turned, F.conv_transpose1d(x[:, :OUTPUTS].double(), weight.double())) < ROUNDED
    with arranged_convolutions([small]) as mode:
        assert mode is None
