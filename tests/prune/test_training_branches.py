"""Branches that only run in `train()`: pruned too or left consistent, so that fine-tuning matches that of the masked model."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import svdcompress as svdc
from svdcompress.convert import watch
from svdcompress.layers import variational_layers


class Auxiliary(nn.Module):
    """A head as in GoogLeNet: pooling, a 1x1 convolution, dropout, two Linears."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv, self.drop = nn.Conv2d(channels, 6, 1), nn.Dropout(0.7)
        self.fc1, self.fc2 = nn.Linear(6 * 4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.conv(F.adaptive_avg_pool2d(x, 2)))
        return self.fc2(self.drop(torch.relu(self.fc1(x.flatten(1)))))


class Inception(nn.Module):
    """Two concatenated branches, and an auxiliary head that reads them in training."""

    def __init__(self, norm: bool = False, drop: float = 0.0) -> None:
        super().__init__()
        self.stem, self.left, self.right = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 10, 1), nn.Conv2d(8, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(16) if norm else nn.Identity()
        self.drop, self.last, self.head = nn.Dropout(drop), nn.Conv2d(16, 12, 3), nn.Linear(12, 3)
        self.aux = Auxiliary(16)

    def forward(self, x: Tensor):
        x = torch.relu(self.stem(x))
        x = torch.relu(self.norm(torch.cat([self.left(x), self.right(x)], 1)))
        aux = self.aux(x) if self.training else None
        x = self.head(torch.relu(self.last(self.drop(x))).mean((2, 3)))
        return (x, aux) if self.training else x


class SameHead(nn.Module):
    """In training the head also reads the hidden layer: no new layer, but another use of one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor):
        hidden = torch.relu(self.first(x))
        x = self.head(torch.relu(self.second(hidden)))
        return (x, self.head(hidden)) if self.training else x


class Added(nn.Module):
    """In training, adds noise and a projection by a bare parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.project = nn.Parameter(torch.randn(2, 8))

    def forward(self, x: Tensor):
        hidden = torch.relu(self.first(x))
        if self.training:
            hidden = hidden + 0.1 * torch.randn_like(hidden)
        x = self.head(torch.relu(self.second(hidden)))
        return (x, hidden @ self.project.t()) if self.training else x


IMAGES, ROWS = (4, 3, 10, 10), (4, 5)
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "auxiliary head": (Inception, IMAGES),
    "auxiliary head, norm, dropout": (lambda: Inception(True, 0.3), IMAGES),
    "the same head": (SameHead, ROWS),
    "a bare parameter": (Added, ROWS),
}


def dead_columns(model: nn.Module) -> dict[str, Tensor]:
    """Masks with which every layer except the first reads only every other input, including auxiliary layers."""
    masks = {name: torch.ones_like(layer.weight, dtype=torch.bool) for name, layer in variational_layers(model)}
    for mask in list(masks.values())[1:]:
        mask[:, ::2] = False
    return masks


def loss_of(output) -> Tensor:
    parts = output if isinstance(output, tuple) else (output,)
    return sum((part.square().sum() for part in parts), torch.zeros((), dtype=torch.float64))


@pytest.mark.parametrize("name", MODELS)
def test_fine_tuning_runs_and_eval_is_the_masked_model(name):
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model, x = svdc.convert(make()).eval(), torch.randn(shape)
    for seed in range(3):
        torch.manual_seed(seed)
        masks = {n: torch.rand(len(m), *[1] * (m.dim() - 1)).expand(m.shape) > 0.4 for n, m in dead_columns(model).items()}
        before = {key: value.clone() for key, value in model.state_dict().items()}
        small = svdc.prune(model, x, masks=masks)
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
        torch.testing.assert_close(small.eval()(x), svdc.hold(copy.deepcopy(model), masks).eval()(x), atol=1e-5, rtol=1e-5)
        loss_of(small.train()(x)).backward()  # used to raise an error because shapes did not fit


@pytest.mark.parametrize("name", ["auxiliary head", "the same head"])
def test_dead_units_go_and_gradients_are_the_masked_models(name):
    """The oracle is a dense masked model in training, built without the package: no noise, no dropout."""
    make, shape = MODELS[name]
    torch.manual_seed(0)
    dense, x = make().double(), torch.randn(shape, dtype=torch.float64)
    for module in dense.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model = svdc.convert(copy.deepcopy(dense), log_sigma2=-80.0).eval()
    masks = dead_columns(model)
    small = svdc.prune(model, x, masks=masks).train()
    assert small.pruning.parameters_after < 0.75 * small.pruning.parameters_before
    assert not [note for note in small.pruning.notes if "left masked" in note]

    with torch.no_grad():
        for layer, mask in masks.items():
            dense.get_submodule(layer).weight.mul_(mask)
    expected, found = dense.train()(x), small(x)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)
    loss_of(expected).backward()
    loss_of(found).backward()
    for layer, module in variational_layers(small):
        gradient = dense.get_submodule(layer).weight.grad * masks[layer]
        lives = gradient.reshape(-1)[masks[layer].reshape(-1)]
        ours = module.weight.grad.reshape(-1)[module.mask.reshape(-1)]
        lost = len(lives) - len(ours)  # removed units: nothing alive reads them, so they have no gradient
        assert lost == int((lives == 0).sum()) - int((ours == 0).sum())
        torch.testing.assert_close(ours[ours != 0], lives[lives != 0], atol=1e-4, rtol=1e-4)


def test_what_a_branch_reads_stays_and_what_it_does_not_goes_along():
    torch.manual_seed(0)
    model, x = svdc.convert(Inception()).eval(), torch.randn(IMAGES)
    masks = {name: torch.ones_like(layer.weight, dtype=torch.bool) for name, layer in variational_layers(model)}
    masks["last"][:, :6] = False  # in eval() nothing reads six channels; the auxiliary head reads three of them
    masks["aux.conv"][:, :3] = False
    small = svdc.prune(model, x, masks=masks)
    assert small.left.out_channels == 7 and small.last.in_channels == 13
    assert small.aux.conv.in_channels == 13 and small.aux.conv.weight.shape == (6, 13, 1, 1)


def test_nothing_is_changed_by_the_look_at_training():
    torch.manual_seed(0)
    model, x = svdc.convert(Inception(norm=True)).eval(), torch.randn(IMAGES)
    masks = dead_columns(model)
    random, state = torch.get_rng_state(), copy.deepcopy(model.state_dict())
    small = svdc.prune(model, x, masks=masks)
    assert torch.equal(torch.get_rng_state(), random) and not small.training and not small.norm.training
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert int(small.norm.num_batches_tracked) == 0
    assert svdc.prune(model.train(), x, masks=masks).training


def test_a_branch_that_was_never_followed_is_told():
    class Wants(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(5, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                raise ValueError("targets are needed")
            return self.head(torch.relu(self.first(x)))

    torch.manual_seed(0)
    model, x = svdc.convert(Wants()).eval(), torch.randn(ROWS)
    small = svdc.prune(model, x, masks=dead_columns(model))
    assert small.first.out_features == 4
    assert "train() does not run on the example inputs (ValueError: targets are needed)" in small.pruning.notes[0]


def test_layers_of_a_branch_are_not_idle():
    report = svdc.groups(Inception().eval(), torch.randn(IMAGES))
    assert "aux.fc1" in {group.name for group in report.groups if not group.reason}


def test_a_pass_in_training_puts_statistics_back():
    torch.manual_seed(0)
    model = Inception(norm=True).eval()
    state = copy.deepcopy(model.state_dict())
    watch(model, torch.randn(IMAGES), (), train=True)
    assert not model.norm.training and all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_a_constant_that_dropout_makes_random_for_a_branch_stays():
    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head, self.aux = nn.Linear(5, 8), nn.Linear(8, 3), nn.Linear(8, 3)

        def forward(self, x: Tensor):
            x = torch.relu(self.first(x) + 1)
            return (self.head(x), self.aux(F.dropout(x, 0.5))) if self.training else self.head(x)

    torch.manual_seed(0)
    model, x = svdc.convert(Dropped()).eval(), torch.randn(ROWS)
    masks = {name: torch.ones_like(layer.weight, dtype=torch.bool) for name, layer in variational_layers(model)}
    masks["first"][:2] = False
    assert svdc.prune(model, x, masks=masks).first.out_features == 8
    masks["aux"][:, :2] = False  # now no branch reads them
    assert svdc.prune(model, x, masks=masks).first.out_features == 6
