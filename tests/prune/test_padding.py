"""Shortcuts padded with a hard-coded number of zero channels (option A of CIFAR's ResNets): padded channels go too."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import svdcompress as svdc
from svdcompress.layers import variational_layers
from svdcompress.prune import PADDED
from svdcompress.prune._choice import _ratio

DEAD = {8: [1, 5], 16: [0, 3, 5, 9, 13, 15], 32: [2, 4, 7, 8, 11, 13, 17, 21, 23, 27, 30, 31]}
"""The dead channels of each stage's stream: 16 has those of 8 after 4 zeros, 32 those of 16 after 8."""


class LambdaLayer(nn.Module):
    """As in the public ResNet-20 for CIFAR-10."""

    def __init__(self, lambd: Any) -> None:
        super().__init__()
        self.lambd = lambd

    def forward(self, x: Tensor) -> Tensor:
        return self.lambd(x)


class BasicBlock(nn.Module):
    def __init__(self, inside: int, planes: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, planes, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.shortcut = nn.Sequential()
        if stride != 1:
            self.shortcut = LambdaLayer(
                lambda x: F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, planes // 4, planes // 4), "constant", 0)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        out += self.shortcut(x)
        return F.relu(out)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8)
        self.layer1 = nn.Sequential(BasicBlock(8, 8))
        self.layer2 = nn.Sequential(BasicBlock(8, 16, 2), BasicBlock(16, 16))
        self.layer3 = nn.Sequential(BasicBlock(16, 32, 2), BasicBlock(32, 32))
        self.linear = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer3(self.layer2(self.layer1(F.relu(self.bn1(self.conv1(x))))))
        return self.linear(F.avg_pool2d(out, out.size()[3]).flatten(1))


def resnet() -> nn.Module:
    torch.manual_seed(0)
    model = ResNet().eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.bias, std=0.5)
            nn.init.normal_(module.running_mean, std=0.3)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
    return model


def masks_of(model: nn.Module) -> dict[str, Tensor]:
    """No layer reads the dead channels of a stream: those of 8 are 5 and 9 of 16, and these are 13 and 17 of 32."""
    masks = {}
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            mask = torch.rand(layer.weight.shape) > 0.1
            stream = name == "linear" or (name.endswith("conv1") and name != "conv1")
            if stream:
                mask[:, DEAD[layer.weight.shape[1]]] = False
            masks[name] = mask
    return masks


def masked(model: nn.Module, masks: dict[str, Tensor]) -> nn.Module:
    """The oracle: the dense network with its weights multiplied by the masks."""
    oracle = copy.deepcopy(model)
    with torch.no_grad():
        for name, mask in masks.items():
            oracle.get_submodule(name).weight.mul_(mask)
    return oracle


@pytest.fixture
def pruned() -> tuple[nn.Module, dict[str, Tensor], nn.Module, Any]:
    dense = resnet()
    masks = masks_of(dense)
    model = svdc.convert(copy.deepcopy(dense))
    return dense, masks, model, svdc.prune(model, torch.randn(2, 3, 16, 16), masks=masks)


def same(small: nn.Module, oracle: nn.Module) -> bool:
    with torch.no_grad():
        return all(
            torch.allclose(small(x), oracle(x), rtol=1e-5, atol=1e-5)
            for x in (torch.randn(3, 3, 16, 16), torch.randn(1, 3, 24, 24))
        )


def test_padded_channels_go(pruned) -> None:
    dense, masks, _, small = pruned
    assert same(small, masked(dense, masks))
    assert small.conv1.out_channels == 8 - 2
    for block in small.layer2:
        assert block.conv2.out_channels == block.bn2.num_features == 16 - 6
    for block in small.layer3:
        assert block.conv2.out_channels == block.bn2.num_features == 32 - 12
    assert small.linear.in_features == 32 - 12


def test_gradients_in_training_are_the_masked_ones(pruned) -> None:
    dense, masks, _, small = pruned
    oracle = masked(dense, masks)
    x = torch.randn(4, 3, 16, 16)
    wide = svdc.to_dense(copy.deepcopy(small))
    for model in (wide, oracle):
        model.train()
        model(x).square().sum().backward()
    kept = [i for i in range(32) if i not in DEAD[32]]
    assert torch.allclose(wide.linear.weight.grad, oracle.linear.weight.grad[:, kept], rtol=1e-3, atol=1e-3)
    kept = [i for i in range(16) if i not in DEAD[16]]
    found, expected = wide.layer2[1].conv2.weight.grad, oracle.layer2[1].conv2.weight.grad[kept]
    assert torch.allclose(found, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


def test_a_checkpoint_keeps_what_is_cut(pruned, tmp_path) -> None:
    *_, small = pruned
    svdc.save(small, tmp_path / "model.safetensors")
    again = svdc.load(tmp_path / "model.safetensors", resnet()).eval()
    x = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        assert torch.equal(again(x), small(x))


def test_pruning_again_cuts_more(pruned) -> None:
    *_, small = pruned
    with torch.no_grad():
        for name, layer in variational_layers(small):
            if name == "linear" or (name.startswith("layer3") and name.endswith("1.conv1")):
                layer.mask[:, :2] = False  # the first two are padded zeros that stayed
    oracle = svdc.to_dense(copy.deepcopy(small))
    smaller = svdc.prune(small, torch.randn(2, 3, 16, 16), masks={n: layer.mask for n, layer in variational_layers(small)})
    assert same(smaller, oracle)
    assert smaller.layer3[0].conv2.out_channels == 32 - 12 - 2


@pytest.mark.slow
def test_the_file_computes_it_too(pruned, tmp_path) -> None:
    import onnxruntime

    *_, small = pruned
    x = torch.randn(2, 3, 16, 16)
    svdc.export_onnx(small, tmp_path / "model.onnx", x)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    with torch.no_grad():
        assert torch.allclose(torch.from_numpy(found), small(x), atol=1e-4)


class Inside(nn.Module):
    """The padded tensor is not the module's output, so it cannot be cut after it; the reason says so."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 6), nn.Linear(4, 10), nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(F.relu(F.pad(self.a(x), (2, 2)) + self.b(x)))


def test_padding_within_a_module_stays() -> None:
    torch.manual_seed(0)
    dense = Inside()
    masks = {name: torch.ones_like(getattr(dense, name).weight, dtype=torch.bool) for name in "abc"}
    masks["c"][:, [0, 4, 9]] = False
    small: Any = svdc.prune(svdc.convert(copy.deepcopy(dense)), torch.randn(2, 4), masks=masks).eval()
    assert small.a.out_features == 5 and small.b.out_features == 9
    assert any(PADDED in group.reason for group in small.pruning.groups)
    x = torch.randn(5, 4)
    assert torch.allclose(small(x), masked(dense, masks)(x), atol=1e-6)


class Summed(nn.Module):
    """Returns a sum whose first term is the padded tensor, so that its channels are those of the padding."""

    def __init__(self) -> None:
        super().__init__()
        self.b = nn.Linear(6, 10)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(F.pad(x, (2, 2)) + self.b(x))


def test_a_sum_with_a_padding_is_not_taken_for_the_padding() -> None:
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(4, 6), Summed(), nn.Linear(10, 3))
    masks = {name: torch.ones_like(dense.get_submodule(name).weight, dtype=torch.bool) for name in ("0", "1.b", "2")}
    masks["2"][:, [0, 4, 9]] = False
    small: Any = svdc.prune(svdc.convert(copy.deepcopy(dense)), torch.randn(2, 4), masks=masks).eval()
    (group,) = [group for group in small.pruning.groups if group.reason == PADDED]
    assert group.kept == 4 and not any("fails" in group.reason for group in small.pruning.groups)
    x = torch.randn(5, 4)
    assert torch.allclose(small(x), masked(dense, masks)(x), atol=1e-6)


def test_constants_are_carried_by_channels_in_proportion():
    values = np.array([[1.0, -2.0, 0.5], [3.0, -6.0, 1.5], [1.0, -2.0, 0.6], [0.0, 0.0, 0.0], [1.0, np.nan, 0.5]])
    assert _ratio(values, 1, 0) == 3.0 and _ratio(values, 0, 1) == pytest.approx(1 / 3) and _ratio(values, 3, 0) == 0.0
    assert _ratio(values, 2, 0) is None and _ratio(values, 0, 3) is None and _ratio(values, 0, 4) is None
    assert _ratio(values * [[1], [1e9], [1], [1], [1]], 1, 0) is None, "a carrier that is next to nothing"
