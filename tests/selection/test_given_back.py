"""Units that come back after a cut, because its size has room for them: against trying all that went, one by one."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_branches import Blocks, ends
from test_ranked import Grouped, everything, noisy, told_by_hand, units_of
from torch import Tensor, nn

from svdcompress import cost
from svdcompress.convert import convert
from svdcompress.prune import prune
from svdcompress.selection import Ranking


def chain(*widths: int) -> nn.Sequential:
    layers = [nn.Linear(*shape) for shape in itertools.pairwise(widths)]
    return nn.Sequential(*[one for layer in layers for one in (layer, nn.Tanh())][:-1])


def size_of(measure: str, widths: list[int]) -> int:
    """The size of a chain of Linear layers."""
    return sum(n * m + (n if measure == "parameters" else 0) for m, n in itertools.pairwise(widths))


@pytest.mark.parametrize("share", [0.22, 0.3, 0.37, 0.45, 0.55, 0.63, 0.7])
@pytest.mark.parametrize("measure", ["parameters", "macs"])
def test_no_unit_goes_that_there_was_room_for(measure: str, share: float) -> None:
    """The last unit of a layer with dear ones took more than was left to take, and cheaper ones stayed away for nothing: a
    ResNet-20 cut to 4x had up to 2% fewer multiply-accumulates than requested."""
    torch.manual_seed(3)
    model = noisy(chain(9, 6, 12, 40, 3))
    found = Ranking(model, torch.randn(2, 9), everything(model)).at({measure: share})
    widths = [9, *(int(found.masks[name].any(1).sum()) for name in ("0", "2", "4")), 3]
    limit = share * size_of(measure, [9, 6, 12, 40, 3])
    assert size_of(measure, widths) == getattr(found, measure) <= limit and widths != [9, 6, 12, 40, 3]
    for layer, full in ((1, 6), (2, 12), (3, 40)):
        more = [width + (number == layer) for number, width in enumerate(widths)]
        assert widths[layer] == full or size_of(measure, more) > limit
        kept = found.masks[str(2 * layer - 2)].any(1)
        worth = torch.tensor([told_by_hand(model, everything(model), str(2 * layer - 2), unit) for unit in range(full)])
        assert widths[layer] == full or worth[kept].min() >= worth[~kept].max()


def order_by_hand(model: nn.Sequential, measure: str, evenness: float) -> list[tuple[str, int]]:
    """All units but one of each layer, in the order in which they go: every one is tried at every step."""
    units, names = units_of(model), [name for name, _ in model.named_children() if name.isdigit() and int(name) % 2 == 0]
    whole = [model[0].in_features, *(model.get_submodule(name).out_features for name in names)]
    told = {unit: told_by_hand(model, everything(model), *unit) for unit in units}

    def saved(name: str, widths: list[int]) -> int:
        fewer = [width - (number == names.index(name) + 1) for number, width in enumerate(widths)]
        return size_of(measure, widths) - size_of(measure, fewer)

    mean = {}
    for name in names[:-1]:
        own = [told[unit] / saved(name, whole) for unit in units if unit[0] == name]
        mean[name] = sum(own) / len(own)
    order: list[tuple[str, int]] = []
    widths = list(whole)
    while any(width > 1 for width in widths[1:-1]):
        keys = []
        for name, unit in units:
            place = names.index(name) + 1
            if (name, unit) not in order and widths[place] > 1:
                factor = whole[place] / widths[place] / mean[name] ** evenness
                keys.append((told[name, unit] / saved(name, widths) * factor, name, unit))
        _, name, unit = min(keys)
        order.append((name, unit))
        widths[names.index(name) + 1] -= 1
    return order


@pytest.mark.parametrize("evenness", [0.0, 0.5])
@pytest.mark.parametrize("measure", ["parameters", "macs"])
@pytest.mark.parametrize("seed", range(3))
def test_units_come_back_as_if_each_that_went_had_been_tried_last_ones_first(seed: int, measure: str, evenness: float) -> None:
    whole = [5, 4, 9, 6, 3]
    model = noisy(chain(*whole), seed)
    ranking, order = Ranking(model, torch.randn(2, 5), everything(model)), order_by_hand(model, measure, evenness)
    names = ["0", "2", "4"]

    def widths(gone: list[tuple[str, int]]) -> list[int]:
        return [5, *(full - sum(name == one for one, _ in gone) for name, full in zip(names, whole[1:], strict=False)), 3]

    sizes, cut = [], 0
    for limit in range(size_of(measure, [5, 1, 1, 1, 3]), size_of(measure, whole) + 1):
        gone = next(order[:count] for count in range(len(order) + 1) if size_of(measure, widths(order[:count])) <= limit)
        least = len(gone)
        for unit in reversed(gone):
            if size_of(measure, widths([one for one in gone if one != unit])) <= limit:
                gone = [one for one in gone if one != unit]
        found = ranking.at({measure: limit}, evenness=evenness)
        assert found.reached and found.units == len(gone)
        for name, full in zip(names, whole[1:], strict=False):
            assert found.masks[name].any(1).tolist() == [(name, unit) not in gone for unit in range(full)]
        sizes.append(getattr(found, measure))
        cut += len(gone) < least
    assert sizes == sorted(sizes) and cut > 20  # more room never leaves less; many cuts gave something back


# Units that go together


class Block(nn.Module):
    """A residual block between a stem and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.inner, self.outer, self.head = (nn.Linear(*shape) for shape in ((7, 6), (6, 14), (14, 6), (6, 3)))

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        return self.head(h + self.outer(self.inner(h).relu()))


Size = Callable[[int, int], int]


def of_block(s: int, h: int) -> int:
    return 7 * s + 2 * s * h + 3 * s


def of_grouped(s: int, h: int) -> int:
    return 25 * 3 * s + 9 * 9 * (s // 2) * h + 4 * h  # 5 x 5 inputs; each output of the 3 x 3 sees one of two groups


def of_chain(s: int, h: int) -> int:
    return 6 * s + s * h + 3 * h


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], Size, tuple[str, str], int, dict[str, Any], dict[str, Any]]]
CASES = {
    "residual": (Block, (2, 7), of_block, ("stem", "inner"), 1, {}, {}),
    "residual, even": (Block, (2, 7), of_block, ("stem", "inner"), 1, {}, {"evenness": 1.0}),
    "within blocks": (Block, (2, 7), of_block, ("stem", "inner"), 1, {}, {"within_blocks": True}),
    "groups": (Grouped, (2, 3, 5, 5), of_grouped, ("stem", "pairs"), 2, {}, {}),
    "multiples": (lambda: chain(6, 16, 12, 3), (2, 6), of_chain, ("0", "2"), 4, {"round_to": 4}, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_no_units_that_go_together_go_that_there_was_room_for(name: str) -> None:
    """As many as have to go together are put back into each of both widths; sizes by hand, and by pruning."""
    make, shape, size, layers, together, settings, how = CASES[name]
    model, x = noisy(make()), torch.randn(shape)
    ranking = Ranking(model, x, everything(model), **settings)
    whole = tuple(len(model.get_submodule(layer).weight) for layer in layers)
    assert ranking.total["macs"] == size(*whole) == cost.macs(model, x)
    fixed = whole[0] if how.get("within_blocks") else together
    least, seen = size(fixed, together), set()
    for limit in (*range(least, size(*whole), (size(*whole) - least) // 23), size(*whole) - 1):
        found = ranking.at({"macs": limit}, **how)
        s, h = (int(found.masks[layer].flatten(1).any(1).sum()) for layer in layers)
        small = prune(model, x, masks=found.masks, **settings)
        assert found.reached and size(s, h) == found.macs == cost.macs(small, x) <= limit
        assert tuple(len(small.get_submodule(layer).weight) for layer in layers) == (s, h) and s >= fixed
        assert s == whole[0] or size(s + together, h) > limit
        assert h == whole[1] or size(s, h + together) > limit
        seen.add((s, h))
    assert len(seen) > 4
    beyond = ranking.at({"macs": least - 1}, **how)
    assert not beyond.reached and beyond.macs == least  # what cannot be met gives nothing back


def test_a_branch_that_went_as_a_whole_stays_away() -> None:
    """The first branch to go would have room again after the second, but without it the outputs change least."""
    torch.manual_seed(0)
    model, x = convert(Blocks(), log_sigma2=-12.0).eval(), torch.randn(60, 6)
    with torch.no_grad():
        model.outer[0].weight.mul_(1e-3)
    ranking = Ranking(model, x[:3], everything(model), examples=list(x.split(5)))
    first, second, *others = ends(ranking)
    assert first == "outer.0"
    saved = {f"outer.{number}": 16 * (width - 1) for number, width in enumerate(Blocks.WIDTHS)}  # one unit stays
    found = ranking.at({"macs": ranking.total["macs"] - saved[second]}, depth=1.0)
    assert found.macs == ranking.total["macs"] - saved[first] - saved[second] and found.reached
    assert not any(found.masks[name].any() for name in (first, second))
    assert all(found.masks[name].all() for name in others)
