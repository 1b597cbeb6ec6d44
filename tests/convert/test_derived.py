"""Weights that are computed in each forward: left dense with a reason that names the option, or folded, exact in `eval()`."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm, weight_norm

import svdcompress as svdc
from svdcompress.errors import CheckpointError, ModelError
from svdcompress.layers import VariationalConv2d, VariationalLinear, variational_layers

pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")


class StdConv2d(nn.Conv2d):
    """Weight standardization, as in BiT's ResNetV2."""

    eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.flatten(1)
        variance, mean = torch.var_mean(weight, dim=1, unbiased=False, keepdim=True)
        weight = ((weight - mean) / (variance + self.eps).sqrt()).view_as(self.weight)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class ScaledStdConv2d(nn.Conv2d):
    """The same with a learned gain, as in NFNet; torch's batch norm computes it."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.gain = nn.Parameter(torch.rand(self.out_channels, 1, 1, 1) + 0.5)
        self.scale = self.weight[0].numel() ** -0.5

    def forward(self, x: Tensor) -> Tensor:
        flat = self.weight.reshape(1, self.out_channels, -1)
        weight = F.batch_norm(flat, None, None, weight=(self.gain * self.scale).view(-1), training=True, momentum=0.0)
        return F.conv2d(x, weight.reshape_as(self.weight), self.bias, self.stride, self.padding, self.dilation, self.groups)


class Orthogonal(nn.Module):
    """A user's own parametrization."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.qr(x).Q


class Wrapped(nn.Linear):
    """Computes the same as Linear in its own forward, as timm's does."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) if x.dim() else x


def linear() -> nn.Linear:
    return nn.Linear(4, 6)


KINDS = {
    "standardised": lambda: StdConv2d(4, 6, 3, stride=2, padding=1),
    "standardised, in groups": lambda: StdConv2d(4, 6, 3, groups=2, bias=False),
    "scaled": lambda: ScaledStdConv2d(4, 6, 3, padding=1),
    "forward of its own": lambda: Wrapped(4, 6),
    "weight_norm": lambda: parametrizations.weight_norm(linear()),
    "weight_norm, convolution": lambda: parametrizations.weight_norm(nn.Conv2d(4, 6, 3)),
    "spectral_norm": lambda: parametrizations.spectral_norm(linear()),
    "orthogonal": lambda: parametrizations.orthogonal(linear()),
    "own parametrisation": lambda: parametrize.register_parametrization(linear(), "weight", Orthogonal()),
    "two parametrisations": lambda: parametrizations.spectral_norm(parametrizations.weight_norm(linear())),
    "weight_norm, hook": lambda: weight_norm(linear()),
    "spectral_norm, hook": lambda: spectral_norm(nn.Conv2d(4, 6, 3)),
    "pruned": lambda: prune.l1_unstructured(linear(), "weight", 0.5),
}


def model_of(kind: str) -> tuple[nn.Module, Tensor]:
    """The layer in a model that was trained for a few steps in `train()`, so that the layer's own state has changed."""
    torch.manual_seed(0)
    layer = KINDS[kind]()
    convolution = isinstance(layer, nn.Conv2d)
    x = torch.randn(5, 4, 7, 7) if convolution else torch.randn(5, 4)
    model = nn.Sequential(layer, nn.ReLU(), *([nn.AdaptiveAvgPool2d(1), nn.Flatten()] if convolution else []), nn.Linear(6, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model.train()(x).square().mean().backward()
        optimizer.step()
    return model.eval(), x


@pytest.mark.parametrize("kind", KINDS)
def test_without_the_option_the_plan_names_it(kind):
    model, x = model_of(kind)
    state = copy.deepcopy(model.state_dict())
    entries = {entry.name: entry for entry in svdc.plan(model)}
    assert not entries["0"].converted and "derived='fold' (convert.derived: fold)" in entries["0"].reason
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    kept = type(model[0])
    expected = model(x)
    svdc.convert(model)
    assert type(model[0]) is kept and torch.equal(model(x), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_folded_it_computes_the_same_and_is_a_plain_layer(kind):
    model, x = model_of(kind)
    expected = model(x).detach()
    mode = model.training
    planned = {entry.name: entry for entry in svdc.plan(model, derived="fold")}
    assert planned["0"].converted and planned["0"].note.startswith("made plain first: its weight comes from ")
    svdc.convert(model, derived="fold", log_sigma2=-40.0)
    layer = model[0]
    assert isinstance(layer, VariationalConv2d | VariationalLinear) and model.training == mode
    assert set(dict(layer.named_parameters())) <= {"weight", "bias", "log_sigma2"}
    assert layer.weight.requires_grad and isinstance(layer.weight, nn.Parameter)
    torch.testing.assert_close(model(x), expected, atol=1e-6, rtol=1e-6)
    svdc.to_dense(model)
    assert type(model[0]) in (nn.Linear, nn.Conv2d)
    torch.testing.assert_close(model(x), expected, atol=1e-6, rtol=1e-6)
    model.train()(x).sum().backward()
    assert model[0].weight.grad is not None


@pytest.mark.parametrize("kind", KINDS)
def test_folded_pruned_saved_and_loaded_onto_a_model_of_the_factory(kind, tmp_path):
    model, x = model_of(kind)
    svdc.convert(model, derived="fold")
    masks = {name: torch.ones_like(layer.weight, dtype=torch.bool) for name, layer in variational_layers(model)}
    masks["0"][[0, 3]] = False
    svdc.hold(model, masks)
    for what in (model, svdc.prune(model, x, masks=masks)):
        svdc.save(what, tmp_path / "file")
        again = svdc.load(tmp_path / "file", model_of(kind)[0]).eval()
        assert torch.equal(again(x), what(x)) and again[0].weight.shape == what[0].weight.shape
        svdc.save(again, tmp_path / "again")
        assert (tmp_path / "again").read_bytes() == (tmp_path / "file").read_bytes()
    assert what[0].weight.shape[0] == 4


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_is_folded_and_the_other_stays(kind):
    model, x = model_of(kind)
    expected = model(x).detach()
    with torch.no_grad():
        model(x)  # without a gradient, what the older hooks leave behind can be copied
        svdc.convert(copy.deepcopy(model), derived="fold")
    assert torch.equal(model(x), expected)


def test_frozen_layers_stay_frozen():
    model, _ = model_of("weight_norm")
    model[0].requires_grad_(False)
    svdc.convert(model, derived="fold")
    assert not model[0].weight.requires_grad and not model[0].log_sigma2.requires_grad and model[2].weight.requires_grad


def test_folding_alone():
    model, x = model_of("standardised")
    expected = model(x)
    assert svdc.fold_derived_weights(model, exclude=["4"]) == {"0": "the forward of StdConv2d"}
    assert type(model[0]) is nn.Conv2d and not list(variational_layers(model))
    torch.testing.assert_close(model(x), expected)
    assert svdc.fold_derived_weights(model) == {}


def test_patterns_choose_what_is_folded():
    model, _ = model_of("standardised")
    svdc.convert(model, derived="fold", exclude=["0"])
    assert type(model[0]) is StdConv2d
    with pytest.raises(ModelError, match="derived: unknown 'merge'; use one of keep, fold"):
        svdc.convert(model, derived="merge")


class FromInput(nn.Linear):
    """The weight depends on the input, which no plain layer can compute."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * x.mean(), self.bias)


class Padded(nn.Conv2d):
    """Pads its own input, as timm's "same" convolutions do."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean()
        return F.conv2d(F.pad(x, (0, 1, 0, 1)), weight, self.bias, self.stride)


class Twice(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.weight), self.weight, self.bias)


class Fails(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError


@pytest.mark.parametrize(
    "layer", [FromInput(4, 4), Padded(4, 4, 2), Twice(4, 4), Fails(4, 4)], ids=lambda layer: type(layer).__name__
)
def test_a_forward_that_does_more_is_left(layer):
    model = nn.ModuleList([layer, nn.Linear(4, 4)])
    (entry, _) = svdc.plan(model, derived="fold")
    assert not entry.converted and "with its own forward" in entry.reason


def test_a_tensor_that_others_hold_too_is_not_folded():
    model = nn.Sequential(StdConv2d(4, 4, 3), StdConv2d(4, 4, 3), nn.Conv2d(4, 4, 3))
    model[1].weight = model[0].weight
    found = svdc.plan(model, derived="fold")
    assert [entry.converted for entry in found] == [False, False, True]
    assert found[0].reason == "shared with another module: its weight is derived from a tensor of '1'"


def test_a_file_of_a_folded_model_does_not_touch_a_model_that_it_does_not_fit(tmp_path):
    model, _ = model_of("weight_norm")
    svdc.save(svdc.convert(model, derived="fold"), tmp_path / "file")
    other, x = model_of("weight_norm")
    other[2] = nn.Linear(6, 4)
    expected, kind, names = other(x), type(other[0]), list(other.state_dict())
    with pytest.raises(CheckpointError, match="made for another model"):
        svdc.load(tmp_path / "file", other)
    assert type(other[0]) is kind and list(other.state_dict()) == names and torch.equal(other(x), expected)
    with pytest.raises(CheckpointError, match="0: Bilinear"):
        svdc.load(tmp_path / "file", nn.Sequential(nn.Bilinear(4, 4, 6), nn.ReLU(), nn.Linear(6, 3)))
    with pytest.raises(CheckpointError, match="made for another model than Linear"):  # it has no module of that name
        svdc.load(tmp_path / "file", nn.Linear(6, 3))
