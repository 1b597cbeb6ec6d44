"""Which residual branches can go as a whole, by architectures read by hand; in which order; and what is left without them."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from test_ranked import everything, noisy
from torch import Tensor, nn
from zoo_models import ZOO

import svdcompress as svdc
from svdcompress.errors import UsageError
from svdcompress.layers import variational_layers
from svdcompress.prune import prune
from svdcompress.selection import Ranking, _depth, ranked, whole_units

BRANCHES: dict[str, set[str]] = {
    "resnet-basic": {"3.conv2", "4.conv2", "5.conv2"},
    "resnet-bottleneck": {"3.conv3", "4.conv3"},  # and not the shortcut, which passes the stem on
    "resnext": {"3.conv3", "4.conv3"},
    "regnet-y": {"3.conv3", "4.conv3"},  # a squeeze and excitation reads the units of each, too
    "mobilenet-v2": {"3.layers.6", "5.layers.6"},
    "mobilenet-v3": {"3.layers.7"},
    "timm-vit": {f"blocks.{number}.{layer}" for number in range(2) for layer in ("attn.proj", "fc2")},
    "mixer": {"token2", "channel2"},
    "fft": {"down"},
}
"""The layers at the ends of the branches."""

NONE = ["mlp", "vgg-bn", "densenet", "unet", "lstm", "gated-mlp"]
"""Nothing is added to what other layers give."""


def ends(ranking: Ranking, measure: str = "macs") -> list[str]:
    """The layers at the ends of the branches, in the order in which they go."""
    depth: Any = ranking._depth
    return [depth.ends[branch] for branch in depth.order(measure)]


@pytest.mark.parametrize("name", BRANCHES)
def test_which_branches_can_go(name: str) -> None:
    torch.manual_seed(1)
    factory, inputs = ZOO[name]
    model, x = noisy(factory()), inputs()
    ranking = Ranking(model, x, everything(model), examples=[x])
    assert set(ends(ranking)) == BRANCHES[name] and len(ends(ranking)) == len(BRANCHES[name])
    left = ranking.branches("macs")
    assert all(more > fewer for more, fewer in zip([ranking.total["macs"], *left], left, strict=False))
    depth: Any = ranking._depth
    for count, size in enumerate(left, 1):
        assert depth.of_part("macs", size, 1.0) == depth.order("macs")[:count]
        masks = whole_units(model, ranking.at({"macs": size}, depth=1.0).masks)
        layers = dict(variational_layers(model))
        silent = {name for name in layers if not masks[name].any()}
        assert silent >= set(ends(ranking)[:count]) and not silent & set(ends(ranking)[count:])
        small = prune(model, x, masks=masks)  # checks that it computes what the masked model does
        assert svdc.cost.measure(small, x).macs <= size


@pytest.mark.parametrize("name", NONE)
def test_where_nothing_is_added_no_branch_can_go(name: str) -> None:
    factory, inputs = ZOO[name]
    model, x = noisy(factory()), inputs()
    ranking = Ranking(model, x, everything(model), examples=[x])
    assert ranking.branches("macs") == []
    either = [ranking.at({"parameters": 0.5}, depth=depth).masks for depth in (0.0, 1.0)]
    assert all(torch.equal(mask, either[1][one]) for one, mask in either[0].items())


class Two(nn.Module):
    """A stream to which nothing is added but two branches of their own: one has to stay."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 8)) for _ in range(2))
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x) + self.second(x))


def test_one_of_the_branches_stays_if_there_is_nothing_else() -> None:
    model, x = noisy(Two()), torch.randn(9, 5)
    assert ends(Ranking(model, x, everything(model), examples=[x])) == ["second.2"]


class Stem(nn.Module):
    """A stem of two layers, a residual layer that is no branch of two, and one that is."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.one = nn.Linear(6, 12), nn.Linear(12, 8), nn.Linear(8, 8)
        self.f1, self.f2, self.last = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.b(self.a(x).relu())
        x = x + self.one(x).relu()
        return self.last(x + self.f2(self.f1(x).relu()))


class Placed(nn.Module):
    """Positions that layers of their own make from constants, added to what comes from the input."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("grid", torch.randn(5, 4))
        self.place, self.stem = (nn.Sequential(nn.Linear(n, 10), nn.ReLU(), nn.Linear(10, 8)) for n in (4, 6))
        self.f1, self.f2, self.last = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.place(self.grid) + self.stem(x)
        return self.last(x + self.f2(self.f1(x).relu()))


class Embedded(nn.Module):
    """Embeddings, and blocks on them."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(9, 8), nn.Linear(8, 3)
        self.inner, self.outer = (nn.ModuleList(nn.Linear(*size) for _ in range(2)) for size in ((8, 10), (10, 8)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.table(x)
        for inner, outer in zip(self.inner, self.outer, strict=True):
            x = x + outer(inner(x).relu())
        return self.last(x.mean(1))


@pytest.mark.parametrize(
    ("make", "x", "wanted"),
    [
        (Stem, torch.randn(9, 6), {"f2"}),
        (Placed, torch.randn(9, 5, 6), {"f2"}),
        (Embedded, torch.randint(9, (9, 4)), {"outer.0", "outer.1"}),
    ],
)
def test_the_input_always_gets_through(make: Any, x: Tensor, wanted: set[str]) -> None:
    torch.manual_seed(0)
    model = svdc.convert(make(), log_sigma2=-12.0).eval()
    ranking = Ranking(model, x, everything(model), examples=[x])
    assert set(ends(ranking)) == wanted
    small = prune(model, x, masks=whole_units(model, ranking.at({"macs": 1e-9}, depth=1.0).masks))
    with torch.no_grad():
        assert small(x).flatten(1).std(0).max() > 1e-3


def test_outputs_may_have_one_dimension_or_several_lengths() -> None:
    class Flat(Blocks):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)[..., 0]

    torch.manual_seed(0)
    for examples in ([torch.randn(5, 6)], [torch.randn(4, 3, 6), torch.randn(4, 7, 6)]):
        model = svdc.convert(Flat(), log_sigma2=-12.0).eval()
        assert len(Ranking(model, examples[0], everything(model), examples=examples).branches("macs")) == 4


@pytest.mark.parametrize("depth", [-0.1, 1.5, float("nan")])
def test_depth_is_a_part(depth: float) -> None:
    model = svdc.convert(Blocks(), log_sigma2=-12.0).eval()
    with pytest.raises(UsageError, match="is not a part of the way, from 0 to 1"):
        Ranking(model, torch.randn(3, 6), everything(model)).at({"macs": 0.5}, depth=depth)


def test_depth_takes_examples_and_branches() -> None:
    factory, inputs = ZOO["resnet-basic"]
    model, x = noisy(factory()), inputs()
    with pytest.raises(UsageError, match="depth: without examples it is not known"):
        ranked(model, x, everything(model), goal={"macs": 0.5}, depth=1.0)
    masks = ranked(model, x, everything(model), goal={"macs": 0.5}, depth=1.0, examples=[x])
    silent = {name for name, mask in masks.items() if not mask.any()}
    assert silent & BRANCHES["resnet-basic"]
    factory, inputs = ZOO["vgg-bn"]
    model, x = noisy(factory()), inputs()
    with pytest.warns(UserWarning, match="depth changes nothing: the model has no residual branches"):
        ranked(model, x, everything(model), goal={"macs": 0.5}, depth=1.0, examples=[x])


def test_without_examples_only_all_branches_are_known() -> None:
    factory, inputs = ZOO["resnet-basic"]
    model, x = noisy(factory()), inputs()
    plain, informed = (Ranking(model, x, everything(model), examples=examples) for examples in (None, [x]))
    assert plain.branches("macs") == informed.branches("macs")[-1:]
    least = [ranking.at({"macs": 1e-9}, depth=1.0) for ranking in (plain, informed)]
    for found in least:
        assert found.macs == plain.at({"macs": 1e-9}).macs  # with one unit in each layer, it is the same
        assert not any(found.masks[name].any() for name in BRANCHES["resnet-basic"])


class Blocks(nn.Module):
    """Four residual blocks of different widths."""

    WIDTHS = (4, 20, 9, 12)

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.inner = nn.ModuleList(nn.Linear(8, n) for n in self.WIDTHS)
        self.outer = nn.ModuleList(nn.Linear(n, 8) for n in self.WIDTHS)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for inner, outer in zip(self.inner, self.outer, strict=True):
            x = torch.tanh(x + outer(inner(x).relu()))
        return self.last(x)


def by_hand(model: Any, x: Tensor) -> list[int]:
    """The blocks in the order in which they should go: greedy, by the change of the outputs per MAC saved, which is
    known from earlier steps and computed again for the one that seems best."""
    weights = {name: value.detach().double().numpy() for name, value in model.named_parameters()}

    def run(fixed: dict[int, np.ndarray]) -> tuple[np.ndarray, list[np.ndarray]]:
        h, adds = x.double().numpy() @ weights["stem.weight"].T + weights["stem.bias"], []
        for number in range(4):
            inner = np.maximum(h @ weights[f"inner.{number}.weight"].T + weights[f"inner.{number}.bias"], 0)
            adds.append(inner @ weights[f"outer.{number}.weight"].T + weights[f"outer.{number}.bias"])
            h = np.tanh(h + (fixed[number] if number in fixed else adds[-1]))
        return h @ weights["last.weight"].T + weights["last.bias"], adds

    wanted, adds = run({})
    means = [add.mean(0) for add in adds]
    spread = ((wanted - wanted.mean(0)) ** 2).sum()
    saved = [16 * (width - 1) for width in Blocks.WIDTHS]  # one unit of each layer stays
    order: list[int] = []

    def change(gone: list[int]) -> float:
        return ((run({k: means[k] for k in gone})[0] - wanted) ** 2).sum() / spread

    known = {number: (change([number]) / saved[number], 0) for number in range(4)}
    while known:
        best = min(known, key=lambda number: known[number][0])
        if known[best][1] == len(order):
            order.append(best)
            del known[best]
        else:
            known[best] = (change([*order, best]) - change(order)) / saved[best], len(order)
    return order


@pytest.mark.parametrize("seed", range(4))
def test_the_order_is_that_of_a_greedy_search_by_hand(seed: int) -> None:
    torch.manual_seed(seed)
    dense = Blocks()
    with torch.no_grad():
        for number, layer in enumerate(dense.outer):
            layer.weight.mul_(0.3 + 0.4 * ((number + seed) % 4))
    model, x = svdc.convert(dense, log_sigma2=-12.0).eval(), torch.randn(60, 6)
    ranking = Ranking(model, x[:3], everything(model), examples=list(x.split(5)))
    assert ends(ranking) == [f"outer.{number}" for number in by_hand(dense, x)]


class InPlace(Blocks):
    """The same blocks, written as many are: the sum goes into the branch's own output."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for inner, outer in zip(self.inner, self.outer, strict=True):
            out = outer(inner(x).relu_())
            out += x
            x = out.tanh_()
        return self.last(x)


def test_branches_that_the_model_writes_into_go_in_the_same_order() -> None:
    torch.manual_seed(0)
    dense = Blocks()
    with torch.no_grad():
        for number, layer in enumerate(dense.outer):
            layer.weight.mul_(0.3 + 0.4 * (number % 4))
    other = InPlace()
    other.load_state_dict(dense.state_dict())
    x = torch.randn(60, 6)
    found = []
    for net in (dense, other):
        model = svdc.convert(net, log_sigma2=-12.0).eval()
        ranking = Ranking(model, x[:3], everything(model), examples=list(x.split(5)))
        found.append((ends(ranking), ranking.at({"macs": 0.5}, depth=1.0).masks))
    assert found[0][0] == found[1][0] and len(found[0][0]) == 4
    assert all(torch.equal(mask, found[1][1][name]) for name, mask in found[0][1].items())


def test_a_large_model_is_tried_on_fewer_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = svdc.convert(Blocks(), log_sigma2=-12.0).eval(), torch.randn(500, 6)
    seen: list[int] = []
    model.stem.register_forward_hook(lambda *given: seen.append(len(given[2])))
    for most, batches in ((10**12, _depth.BATCHES), (1, _depth.FEWEST), (5 * 3 * 4 * 792 * 20, 20)):
        monkeypatch.setattr(_depth, "MOST", most)
        ranking = Ranking(model, x[:3], everything(model), examples=list(x.split(5)))
        seen.clear()
        ranking.branches("macs")
        rounds, rest = divmod(sum(seen), 5 * batches)
        assert rest == 0 and rounds >= 2 + 4 and set(seen) <= {20, 40}  # means, outputs, and each branch at least once


def test_batches_run_together_if_they_are_alike() -> None:
    plain = [torch.full((2, 3), float(number)) for number in range(5)]
    first, rest = _depth.together(plain, 4)
    assert torch.equal(first, torch.cat(plain[:4])) and torch.equal(rest, plain[4])
    named = [{"x": one, "bias": torch.ones(7), "mode": "a"} for one in plain]
    (joined,) = _depth.together(named, 5)
    assert torch.equal(joined["x"], torch.cat(plain)) and joined["bias"].shape == (7,) and joined["mode"] == "a"
    other_length = [(torch.zeros(2, 3),), (torch.zeros(2, 4),)]
    assert _depth.together(other_length, 2) == other_length
    named[1]["mode"] = "b"
    assert _depth.together(named, 5) == named


def test_part_of_the_way_is_made_by_branches_and_the_rest_by_units() -> None:
    torch.manual_seed(0)
    model, x = svdc.convert(Blocks(), log_sigma2=-12.0).eval(), torch.randn(60, 6)
    before = copy.deepcopy(model.state_dict())
    ranking = Ranking(model, x[:3], everything(model), examples=list(x.split(5)))
    total, left = ranking.total["macs"], ranking.branches("macs")
    for goal in (0.7, 0.5, 0.3):
        found = ranking.at({"macs": goal}, depth=0.5)
        silent = [number for number in range(4) if not found.masks[f"outer.{number}"].any()]
        count = next(count for count, size in enumerate(left, 1) if size <= total * goal**0.5)
        assert {f"outer.{number}" for number in silent} == set(ends(ranking)[:count])
        assert found.reached and found.macs <= goal * total
        assert found.macs > goal * total - 16 * 2 or found.macs == left[count - 1]  # no more units than needed
        assert svdc.cost.measure(prune(model, x[:3], masks=whole_units(model, found.masks)), x[:3]).macs == found.macs
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items()) and not model.training
