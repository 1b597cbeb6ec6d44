"""Which units are residual channels, by architectures read by hand, and rankings that leave them all."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from test_ranked import everything, noisy
from torch import Tensor, nn
from zoo_models import ZOO

from svdcompress import convert
from svdcompress.selection import Ranking, ranked

STREAMS = {
    "resnet-basic": {"0", "3.conv2", "4.conv2", "4.downsample.0", "5.conv2"},
    "resnet-bottleneck": {"3.conv3", "3.down.0", "4.conv3", "4.down.0"},
    "resnet-option-a": {"0", "3.conv2", "4.conv2"},
    "mobilenet-v2": {"0", "3.layers.6", "4.layers.6", "5.layers.6"},
    "mobilenet-v3": {"0", "3.layers.7"},  # not the expanded channels, which a squeeze and excitation multiplies
}
"""The layers whose outputs are added to those of another, where that channel can be removed."""

NONE = ["vgg-bn", "densenet", "inception", "unet", "gated-mlp", "hf-llama", "lstm"]
"""Channels are put side by side, multiplied, or held by a normalization over them."""


@pytest.mark.parametrize("name", [name for name in STREAMS if name in ZOO])
@pytest.mark.parametrize("evenness", [0.0, 0.5])
def test_within_blocks_all_that_is_added_stays(name: str, evenness: float) -> None:
    torch.manual_seed(1)
    factory, inputs = ZOO[name]
    model, x = noisy(factory()), inputs()
    ranking = Ranking(model, x, everything(model))
    assert ranking.residual
    full = lambda masks: {name for name, mask in masks.items() if mask.flatten(1).any(1).all()}  # noqa: E731
    found = ranking.at({"macs": 1e-9}, evenness=evenness, within_blocks=True)
    free = ranking.at({"macs": 1e-9}, evenness=evenness)
    assert not found.reached and found.macs > free.macs
    assert full(found.masks) - full(free.masks) == STREAMS[name]  # all others lose as much as before


@pytest.mark.parametrize("name", [name for name in NONE if name in ZOO])
def test_other_units_are_no_residual_channels(name: str) -> None:
    factory, inputs = ZOO[name]
    model, x = noisy(factory()), inputs()
    ranking = Ranking(model, x, everything(model))
    assert not ranking.residual
    either = [ranking.at({"parameters": 0.5}, within_blocks=within).masks for within in (False, True)]
    assert all(torch.equal(mask, either[1][one]) for one, mask in either[0].items())


@pytest.mark.parametrize("share", [0.8, 0.6])
def test_within_blocks_is_what_protecting_the_norms_of_all_sums_gives(share: float) -> None:
    factory, inputs = ZOO["resnet-basic"]
    model, x = noisy(factory()), inputs()
    by_hand = Ranking(model, x, everything(model), protect=["1", "3.bn2", "4.bn2", "5.bn2"])
    assert not by_hand.residual
    found = Ranking(model, x, everything(model)).at({"macs": share}, within_blocks=True)
    wanted = by_hand.at({"macs": share})
    assert found.units == wanted.units > 0
    assert all(torch.equal(mask, wanted.masks[name]) for name, mask in found.masks.items())
    told = ranked(model, x, everything(model), goal={"macs": share}, within_blocks=True)
    assert all(torch.equal(mask, wanted.masks[name]) for name, mask in told.items())


class Sums(nn.Module):
    """One layer's outputs, added to each other; two layers that read the same input; and two that read different ones."""

    def __init__(self) -> None:
        super().__init__()
        self.turned, self.left, self.right = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.inner, self.outer, self.last = nn.Linear(6, 7), nn.Linear(7, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        turned = self.turned(x)
        turned = turned * 0.8 + turned.relu() * 0.6
        added = self.left(turned) + self.right(turned)
        return self.last(added - self.outer(self.inner(added).relu()))


def test_a_residual_channel_takes_two_layers_that_read_different_units() -> None:
    model = noisy(Sums())
    ranking = Ranking(model, torch.randn(3, 5), everything(model))
    kept = ranking.at({"macs": 1e-9}, within_blocks=True).masks
    alive = {name: int(mask.any(1).sum()) for name, mask in kept.items()}
    assert alive == {"turned": 1, "left": 6, "right": 6, "inner": 1, "outer": 6, "last": 3}


class Direct(nn.Module):
    """A layer whose outputs are subtracted from its own inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.own, self.last = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        return self.last(h - self.own(h).relu())


def test_a_block_may_be_one_layer() -> None:
    model, x = noisy(Direct()), torch.randn(3, 5)
    assert Ranking(model, x, everything(model)).residual
    with pytest.warns(UserWarning, match=r"what cannot be removed, and every residual channel, which leaves 99\."):
        masks = ranked(model, x, everything(model), goal={"parameters": 0.5}, within_blocks=True)
    assert all(mask.all() for mask in masks.values())
    with pytest.warns(UserWarning, match="what cannot be removed, which leaves"):
        ranked(model, x, everything(model), goal={"parameters": 1e-9})


class Passed(nn.Module):
    """A layer's channels, to each of which its own depthwise convolution is added."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.own = nn.Conv2d(3, 6, 1), nn.Conv2d(6, 6, 3, padding=1, groups=6)
        self.last = nn.Conv2d(6, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.last(h + self.own(h)).mean((2, 3))


def test_a_depthwise_convolution_is_no_second_layer() -> None:
    model = noisy(Passed())
    assert not Ranking(model, torch.randn(2, 3, 5, 5), everything(model)).residual


class Blocks(nn.Module):
    """Two residual blocks, whose sum is written in some way."""

    def __init__(self, add: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.add = add
        self.stem, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.inner = nn.ModuleList(nn.Linear(8, n) for n in (10, 11))
        self.outer = nn.ModuleList(nn.Linear(n, 8) for n in (10, 11))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        for inner, outer in zip(self.inner, self.outer, strict=True):
            x = self.add(x, outer(inner(x).relu()))
        return self.last(x)


ADD: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "stack and sum": lambda x, y: torch.stack([x, y]).sum(0),
    "stack behind and mean": lambda x, y: torch.stack([x, y], -1).mean(-1),
    "stack and cumsum": lambda x, y: torch.stack([x, y]).cumsum(0)[-1],
    "side by side and sum": lambda x, y: torch.cat([x, y], 1).view(len(x), 2, -1).sum(1),
    "lerp": lambda x, y: torch.lerp(x, y, 0.5),
    "lerp by a gate": lambda x, y: torch.lerp(x, y, x.sigmoid()),
    "addcmul": lambda x, y: torch.addcmul(x, y, torch.tensor(0.5)),
    "addcdiv": lambda x, y: torch.addcdiv(x, y, torch.tensor(2.0)),
}


@pytest.mark.parametrize("how", ADD)
def test_a_sum_may_be_written_in_many_ways(how: str) -> None:
    model = noisy(Blocks(ADD[how]))
    ranking = Ranking(model, torch.randn(4, 6), everything(model))
    kept = ranking.at({"macs": 1e-9}, within_blocks=True).masks
    alive = {name: int(mask.any(1).sum()) for name, mask in kept.items()}
    assert alive == {"stem": 8, "inner.0": 1, "outer.0": 8, "inner.1": 1, "outer.1": 8, "last": 3}


@pytest.mark.parametrize("how", ["addmm", "baddbmm"])
def test_a_product_that_starts_from_a_tensor_is_a_sum(how: str) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.inner, self.outer, self.last = (nn.Linear(*size) for size in ((6, 8), (8, 10), (10, 8), (8, 3)))

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x).relu()
            inner, weight = self.inner(x).relu(), self.outer.weight.t()
            if how == "addmm":
                return self.last(torch.addmm(x, inner, weight))
            return self.last(torch.baddbmm(x[None], inner[None], weight[None])[0])

    model = convert(Block().eval(), exclude=["outer"])  # its weight is read outside of its forward pass
    assert Ranking(model, torch.randn(4, 6), everything(model)).residual


class Looked(nn.Module):
    """A block on embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.inner, self.outer, self.last = nn.Embedding(9, 8), nn.Linear(8, 10), nn.Linear(10, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.table(x)
        for _ in range(2):
            x = x + self.outer(self.inner(x).relu())
        return self.last(x.mean(1))


def test_embeddings_are_a_layer_of_their_own() -> None:
    model = noisy(Looked())
    assert Ranking(model, torch.randint(9, (3, 5)), everything(model)).residual


class Gated(nn.Module):
    """Channels to which what a gate leaves of them is added."""

    def __init__(self, add: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.add = add
        self.first, self.squeeze, self.excite = nn.Linear(6, 8), nn.Linear(8, 4), nn.Linear(4, 8)
        self.inner, self.last = nn.Linear(8, 9), nn.Linear(9, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        x = self.add(x, self.excite(self.squeeze(x).relu()).sigmoid())
        return self.last(self.inner(x).relu())


GATES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda x, gate: x + x * gate,
    "addcmul": lambda x, gate: torch.addcmul(x, x, gate),
    "addcdiv": lambda x, gate: torch.addcdiv(x, x, 1 + gate),
    "lerp": lambda x, gate: torch.lerp(x, 2 * x, gate),
    "lerp from nothing": lambda x, gate: torch.lerp(torch.zeros(8), x, gate),
}


@pytest.mark.parametrize("how", GATES)
def test_a_gate_is_no_second_layer_and_a_setting_that_changes_nothing_is_told(how: str) -> None:
    model, x = noisy(Gated(GATES[how])), torch.randn(3, 6)
    assert not Ranking(model, x, everything(model)).residual
    with pytest.warns(UserWarning, match="within_blocks changes nothing: the model has no residual channels that could go"):
        masks = ranked(model, x, everything(model), goal={"macs": 0.5}, within_blocks=True)
    wanted = ranked(model, x, everything(model), goal={"macs": 0.5})
    assert all(torch.equal(mask, wanted[name]) for name, mask in masks.items())
