"""Random chains of layers under random masks: the pruned chain computes the same as the masked chain, up to rounding."""

from __future__ import annotations

import copy
from itertools import pairwise

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from masking import gap, masked, outputs, random_masks, shake
from torch import nn

from svdcompress.convert import convert
from svdcompress.prune import prune

ACTIVATIONS = (nn.ReLU, nn.GELU, nn.Tanh, nn.Hardswish, nn.Sigmoid, nn.Identity, lambda: nn.LeakyReLU(0.2, inplace=True))
QUICK = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)

share = st.sampled_from([0.0, 0.3, 0.6])
widths = st.integers(1, 9)


@st.composite
def linear_chain(draw: st.DrawFn) -> tuple[nn.Module, tuple[int, ...]]:
    sizes = draw(st.lists(widths, min_size=2, max_size=5))
    layers: list[nn.Module] = []
    for inside, outside in pairwise(sizes):
        layers.append(nn.Linear(inside, outside, bias=draw(st.booleans())))
        if draw(st.booleans()):
            layers.append(nn.BatchNorm1d(outside, affine=draw(st.booleans())))
        layers += [draw(st.sampled_from(ACTIVATIONS))(), nn.Dropout(0.5)]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], 3)), (sizes[0],)


def _norm(dims: int, channels: int, affine: bool) -> nn.Module:
    return (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dims - 1](channels, affine=affine)


@st.composite
def convolution(draw: st.DrawFn, dims: int, inside: int, outside: int) -> nn.Module:
    kernel, bias = draw(st.integers(1, 3)), draw(st.booleans())
    groups = draw(st.sampled_from([g for g in range(1, 10) if inside % g == 0 and outside % g == 0]))
    if draw(st.integers(0, 3)) == 0:
        kind = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[dims - 1]
        return kind(inside, outside, kernel, stride=draw(st.integers(1, 2)), bias=bias, groups=groups)
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    mode = draw(st.sampled_from(["zeros", "replicate"]))
    padding = draw(st.sampled_from([kernel // 2, 0 if kernel < 3 else 1]))
    return kind(inside, outside, kernel, padding=padding, padding_mode=mode, bias=bias, groups=groups)


@st.composite
def convolution_chain(draw: st.DrawFn) -> tuple[nn.Module, tuple[int, ...]]:
    dims = draw(st.sampled_from([1, 2, 2, 2, 3]))
    sizes = draw(st.lists(st.sampled_from([1, 2, 4, 6, 8]), min_size=2, max_size=4))
    layers: list[nn.Module] = []
    for inside, outside in pairwise(sizes):
        layers.append(draw(convolution(dims, inside, outside)))
        if draw(st.booleans()):
            layers.append(_norm(dims, outside, draw(st.booleans())))
        layers.append(draw(st.sampled_from(ACTIVATIONS))())
    if draw(st.booleans()):
        layers.append((nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)[dims - 1](3, 1, 1))
    pool = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool3d)[dims - 1](2)
    return nn.Sequential(*layers, pool, nn.Flatten(), nn.Linear(sizes[-1] * 2**dims, 2)), (sizes[0], *[5] * dims)


def check(chain: nn.Module, shape: tuple[int, ...], seed: int, strewn: float, rows: float, columns: float) -> None:
    torch.manual_seed(seed)
    model = convert(shake(chain))
    masks = random_masks(model, strewn, rows, columns)
    small = prune(model, torch.randn(2, *shape), masks=masks)
    oracle, x = masked(model, masks), torch.randn(5, *shape)
    assert gap(outputs(small.eval(), x), outputs(oracle, x)) <= 1e-5
    assert small.pruning.parameters_after <= small.pruning.parameters_before + sum(
        module.out_features if isinstance(module, nn.Linear) else getattr(module, "out_channels", 0)
        for module in model.modules()
        if getattr(module, "bias", 0) is None  # a layer without a bias may get one
    )
    assert not [note for note in small.pruning.notes if "left masked" in note]


@QUICK
@given(linear_chain(), st.integers(0, 999), share, share, share)
def test_linear_chains(chain: tuple[nn.Module, tuple[int, ...]], seed: int, strewn: float, rows: float, columns: float) -> None:
    check(*chain, seed, strewn, rows, columns)


@QUICK
@given(convolution_chain(), st.integers(0, 999), share, share, share)
def test_convolution_chains(
    chain: tuple[nn.Module, tuple[int, ...]], seed: int, strewn: float, rows: float, columns: float
) -> None:
    check(*chain, seed, strewn, rows, columns)


@QUICK
@given(convolution_chain(), st.integers(0, 999), st.sampled_from([2, 4]))
def test_rounded_chains(chain: tuple[nn.Module, tuple[int, ...]], seed: int, multiple: int) -> None:
    torch.manual_seed(seed)
    model, shape = convert(shake(chain[0])), chain[1]
    masks = random_masks(model, 0.1, 0.5, 0.3)
    small = prune(model, torch.randn(2, *shape), masks=masks, round_to=multiple)
    x = torch.randn(3, *shape)
    assert gap(outputs(small.eval(), x), outputs(masked(model, masks), x)) <= 1e-5
    for (name, module), (_, other) in zip(model.named_modules(), small.named_modules(), strict=True):
        before, after = getattr(module, "out_channels", 0), getattr(other, "out_channels", 0)
        assert after == before or after % multiple == 0, name


def test_a_channel_that_only_its_own_depthwise_convolution_reads_goes() -> None:
    """Nothing reads the depthwise convolution's output for it, and the convolution itself does not keep the channel."""
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.ReLU(), nn.Conv2d(8, 2, 1))
    masks = {name: torch.ones_like(dense.get_submodule(name).weight, dtype=torch.bool) for name in ("0", "2", "4")}
    masks["4"][:, [1, 6]] = False
    oracle = copy.deepcopy(dense).eval()
    with torch.no_grad():
        oracle[4].weight.mul_(masks["4"])
    small = prune(convert(dense), torch.randn(2, 3, 5, 5), masks=masks).eval()
    assert small[0].out_channels == small[2].groups == small[4].in_channels == 6
    x = torch.randn(3, 3, 7, 7)
    with torch.no_grad():
        assert torch.allclose(small(x), oracle(x), atol=1e-6)
