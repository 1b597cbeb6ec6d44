"""The rows that layers are fitted to, and those held out: drawn at random, whatever the order of the examples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from svdcompress.convert import convert
from svdcompress.layers import variational_layers
from svdcompress.reconstruction import reconstruct
from svdcompress.reconstruction._reconstruct import _examples


def cut(net: nn.Module, writer: str, reader: str, gone: list[int]) -> tuple[Any, dict[str, Tensor]]:
    """A converted network, and masks without some of the units between two of its layers."""
    model: Any = convert(net, log_sigma2=-40.0).eval()
    masks = {name: torch.ones_like(layer.weight, dtype=torch.bool) for name, layer in variational_layers(model)}
    masks[writer][gone] = False
    masks[reader][:, gone] = False
    return model, masks


def perceptron() -> tuple[Any, dict[str, Tensor]]:
    torch.manual_seed(0)
    return cut(nn.Sequential(nn.Linear(30, 24), nn.Tanh(), nn.Linear(24, 8)), "0", "2", [1, 4, 5, 9, 12, 20])


def convolutions() -> tuple[Any, dict[str, Tensor]]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(30, 24, 1), nn.Tanh(), nn.Conv2d(24, 8, 3, padding=1))
    return cut(net, "0", "2", [1, 4, 5, 9, 12, 20])


def of_classes(each: int, classes: int = 10) -> Tensor:
    """Examples (each * classes, 30), class by class; every class has inputs of its own."""
    torch.manual_seed(1)
    x = 0.1 * torch.randn(each * classes, 30)
    for number in range(classes):
        x[number * each : (number + 1) * each, 3 * number : 3 * number + 3] += 3 * torch.randn(each, 3)
    return x


@pytest.mark.parametrize("made", [perceptron, convolutions])
def test_examples_sorted_by_class_are_as_good_as_any(made: Any) -> None:
    x, other = of_classes(20), of_classes(100)
    if made is convolutions:
        x, other = (rows[:, :, None, None].expand(-1, -1, 4, 4) * torch.rand(len(rows), 1, 4, 4) for rows in (x, other))
    mixed = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(2))]
    left = []
    for examples in (mixed, x, x.flip(0)):
        model, masks = made()
        with torch.no_grad():
            wanted = model(other)
            reconstruct(model, examples, masks)
            model[2].weight *= masks["2"]
            left.append(float((model(other) - wanted).square().mean() / wanted.var()))
    model, masks = made()
    with torch.no_grad():
        model[2].weight *= masks["2"]
        untouched = float((model(other) - wanted).square().mean() / wanted.var())
    assert max(left) < 1.1 * min(left) < 0.8 * untouched, (left, untouched)


def test_the_rows_of_an_example_are_held_out_together(monkeypatch: pytest.MonkeyPatch) -> None:
    from svdcompress.reconstruction import _layer

    drawn: list[Tensor] = []
    refit = _layer.VariationalLayer.windows

    def noted(self: Any, x: Tensor, at: Tensor, *given: Any, **named: Any) -> Tensor:
        drawn.append(at.clone())
        return refit(self, x, at, *given, **named)

    monkeypatch.setattr(_layer.VariationalLayer, "windows", noted)
    model, masks = convolutions()
    reconstruct(model, torch.randn(50, 30, 4, 4), masks)
    at = drawn[-1]
    assert sorted(at.tolist()) == list(range(50 * 16))
    held, rest = set((at[-160:] // 16).tolist()), set((at[:-160] // 16).tolist())
    assert len(held) == 10 and not held & rest
    assert held != set(range(40, 50)) and max(rest) > 45  # not the last ones


def test_few_rows_of_many_are_drawn_and_always_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    from svdcompress.reconstruction import _layer

    sizes = []
    solve = _layer.solve

    def noted(x: Tensor, *given: Any, **named: Any) -> Any:
        sizes.append(tuple(x.shape))
        return solve(x, *given, **named)

    monkeypatch.setattr(_layer, "solve", noted)
    x, found = torch.randn(900, 30), []
    for _ in range(2):
        model, masks = perceptron()
        reconstruct(model, x, masks, rows=64)
        found.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
    assert sizes == [(64, 18), (64, 18)]  # the first layer's inputs were not removed
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize("shape", [(6, 5), (6, 4, 5), (4, 6, 5), (4, 6, 3, 5), (6, 6, 5), (12, 3, 5)])
def test_rows_are_known_by_their_example(shape: tuple[int, ...]) -> None:
    """Outputs of 6 examples: by example, or by step (the sequence first), or in two windows each."""
    where = shape.index(6) if 6 in shape else 0
    owner = torch.arange(shape[where]) * 6 // shape[where]
    owners = owner.view([-1 if axis == where else 1 for axis in range(len(shape) - 1)]).expand(shape[:-1]).flatten()
    at = torch.arange(len(owners))
    assert torch.equal(_examples(at, torch.empty(shape), len(owners), 6), owners)
