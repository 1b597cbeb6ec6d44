"""Draws of the pruned model have the masked model's mean and variance: z-tests, and exact sums for a single layer."""

from __future__ import annotations

import math

import pytest
import torch
from masking import masked, random_masks, shake
from torch import Tensor, nn
from zoo_models import ZOO

from svdcompress.convert import convert, convert_dropout
from svdcompress.layers import sampling, variational_layers
from svdcompress.prune import prune

DRAWS = 4000


def draws(model: nn.Module, x: Tensor, members: bool) -> Tensor:
    """(draws, examples, outputs) in double precision; a single pass if draws are independent for each example."""
    how = {"members": True} if members else {"local": True}
    with torch.no_grad(), sampling(model.eval(), generator=torch.Generator().manual_seed(3), **how) as sampler:
        if not members:
            return model(x.repeat(DRAWS, *[1] * (x.dim() - 1))).view(DRAWS, len(x), -1).double()
        out = []
        for _ in range(DRAWS // 4):
            sampler.resample()
            out.append(model(x).flatten(1))
        return torch.stack(out).double()


def z_scores(a: Tensor, b: Tensor) -> tuple[float, float]:
    """The largest |z| of the differences of means and of variances."""
    n = len(a)
    mean = (a.mean(0) - b.mean(0)) / ((a.var(0) + b.var(0)) / n).sqrt().clamp_min(1e-12)
    spread = []
    for t in (a, b):
        centred = t - t.mean(0)
        spread.append((centred.pow(4).mean(0) - centred.square().mean(0).square()) / n)
    variance = (a.var(0) - b.var(0)) / (spread[0] + spread[1]).sqrt().clamp_min(1e-12)
    return float(mean.abs().max()), float(variance.abs().max())


def noisy_dead_masks(model: nn.Module) -> dict[str, Tensor]:
    """Masks with half of the hidden units dead by their rows, with large constants read through noisy weights."""
    masks = {}
    layers = list(variational_layers(model))
    for i, (name, layer) in enumerate(layers):
        mask = torch.rand(layer.weight.shape) > 0.2
        if i < len(layers) - 1:
            keep = torch.rand((*layer.canonical(layer.weight).shape[:2], 1, 1)) > 0.5
            layer.canonical(mask).logical_and_(keep)
        with torch.no_grad():
            layer.log_sigma2.fill_(math.log(0.02 / layer.weight[0].numel()))
            if layer.bias is not None:
                layer.bias.add_(1.0)
        masks[name] = mask
    return masks


NETS = {
    "linear": (
        lambda: nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 16, bias=False), nn.Tanh(), nn.Linear(16, 2)),
        (6,),
    ),
    "convolution without padding": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 3, 3), nn.Flatten(), nn.Linear(12, 2)
        ),
        (2, 6, 6),
    ),
    "zero padding, with a carrier": (
        lambda: nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 2, 3, padding=1), nn.AvgPool2d(2)),
        (2, 4, 4),
    ),
    "replicate padding": (
        lambda: nn.Sequential(
            nn.Conv1d(2, 8, 3, padding=1), nn.ReLU(), nn.Conv1d(8, 3, 3, padding=1, padding_mode="replicate"), nn.AvgPool1d(2)
        ),
        (2, 6),
    ),
}


@pytest.mark.parametrize("members", [False, True])
@pytest.mark.parametrize("name", NETS)
def test_mean_and_variance_stay(name: str, members: bool) -> None:
    torch.manual_seed(5)
    factory, shape = NETS[name]
    model = convert(shake(factory()))
    masks = noisy_dead_masks(model)
    x = torch.randn(3, *shape)
    small = prune(model, x, masks=masks)
    assert small.pruning.removed > 0
    assert any(layer.bias_sigma2 is not None for _, layer in variational_layers(small)) or "carrier" in name
    a, b = draws(small, x, members), draws(masked(model, masks), x, members)
    assert a.var(0).min() > 1e-4
    mean, variance = z_scores(a, b)
    assert mean < 4.5 and variance < 4.5, (mean, variance)


@pytest.mark.slow
@pytest.mark.parametrize("members", [False, True])
@pytest.mark.parametrize("name", ["resnet-basic", "resnext", "mobilenet-v3", "timm-vit"])
def test_mean_and_variance_of_nets_that_are_no_chains_stay(name: str, members: bool) -> None:
    """Residual sums with BatchNorm, grouped and depthwise convolutions, attention."""
    torch.manual_seed(6)
    factory, inputs = ZOO[name]
    model, x = convert(shake(factory())).eval(), inputs()[:1]
    masks = random_masks(model)
    with torch.no_grad():
        for _, layer in variational_layers(model):
            layer.log_sigma2.fill_(math.log(0.02 / layer.weight[0].numel()))
    small = prune(model, x, masks=masks)
    assert small.pruning.removed > 0
    a, b = draws(small, x, members), draws(masked(model, masks), x, members)
    noisy = b[:, 0].var(0) > 1e-6  # some outputs have dead rows and are constants
    assert noisy.sum() >= 2
    torch.testing.assert_close(a[:, 0, ~noisy].mean(0), b[:, 0, ~noisy].mean(0))
    mean, variance = z_scores(a[:, 0, noisy], b[:, 0, noisy])
    assert mean < 4.5 and variance < 4.5, (mean, variance)


def test_variance_of_one_layer_exactly() -> None:
    """A dead unit's constant k adds k^2 sigma2 to the variance of what reads it."""
    torch.manual_seed(0)
    model = convert(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)))
    with torch.no_grad():
        model[0].bias.fill_(0.7)
        model[2].log_sigma2.copy_(torch.randn(3, 6))
    masks = {"0": torch.ones(6, 4, dtype=torch.bool), "2": torch.rand(3, 6) > 0.3}
    masks["0"][[1, 4]] = False
    small = prune(model, torch.randn(2, 4), masks=masks)
    assert small[0].out_features == 4
    expected = (0.7**2 * model[2].log_sigma2.exp() * masks["2"])[:, [1, 4]].sum(1)
    torch.testing.assert_close(small[2].bias_sigma2, expected)


def test_noise_of_a_second_pruning_adds_to_that_of_the_first() -> None:
    torch.manual_seed(0)
    model = convert(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 3)))
    with torch.no_grad():
        model[0].bias.fill_(0.7)
        model[2].log_sigma2.copy_(torch.randn(5, 8))
    masks = {name: torch.ones_like(layer.weight, dtype=torch.bool) for name, layer in variational_layers(model)}
    masks["0"][:2] = False
    once = prune(model, torch.randn(2, 4), masks=masks)
    masks = {name: layer.mask.clone() for name, layer in variational_layers(once)}
    masks["0"][0] = False
    masks["4"][:, 1] = False
    twice = prune(once, torch.randn(2, 4), masks=masks)
    assert (once[0].out_features, twice[0].out_features, twice[2].out_features) == (6, 5, 4)
    kept, sigma2 = [0, 2, 3, 4], model[2].log_sigma2.exp()
    torch.testing.assert_close(once[2].bias_sigma2, 0.49 * sigma2[:, :2].sum(1))
    torch.testing.assert_close(twice[2].bias_sigma2, 0.49 * sigma2[kept, :3].sum(1))
    assert torch.equal(twice[2].log_sigma2, model[2].log_sigma2[kept, 3:])


def test_prune_twice_keeps_the_noise_of_the_first_time() -> None:
    """A row with a noisy bias is not constant: what it feeds keeps its variance."""
    torch.manual_seed(1)
    model = convert(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2)))
    with torch.no_grad():
        for _, layer in variational_layers(model):
            layer.log_sigma2.fill_(-2)
            layer.bias.fill_(1.0)
    masks = {name: torch.ones_like(layer.weight, dtype=torch.bool) for name, layer in variational_layers(model)}
    masks["0"][:3] = False
    x = torch.randn(3, 4)
    once = prune(model, x, masks=masks)
    assert once[0].out_features == 5 and (once[2].bias_sigma2 > 0).all()
    again = {name: layer.mask.clone() for name, layer in variational_layers(once)}
    again["2"][0] = False
    twice = prune(once, x, masks=again)
    mean, variance = z_scores(draws(twice, x, False), draws(masked(once, again), x, False))
    assert mean < 4.5 and variance < 4.5
    assert twice[2].out_features == once[2].out_features


def test_noise_of_dropout_is_no_constant() -> None:
    """MC dropout after a dead unit turns its constant into noise: the unit stays unless the constant is 0."""
    torch.manual_seed(2)
    model = convert_dropout(convert(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.4), nn.Linear(8, 2))))
    with torch.no_grad():
        model[0].bias.copy_(torch.tensor([1.0, -1.0] * 4))
    mask = torch.ones(8, 4, dtype=torch.bool)
    mask[:4] = False
    small = prune(model, torch.randn(2, 4), masks={"0": mask, "3": torch.ones(2, 8, dtype=torch.bool)})
    assert small[0].out_features == 6  # the two with relu(-1) = 0 are removed
    x = torch.randn(3, 4)
    oracle = masked(model, {"0": mask, "3": torch.ones(2, 8, dtype=torch.bool)})
    mean, variance = z_scores(draws(small, x, False), draws(oracle, x, False))
    assert mean < 4.5 and variance < 4.5


def test_a_unit_that_reads_constants_through_noisy_weights_stays() -> None:
    """Its mean is a constant, which a bias could replace; when sampled it is not constant, and what follows is not linear."""
    torch.manual_seed(0)
    model = convert(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)), log_sigma2=-3.0)
    with torch.no_grad():
        model[0].bias.copy_(torch.tensor([1.0, 1.0, -1.0]))
    masks = {name: torch.ones_like(layer.weight, dtype=torch.bool) for name, layer in variational_layers(model)}
    masks["0"][[0, 2]] = False  # unit 0 is 1 for all inputs, unit 2 is 0
    masks["2"][0, 1:] = False  # reads only unit 0
    masks["2"][1, :2] = False  # reads only unit 2: a constant, however its weights are drawn
    x = torch.randn(3, 4)
    small = prune(model, x, masks=masks)
    assert small[0].out_features == 1 and small[2].out_features == 2
    for members in (False, True):
        mean, variance = z_scores(draws(small, x, members), draws(masked(model, masks), x, members))
        assert mean < 4.5 and variance < 4.5, (mean, variance)
