"""Errors that could go unnoticed: constants right for one size only, outputs of extreme scales, values that test nothing."""

from __future__ import annotations

import copy

import pytest
import torch
from masking import gap, masked, outputs, random_masks, shake
from torch import Tensor, nn
from torch.nn import functional as F
from zoo_models import ZOO

from svdcompress.convert import convert
from svdcompress.layers import variational_layers
from svdcompress.prune import prune
from svdcompress.prune._compare import TOLERANCE, difference
from svdcompress.prune._verify import EquivalenceCheck


def all_alive(model: nn.Module) -> dict[str, Tensor]:
    return {name: torch.ones_like(layer.weight, dtype=torch.bool) for name, layer in variational_layers(model)}


@pytest.mark.parametrize(
    ("name", "shape"), [("mobilenet-small-image", (2, 3, 12, 12)), ("positions-first", (14, 2, 6)), ("unet", (1, 3, 16, 12))]
)
@pytest.mark.parametrize("seed", range(3))
def test_it_holds_for_inputs_of_another_size(name: str, shape: tuple[int, ...], seed: int) -> None:
    torch.manual_seed(seed)
    model, x = convert(shake(ZOO[name][0]())), ZOO[name][1]()
    masks = random_masks(model, 0.1, 0.5, 0.4)
    small = prune(model, x, masks=masks)
    assert small.pruning.parameters_after < small.pruning.parameters_before
    for case in (x, torch.randn(shape)):
        assert gap(outputs(small.eval(), case), outputs(masked(model, masks), case)) <= 1e-5


class Scaled(nn.Module):
    """Outputs of any scale, some filled with a sentinel; a weight read outside of the layers makes pruning wrong."""

    def __init__(self, scale: float, sentinel: float = 0.0, bare: bool = True) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 12), nn.Linear(12, 8)
        self.scale, self.sentinel, self.bare = scale, sentinel, bare

    def forward(self, x: Tensor) -> Tensor:
        out = self.b(F.relu(self.a(x))) * self.scale
        if self.bare:
            out = out + self.scale * 0.01 * self.a.weight.shape[0]
        if self.sentinel:
            out = out.masked_fill(torch.tensor([0, 1, 0, 1, 0, 1, 1, 0]).bool(), self.sentinel)
        return out


@pytest.mark.parametrize("scale", [1e-7, 1.0, 1e5])
@pytest.mark.parametrize("sentinel", [0.0, -1e9])
def test_size_of_the_outputs_hides_no_mistake(scale: float, sentinel: float) -> None:
    """With half of the outputs at -1e9, or all of them at 1e-7, a change of a few percent is still a change."""
    torch.manual_seed(0)
    for bare in (True, False):
        model = convert(shake(Scaled(scale, sentinel, bare)))
        masks = all_alive(model)
        masks["b"][:, :4] = False
        small = prune(model, torch.randn(3, 6), masks=masks)
        assert small.a.out_features == (12 if bare else 8)
        if bare:
            assert "would change" in {group.name: group.reason for group in small.pruning.groups}["a"]


def test_difference_is_a_share_of_each_output() -> None:
    a, b = torch.tensor([1.0, 2.0, -1e9]), torch.tensor([1.0, 2.2, -1e9])
    assert difference([a], [a]) == (0.0, 0.0)
    absolute, relative = difference([a * 1e-6], [b * 1e-6])
    assert 0.005 < relative < 0.2 and absolute < 1e-3
    assert difference([a], [a.reshape(1, 3)]) == (float("inf"),) * 2
    assert difference([torch.tensor([1.0, float("nan")])], [torch.tensor([1.0, 2.0])])[1] == float("inf")
    assert difference([torch.tensor([3])], [torch.tensor([4])])[1] == float("inf")
    assert difference([torch.zeros(2)], [torch.zeros(2)])[1] == 0.0 < difference([torch.full((2,), 1e-9)], [torch.zeros(2)])[1]
    tiny = torch.linspace(0.9, 1.0, 50)
    assert difference([tiny + 1e-4], [tiny])[1] > TOLERANCE > difference([tiny + 1e-7], [tiny])[1]


def test_cases_are_finite_and_of_several_sizes() -> None:
    """Noise under a logarithm tests nothing, so the examples' own values are used; batches of 1 and 3, and longer sequences."""

    class Log(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.log(x).sum(-1)

    check = EquivalenceCheck(Log().eval(), torch.rand(2, 5, 4), 2)
    assert [tuple(case.shape) for case, _ in check.cases] == [(1, 5, 4), (3, 5, 4), (1, 5, 8)]
    for case, (out,) in check.cases:
        assert torch.isfinite(out).all() and (case > 0).all()
    assert not torch.equal(check.cases[0][0][0], check.cases[1][0][0])

    class Fixed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.shape != (2, 5, 4):
                raise ValueError("not this one")
            return x

    assert [tuple(case.shape) for case, _ in EquivalenceCheck(Fixed().eval(), torch.rand(2, 5, 4), 2).cases] == [(2, 5, 4)]


def test_half_precision_is_judged_without_its_rounding() -> None:
    torch.manual_seed(0)
    for name in ("mlp", "resnet-basic", "gated-mlp"):
        model, x = convert(shake(ZOO[name][0]()).eval()), ZOO[name][1]()
        masks = random_masks(model)
        model, x = model.bfloat16(), x.bfloat16()
        wide = prune(copy.deepcopy(model).float(), x.float(), masks=masks).pruning
        small = prune(model, x, masks=masks)
        assert next(small.parameters()).dtype == torch.bfloat16
        # not exactly: which constants count as multiples of each other depends on the last bits and on the processor
        gone = small.pruning.parameters_before - small.pruning.parameters_after
        assert gone >= (wide.parameters_before - wide.parameters_after) / 2 > 0
        assert gap(outputs(small.eval(), x), outputs(masked(model, masks), x)) <= 0.03


def test_a_value_that_is_no_unit_plus_a_bias_is_not_a_constant() -> None:
    """The sum of a parameter and an activation that cannot be followed still depends on the input."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift, self.a, self.b, self.c = nn.Parameter(torch.ones(6)), nn.Linear(6, 9), nn.Linear(9, 7), nn.Linear(7, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.fft.fft(x).real + self.shift
            return self.c(F.relu(self.b(F.relu(self.a(x)))))

    torch.manual_seed(0)
    model = convert(shake(Odd()))
    masks = all_alive(model)
    masks["b"][:3] = False
    small = prune(model, torch.randn(3, 6), masks=masks)
    assert (small.a.out_features, small.b.out_features) == (9, 4)
    assert not [group for group in small.pruning.groups if "left masked" in group.reason]


def test_constants_are_not_folded_into_weights_that_are_computed() -> None:
    class Equalised(nn.Module):
        """A dense layer whose weight is a function of its parameter: zeros pass through, but its constants cannot be folded."""

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 8), nn.Linear(4, 2)
            self.raw = nn.Parameter(torch.randn(4, 8))

        def forward(self, x: Tensor) -> Tensor:
            return self.b(F.relu(F.relu(self.a(x)) @ self.raw.exp().t()))

    torch.manual_seed(0)
    model = convert(shake(Equalised()))
    with torch.no_grad():
        model.a.bias.fill_(0.7)
        model.a.bias[1] = -0.7
    masks = all_alive(model)
    masks["a"][:3] = False  # relu(0.7) twice, relu(-0.7) once
    x = torch.randn(3, 6)
    small = prune(model, x, masks=masks)
    assert small.a.out_features == 7
    assert gap(outputs(small.eval(), x), outputs(masked(model, masks), x)) <= 1e-6


def test_tied_weights_carry_a_constant_once() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(2, 6, 3, padding=1)
            self.a, self.b = nn.Conv2d(6, 4, 3, padding=1), nn.Conv2d(6, 4, 3, padding=1)
            self.b.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            x = F.relu(self.first(x))
            return self.a(x) * self.b(x + 0)

    torch.manual_seed(0)
    model = convert(shake(Twice()))
    with torch.no_grad():
        model.first.bias.fill_(0.5)
    masks = all_alive(model)
    masks["first"][:4] = False
    x = torch.randn(2, 2, 6, 6)
    small = prune(model, x, masks=masks)
    assert small.first.out_channels == 3  # one of the four carries the others' constants
    assert small.a.weight is small.b.weight and small.a.log_sigma2 is small.b.log_sigma2
    assert gap(outputs(small.eval(), x), outputs(masked(model, masks), x)) <= 1e-6
    expected = model.a.log_sigma2[:, :4].exp().sum(1)  # the carrier's variance is the sum for all four
    torch.testing.assert_close(small.a.log_sigma2[:, 0].exp(), expected)


def test_the_given_model_shares_no_memory_with_the_pruned_one() -> None:
    torch.manual_seed(0)
    for name in ("resnet-basic", "mobilenet-v2"):
        model, x = convert(shake(ZOO[name][0]())), ZOO[name][1]()
        before = {key: value.clone() for key, value in model.state_dict().items()}
        small = prune(model, x, masks=random_masks(model))
        with torch.no_grad():
            for tensor in [*small.parameters(), *small.buffers()]:
                tensor.copy_(torch.full_like(tensor, 3))
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_norms_without_tensors_know_their_new_width() -> None:
    torch.manual_seed(0)
    model = convert(
        nn.Sequential(nn.Conv2d(2, 8, 3), nn.InstanceNorm2d(8), nn.ReLU(), nn.Conv2d(8, 6, 3), nn.ReLU(), nn.Conv2d(6, 2, 1))
    )
    masks = all_alive(model)
    masks["3"][:, :3] = False
    small = prune(model, torch.randn(2, 2, 9, 9), masks=masks)
    assert small[0].out_channels == small[1].num_features == small[3].in_channels == 5
    assert small.surgery["attributes"]["1"] == {"num_features": 5}
