"""Subclasses that compute what their torch.nn class does are converted and keep their class; others are detected."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import svdcompress as svdc
from svdcompress.errors import CheckpointError
from svdcompress.layers import VariationalConv3d, VariationalLinear, variational_layers


class Same(nn.Linear):
    pass


class Conv3DSimple(nn.Conv3d):
    """As in torchvision's video ResNets."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__(inputs, outputs, kernel_size=(3, 3, 3), stride=stride, padding=1, bias=False)
        self.built = "so"

    @staticmethod
    def get_downsample_stride(stride: int) -> tuple[int, int, int]:
        return stride, stride, stride


class Started(Same):
    """Another initialization and another repr, but the same computation."""

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 0.5)
        nn.init.zeros_(self.bias)

    def extra_repr(self) -> str:
        return "mine"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.mid, self.head = Conv3DSimple(2, 6), Same(6, 8), Started(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.mid(torch.relu(self.conv(x)).mean((2, 3, 4)))))


def net() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Net().eval(), torch.randn(2, 2, 4, 5, 5)


def masks_of(model: nn.Module) -> dict[str, Tensor]:
    masks = {name: torch.ones_like(layer.weight, dtype=torch.bool) for name, layer in variational_layers(model)}
    masks["conv"][:2] = False
    masks["mid"][5:] = False
    return masks


def test_they_are_converted_and_stay_instances_of_their_class():
    model, x = net()
    expected, conv = model(x), model.conv
    assert [(e.kind, e.converted) for e in svdc.plan(model)] == [("Conv3DSimple", True), ("Same", True), ("Started", True)]
    svdc.convert(model, log_sigma2=-40.0)
    assert model.conv is conv and isinstance(conv, Conv3DSimple) and isinstance(conv, VariationalConv3d)
    assert isinstance(model.head, Started) and isinstance(model.head, VariationalLinear)
    assert conv.built == "so" and conv.get_downsample_stride(2) == (2, 2, 2)
    assert type(conv).__name__ == "VariationalConv3DSimple" and "mine" in repr(model.head)
    torch.testing.assert_close(model(x), expected)
    with torch.no_grad():
        for _, layer in variational_layers(model):
            layer.log_sigma2.fill_(-6.0)  # noise large enough for float32 to add to a weight
    model.train()
    assert not torch.equal(model(x), model(x))
    svdc.kl_divergence(model).backward()
    assert conv.log_sigma2.grad is not None
    with svdc.sampling(model.eval()):
        assert not torch.equal(model(x), model(x))


def test_back_to_their_own_class():
    model, x = net()
    expected = model(x)
    svdc.to_dense(svdc.convert(model, log_sigma2=-40.0))
    assert (type(model.conv), type(model.mid), type(model.head)) == (Conv3DSimple, Same, Started)
    assert torch.equal(model(x), expected)


def test_pruned_saved_loaded_and_exported(tmp_path):
    model, x = net()
    oracle = copy.deepcopy(model)
    svdc.convert(model)
    masks = masks_of(model)
    with torch.no_grad():
        for name, mask in masks.items():
            oracle.get_submodule(name).weight.mul_(mask)
    small = svdc.prune(model, x, masks=masks)
    assert small.conv.out_channels == 4 and small.mid.weight.shape == (5, 4) and isinstance(small.conv, Conv3DSimple)
    torch.testing.assert_close(small(x), oracle(x))
    svdc.save(small, tmp_path / "small.safetensors")
    assert svdc.read_manifest(tmp_path / "small.safetensors")["layers"]["conv"]["class"] == "VariationalConv3d"
    for fresh in (Net(), svdc.convert(Net())):
        again = svdc.load(tmp_path / "small.safetensors", fresh).eval()
        assert torch.equal(again(x), small(x)) and isinstance(again.conv, Conv3DSimple)
    assert (svdc.export_onnx(small, tmp_path / "model.onnx", x).parity or 0) < 1e-4


def test_copies_and_pickles():
    model, x = net()
    svdc.convert(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert type(other.conv) is type(model.conv) and torch.equal(other(x), model(x))


def test_a_file_of_another_layer_is_refused(tmp_path):
    svdc.save(svdc.convert(nn.Sequential(Same(3, 3))), tmp_path / "file")
    svdc.load(tmp_path / "file", nn.Sequential(nn.Linear(3, 3)))  # computes the same as the subclass
    with pytest.raises(CheckpointError, match="0: VariationalLinear in the file, Other in the model"):
        svdc.load(tmp_path / "file", nn.Sequential(Other(3, 3)))


# Subclasses that are left dense


class Other(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x * 2, self.weight, self.bias)


class OtherConv(nn.Conv2d):
    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(x.abs(), weight, bias)


class Masked(nn.Linear):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("mask", torch.ones(sizes[1]))


class Property(nn.Linear):
    prior = 3


class Choosy(nn.Linear):
    def __init_subclass__(cls, *, wanted: int) -> None: ...


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (lambda: Other(3, 3), "a Linear with its own forward: Other"),
        (lambda: OtherConv(3, 3, 1), "a Conv2d with its own _conv_forward: OtherConv"),
        (lambda: Masked(3, 3), "has its own mask, which a variational layer needs for itself: Masked"),
        (lambda: Property(3, 3), "has its own prior, which a variational layer needs for itself: Property"),
        (lambda: Choosy(3, 3), "not a type that is converted: Choosy"),
    ],
)
def test_what_computes_otherwise_or_cannot_be_is_left(layer, reason):
    model = nn.ModuleList([layer(), nn.Linear(3, 1)])
    assert [entry.reason for entry in svdc.plan(model)] == [reason, ""]
    kind = type(model[0])
    assert type(svdc.convert(model)[0]) is kind


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.b.weight = self.a.weight


def on_meta(kind):
    with torch.device("meta"):
        return svdc.convert(kind(), log_sigma2=-7.0)


def garbage(model):
    """Memory as `to_empty` may give it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty_like", lambda tensor, **more: torch.full_like(tensor, 55.0, **more))
        return model.to_empty(device="cpu")


def two():
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))


def test_a_dense_state_in_parts_for_layers_without_values():
    model, state = garbage(on_meta(two)), two().state_dict()
    for part in ("0.", "1."):
        model.load_state_dict({name: value for name, value in state.items() if name.startswith(part)}, strict=False)
    assert [float(layer.log_sigma2.mean()) for layer in model] == [-7.0, -7.0] and not any(one.variance_moved for one in model)


@pytest.mark.parametrize("assign", [True, False])
def test_a_dense_state_for_tied_layers_without_values(assign):
    model = on_meta(Tied)
    model = model if assign else garbage(model)
    model.load_state_dict(Tied().state_dict(), assign=assign)
    assert float(model.a.log_sigma2.mean()) == float(model.b.log_sigma2.mean()) == -7.0


def written(model):
    with torch.no_grad():
        for layer in model:
            layer.log_sigma2.copy_(torch.full_like(layer.log_sigma2, -2.0))


def replaced(model):
    for layer in model:
        layer._parameters["log_sigma2"] = nn.Parameter(torch.full((layer.out_features, 3), -2.0))


def by_data(model):
    for layer in model:
        layer.log_sigma2.data.fill_(-2.0)


@pytest.mark.parametrize("way", [written, by_data, replaced])
def test_values_that_came_otherwise_are_kept_by_a_dense_state(way):
    model = garbage(on_meta(two)) if way is not replaced else on_meta(two)
    way(model)
    model.load_state_dict(two().state_dict(), assign=way is replaced)
    assert [float(layer.log_sigma2.mean()) for layer in model] == [-2.0, -2.0]


def test_a_dense_state_is_no_training_of_the_variances():
    model = svdc.convert(two())
    model.load_state_dict(two().state_dict())
    assert not any(layer.variance_moved or copy.deepcopy(layer).variance_moved for layer in model)


def test_layers_whose_weights_are_no_real_numbers_stay_dense():
    model = nn.Sequential(nn.Linear(4, 3, dtype=torch.complex64), nn.Linear(3, 2))
    first, second = svdc.plan(model)
    assert second.converted and first.reason == "its weight is torch.complex64, not a real floating-point tensor"
