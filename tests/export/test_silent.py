"""Branches in which a layer has no weights left: what their files hold, and that these compute what PyTorch does."""

from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import svdcompress as svdc
from svdcompress.layers import variational_layers
from svdcompress.relevance import hold


class Residual(nn.Module):
    """Two convolutions with batch normalization, added to their input."""

    def __init__(self, act: str = "relu", scaled: bool = False) -> None:
        super().__init__()
        self.c1, self.n1 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.c2, self.n2 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.act, self.scale = act, nn.Parameter(torch.rand(8, 1, 1) + 0.5) if scaled else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.n2(self.c2(torch.relu(self.n1(self.c1(x)))))
        y = y if self.scale is None else y * self.scale
        return F.relu(x + y) if self.act == "relu" else x + F.gelu(y) * 0.5


class Gated(nn.Module):
    """A branch that ends in a gate by its own mean, as in a squeeze and excitation, and is subtracted."""

    def __init__(self) -> None:
        super().__init__()
        self.c1, self.squeeze, self.c2 = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.c1(x))
        y = y * torch.sigmoid(self.squeeze(y.mean((2, 3), keepdim=True)))
        return x - self.c2(y)


class Normed(nn.Module):
    """A transformer's feed-forward part, normalized after the sum."""

    def __init__(self, biased: bool = True) -> None:
        super().__init__()
        self.c1, self.c2, self.norm = nn.Linear(8, 16), nn.Linear(16, 8, bias=biased), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.c2(F.gelu(self.c1(x))))


class Channels(nn.Module):
    """A transposition between the last layer and the sum, as in a ConvNeXt."""

    def __init__(self) -> None:
        super().__init__()
        self.c1, self.c2 = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.c2(F.relu(self.c1(x.permute(0, 2, 3, 1)))).permute(0, 3, 1, 2)


class Read(nn.Module):
    """A branch that a further convolution reads, with padding: it is no constant there."""

    def __init__(self) -> None:
        super().__init__()
        self.c1, self.c2, self.after = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.after(self.c2(self.c1(x)))


class OneFeature(nn.Module):
    """A branch of one feature, added to all features."""

    def __init__(self) -> None:
        super().__init__()
        self.st, self.c1, self.c2 = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return (self.st(x) + self.c2(F.relu(self.c1(x)))).tanh()


class OneChannel(nn.Module):
    """The same for channels of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.st, self.c1, self.c2 = nn.Conv2d(3, 8, 1), nn.Conv2d(3, 4, 1), nn.Conv2d(4, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return (self.st(x) + self.c2(F.relu(self.c1(x)))).tanh()


class Excited(nn.Module):
    """A squeeze and excitation at the end of the branch, and activations that are written in several operators."""

    def __init__(self) -> None:
        super().__init__()
        self.c1, self.c2, self.squeeze, self.prelu = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1), nn.PReLU(8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.prelu(self.c2(F.relu(self.c1(x))))
        return x + F.logsigmoid(F.softplus(y * torch.sigmoid(self.squeeze(y.mean((2, 3), keepdim=True)))))


class NormedInside(nn.Module):
    """A LayerNorm at the end of the branch, as in Swin V2."""

    def __init__(self) -> None:
        super().__init__()
        self.c1, self.c2, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.norm(self.c2(F.gelu(self.c1(x))))).tanh()


class Narrow(nn.Module):
    """A branch of full shape meets a value of one position, which must still be spread over all positions."""

    def __init__(self) -> None:
        super().__init__()
        self.c1, self.c2 = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3), keepdim=True) + self.c2(self.c1(x))


def images(*blocks: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *blocks, nn.Flatten(2), nn.Flatten(1), nn.Linear(8 * 36, 4))


def shaken(model: nn.Module) -> nn.Module:
    """In `eval()`, with statistics and scales that are not those of a new network."""
    torch.manual_seed(0)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                for tensor in (module.running_mean, module.weight, module.bias):
                    tensor.copy_(torch.randn(8))
                module.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]
    return model.eval()


IMAGE, TOKENS = (3, 6, 6), (5, 8)
GONE: dict[str, tuple[Any, tuple[int, ...], int]] = {  # a model, its inputs, and the convolutions and products that go
    "relu after the sum": (lambda: images(Residual()), IMAGE, 2),
    "gelu in the branch": (lambda: images(Residual("gelu")), IMAGE, 2),
    "scaled": (lambda: images(Residual(scaled=True)), IMAGE, 2),
    "gated, subtracted": (lambda: images(Gated()), IMAGE, 3),
    "normalized tokens": (lambda: nn.Sequential(Normed(), nn.Linear(8, 3)), TOKENS, 2),
    "tokens without a bias": (lambda: nn.Sequential(Normed(False), nn.Linear(8, 3)), TOKENS, 2),
    "transposed": (lambda: images(Channels()), IMAGE, 2),
    "the model's output": (lambda: nn.Sequential(nn.Conv2d(3, 8, 1), Residual("gelu")), IMAGE, 2),
    "one feature": (lambda: nn.Sequential(OneFeature(), nn.Linear(8, 3)), TOKENS, 2),
    "one channel": (lambda: nn.Sequential(OneChannel(), nn.Conv2d(8, 2, 1)), IMAGE, 2),
    "squeezed after the last layer": (lambda: images(Excited()), IMAGE, 3),
    "normalized inside": (lambda: nn.Sequential(NormedInside(), nn.Linear(8, 3)), TOKENS, 2),
    "read by another": (lambda: images(Read()), IMAGE, 0),
    "meets one position": (lambda: images(Narrow()), IMAGE, 0),
}
PRODUCTS = ("Conv", "Gemm", "MatMul", "FusedConv")


def products(path: Path) -> int:
    kinds: Counter[str] = Counter()
    stack = [onnx.load(path).graph]
    while stack:
        graph = stack.pop()
        for node in graph.node:
            kinds[node.op_type] += 1
            stack += [attribute.g for attribute in node.attribute if attribute.HasField("g")]
    return sum(kinds[kind] for kind in PRODUCTS)


def silenced(make: Any) -> tuple[Any, Any]:
    """The model converted, with weights everywhere and without any in the layers c1, c2 and squeeze."""
    torch.manual_seed(0)
    full = svdc.convert(shaken(make()), log_sigma2=-12.0)
    silent = copy.deepcopy(full)
    masks = {name: torch.ones_like(layer.weight, dtype=torch.bool) for name, layer in variational_layers(full)}
    hold(full, masks)
    hold(silent, {name: mask & (name.split(".")[-1] not in ("c1", "c2", "squeeze")) for name, mask in masks.items()})
    return full, silent


@pytest.mark.parametrize("name", GONE)
def test_a_silent_branch_is_not_in_the_file(name: str, tmp_path: Path) -> None:
    make, shape, gone = GONE[name]
    full, silent = silenced(make)
    x = torch.randn(2, *shape)
    files = [tmp_path / f"{number}.onnx" for number in range(2)]
    for model, file in zip((full, silent), files, strict=True):
        svdc.export_onnx(model, file, x)
    assert products(files[0]) - products(files[1]) == gone
    session = onnxruntime.InferenceSession(files[1])
    for batch in (1, 4):
        x = torch.randn(batch, *shape)
        (got,) = session.run(None, {"input": x.numpy()})
        with torch.no_grad():
            assert np.allclose(got, silent(x).numpy(), atol=1e-5)
            assert not np.allclose(got, full(x).numpy(), atol=1e-2)  # the branch matters


@pytest.mark.parametrize("name", ["relu after the sum", "normalized tokens"])
def test_nor_is_it_in_the_monte_carlo_file(name: str, tmp_path: Path) -> None:
    make, shape, gone = GONE[name]
    full, silent = silenced(make)
    x = torch.randn(2, *shape)
    files = [tmp_path / f"{number}.onnx" for number in range(2)]
    options: dict[str, Any] = {"monte_carlo": True, "task": "regression", "tau": 1.0}
    found = [svdc.export_onnx(model, file, x, **options) for model, file in zip((full, silent), files, strict=True)]
    assert products(files[0]) - products(files[1]) >= gone
    assert found[1].parity is not None and found[1].parity < 1e-4  # against PyTorch, with the same noise


def test_an_added_zero_goes_with_the_addition(tmp_path: Path) -> None:
    make = lambda: images(Channels())  # noqa: E731
    _, silent = silenced(make)
    with torch.no_grad():
        silent[1].c2.bias.zero_()
    svdc.export_onnx(silent, tmp_path / "silent.onnx", torch.randn(2, *IMAGE))
    assert [node.op_type for node in onnx.load(tmp_path / "silent.onnx").graph.node] == ["Conv", "Reshape", "Gemm"]


def test_small_weights_are_no_zeros(tmp_path: Path) -> None:
    make = lambda: images(Residual())  # noqa: E731
    full, silent = silenced(make)
    with torch.no_grad():
        silent[1].c2.mask[:, 0, 0, 0] = True
        silent[1].c2.weight.fill_(1e-30)
    files = [tmp_path / f"{number}.onnx" for number in range(2)]
    for model, file in zip((full, silent), files, strict=True):
        svdc.export_onnx(model, file, torch.randn(2, *IMAGE))
    assert products(files[0]) - products(files[1]) <= 1  # c1, of which nothing is left, may go
