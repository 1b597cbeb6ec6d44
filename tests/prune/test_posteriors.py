"""Surgery on layers whose variance parameters have other shapes: the variance of each weight stays the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import svdcompress as svdc
from svdcompress.layers import variational_layers
from svdcompress.train import shrink


def groups() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 6, 3), nn.ReLU(), nn.Conv2d(6, 8, 3, groups=2), nn.ReLU(), nn.ConvTranspose2d(8, 4, 2), nn.ReLU(),
        nn.Flatten(), nn.Linear(100, 10), nn.ReLU(), nn.Linear(10, 3),
    )  # fmt: skip


def padded() -> nn.Sequential:
    """Zero padding keeps the constants of dead units out of biases: other inputs carry them."""
    return nn.Sequential(nn.Conv2d(2, 5, 3), nn.ReLU(), nn.Conv2d(5, 4, 3, padding=1), nn.Flatten(), nn.Linear(144, 3))


def converted(make, **settings) -> nn.Sequential:
    torch.manual_seed(0)
    model = svdc.convert(make(), posterior="rank-one", **settings)
    with torch.no_grad():
        for _, layer in variational_layers(model):
            layer.log_sigma2_row.normal_(-4, 1)
            layer.log_sigma2_column.normal_(-1, 1)
    return model.eval()


def test_cut_terms_give_the_variances_of_what_is_left():
    model = converted(groups)
    model[2].bias.data[[1, 6]] = -1.0  # their constant is 0 after the ReLU, so a border changes nothing
    model[4].bias.data[2] = -1.0
    masks = {name: torch.ones_like(layer.weight, dtype=torch.bool) for name, layer in variational_layers(model)}
    masks["2"][[1, 6]], masks["4"][:, 2], masks["7"][5], masks["9"][:, 1] = False, False, False, False
    before = {name: layer.log_sigma2.detach() for name, layer in variational_layers(model)}
    small = svdc.prune(model, torch.randn(2, 2, 8, 8), masks=masks)
    after = {name: layer.log_sigma2.detach() for name, layer in variational_layers(small)}
    assert all(layer.posterior == "rank-one" for _, layer in variational_layers(small)) and not small.pruning.notes
    outs = [0, 2, 3, 4, 5, 7]  # one of each group of the second convolution
    torch.testing.assert_close(after["2"], before["2"][outs])
    torch.testing.assert_close(after["4"], before["4"][outs][:, [0, 1, 3]])
    kept = [i for i in range(10) if i not in (1, 5)]
    inputs = torch.arange(100).view(4, 25)[[0, 1, 3]].flatten()
    torch.testing.assert_close(after["7"], before["7"][kept][:, inputs])
    torch.testing.assert_close(after["9"], before["9"][:, kept])
    assert model[2].log_sigma2_row.shape == (2, 4, 1, 1) and torch.equal(model[2].log_sigma2, before["2"])


def test_constants_that_other_inputs_carry_need_a_variance_for_each_weight():
    model = converted(padded)
    with torch.no_grad():
        model[0].bias.copy_(torch.tensor([0.5, 0.3, 0.1, 0.2, 0.4]))
    masks = {name: torch.ones_like(layer.weight, dtype=torch.bool) for name, layer in variational_layers(model)}
    masks["0"][[1, 3]] = False
    before = model[2].log_sigma2.detach().double().exp()
    x = torch.randn(2, 2, 8, 8)
    small = svdc.prune(model, x, masks=masks)
    assert small[0].out_channels == 4 and small[2].posterior == "independent" and small[0].posterior == "rank-one"
    assert any(note.startswith("2: its posterior is independent now") for note in small.pruning.notes)
    # One of the constants 0.3 and 0.2 carries the other, which adds k^2 times its variance there.
    sums = {c: before[:, c] + (k / own) ** 2 * before[:, j] for c, j, own, k in ((1, 3, 0.3, 0.2), (3, 1, 0.2, 0.3))}
    left = small[2].log_sigma2.detach().double().exp()
    assert any(torch.allclose(left[:, at], sums[c], rtol=1e-4) for c, at in ((1, 1), (3, 2)))
    svdc.hold(model, masks)
    torch.testing.assert_close(small(x), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", [groups, padded])
def test_shrinking_goes_on_with_what_pruning_left(make):
    model = converted(make, threshold=1000.0)
    x = torch.randn(2, 2, 8, 8)
    with torch.no_grad():
        model[0].bias.copy_(torch.linspace(0.1, 0.5, len(model[0].bias)))
        model[len(model) - 1].weight[:, 1::2] = 0.0
    small = svdc.prune(model, x, masks=_masks(model))
    assert shrink(model, x, masks=_masks)
    assert [layer.posterior for _, layer in variational_layers(model)] == [
        layer.posterior for _, layer in variational_layers(small)
    ]
    model.train()(x).sum().backward()
    assert all(own.grad is not None for _, layer in variational_layers(model) for own in layer.variance_parameters().values())


def _masks(model: nn.Module):
    masks = {name: torch.ones_like(layer.weight, dtype=torch.bool) for name, layer in variational_layers(model)}
    masks["2"][1], masks["0"][[1, 3]] = False, False
    if "7" in masks:
        masks["7"][5], masks["9"][:, 1:4] = False, False
    return svdc.relevance(svdc.hold(model, masks))
