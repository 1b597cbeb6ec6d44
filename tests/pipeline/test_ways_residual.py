"""Ways to a size that keep all residual channels: tried where there are some, and taken where their loss is lower."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from test_ways import Bytes, data_of, jittered, known, ways_of
from torch import Tensor, nn

from svdcompress import cost
from svdcompress.pipeline._choose_masks import chosen
from svdcompress.prune import prune

WITHIN = {"global-within-blocks", "half-even-within-blocks"}


class Residual(nn.Module):
    """A stem, one block, and a head."""

    def __init__(self, units: int) -> None:
        super().__init__()
        shapes = (6, 6), (6, units), (units, 6), (6, 3)
        self.stem, self.inner, self.outer, self.head = (nn.Linear(*shape) for shape in shapes)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        return self.head(h + self.outer(self.inner(h).relu()))


def block_for_nothing(pairs: int = 6) -> nn.Module:
    """All six residual channels are needed, with little information; the units of the block cancel in pairs, though each has
    more."""
    torch.manual_seed(2)
    model = Residual(2 * pairs)
    with torch.no_grad():
        model.stem.weight.copy_(2 * torch.eye(6))
        model.inner.weight.copy_(torch.randn(pairs, 6).repeat_interleave(2, 0))
        model.outer.weight.copy_(torch.randn(6, pairs).repeat_interleave(2, 1) * torch.tensor([1.0, -1]).repeat(pairs))
        model.inner.bias.fill_(0.5)
        model.head.weight.copy_(torch.tensor([[2.0, -2, 1, 0, 0, 1], [0, 2, -2, 1, 1, 0], [-1, 0, 0, 2, -2, 1]]))
    nats = {"stem": jittered((6, 6), 0.2), "inner": jittered((2 * pairs, 6), 1.0), "outer": jittered((6, 2 * pairs), 1.0)}
    more = (1 + 0.2 * torch.arange(pairs)).repeat_interleave(2)  # pairs go one by one
    nats["inner"], nats["outer"] = nats["inner"] * more[:, None], nats["outer"] * more
    return known(model, nats | {"head": jittered((3, 6), 0.2)})  # type: ignore


def nll(model: Any, masks: Any, x: Tensor, y: Tensor) -> float:
    """The NLL of the masked means, with numpy in double precision."""

    def linear(name: str, inputs: Any) -> Any:
        layer = getattr(model, name)
        weight = layer.weight.detach().double().numpy() * masks[name].numpy()
        return inputs @ weight.T + layer.bias.detach().double().numpy()

    h = linear("stem", x.double().numpy())
    z = linear("head", h + linear("outer", np.maximum(linear("inner", h), 0)))
    z = z - z.max(1, keepdims=True)
    return float(-(z - np.log(np.exp(z).sum(1, keepdims=True)))[np.arange(len(y)), y.numpy()].mean())


@pytest.mark.parametrize("measure", ["macs", "parameters"])
def test_residual_channels_stay_where_all_of_them_are_needed(measure: str) -> None:
    model = block_for_nothing()
    data, x, y = data_of(model, 6)
    to_size = ways_of(model, x, measure, 0.43 * getattr(cost.measure(model, x[:2]), measure))
    usual = to_size.usual()
    others = {way.name: way for way in to_size.others_than(usual)}
    assert set(others) == {"half-even", "mostly-even", "even"} | WITHIN
    by_hand = {name: nll(model, way.masks, x, y) for name, way in ({usual.name: usual} | others).items()}
    way, record = chosen(to_size, data, "auto", "cpu")
    assert way.name in WITHIN and record is not None and record["chosen"] == way.name
    assert by_hand[way.name] == pytest.approx(min(by_hand.values()), abs=1e-9)
    assert by_hand[way.name] < by_hand["global"] - 0.1
    assert way.masks["stem"].any(1).all() and not usual.masks["stem"].any(1).all()
    small = prune(model, x[:20], masks=way.masks)
    assert way.size == getattr(cost.measure(small, x[:2]), measure) <= to_size.target
    assert small.stem.out_features == 6 and small.inner.out_features < 12  # type: ignore
    again = ways_of(model, x, measure, to_size.target).again(json.loads(json.dumps(way.stored())))
    assert all(torch.equal(mask, again[name]) for name, mask in way.masks.items())


@pytest.mark.parametrize("enough", [True, False])
def test_a_size_that_the_blocks_alone_cannot_give_is_not_tried_within_them(enough: bool) -> None:
    model = block_for_nothing(pairs=5)
    _, x, _ = data_of(model, 6)
    least = 6 * 6 + 2 * 6 + 6 * 3  # with one unit in the block
    as_many = [(s, h) for s in range(1, 7) for h in range(1, 11) if 6 * s + 2 * s * h + 3 * s == least]
    assert as_many == [(6, 1)]  # no other numbers of channels and units give just that
    for target, tried in ((least + 24, True), (least, True), (least - 1, False)):
        to_size = ways_of(model, x, "macs", float(target), enough)
        usual = to_size.usual()
        others = [*to_size.others_than(usual)]
        names = {way.name for way in others}
        assert target != least or usual.size < least  # type: ignore  # coarse units: others may be as large as asked
        assert all(way.size <= target for way in others)  # type: ignore
        assert (names >= WITHIN) == tried == any("within" in name for name in names)
        assert any(name.endswith("-within-blocks-by-outputs") for name in names) == (tried and not enough)


class OfResidual(Bytes):
    """Files with four bytes per parameter, and `more` bytes per residual channel."""

    def of_small(self, small: Any, dense: Any) -> dict[str, float]:
        counts = cost.measure(small, self.inputs)
        return {"parameters": counts.parameters, "bytes": 4.0 * counts.parameters + self.more * small.stem.out_features}


def test_residual_channels_that_make_a_file_large_are_paid_for_in_the_blocks() -> None:
    model = block_for_nothing()
    _, x, _ = data_of(model, 6)
    to_size = ways_of(model, x, "bytes", 1.0)
    to_size.measure, to_size.target = OfResidual(10.0, 6), 4 * 144 + 10 * 6.0  # type: ignore
    usual = to_size.usual()
    (way,) = (one for one in to_size.others_than(usual) if one.name == "global-within-blocks")
    fitted = to_size.fitted(way, usual)
    assert fitted is not None and fitted.name == way.name and usual.size is not None
    small, other, first = (prune(model, x[:20], masks=one.masks) for one in (fitted, usual, way))
    widths = [(one.stem.out_features, one.inner.out_features) for one in (small, other, first)]  # type: ignore
    assert widths == [(6, 5), (4, 11), (6, 6)]
    size = lambda s, h: 4 * ((6 + 1) * s + (s + 1) * h + (h + 1) * s + (s + 1) * 3) + 10 * s  # noqa: E731
    assert size(4, 11) == usual.size <= to_size.target < size(4, 12)  # by hand: no room for another unit of the block,
    assert to_size.target < size(5, 11)  # nor for another residual channel
    assert fitted.size == 4 * cost.measure(small, x[:2]).parameters + 10 * 6 <= 1.02 * usual.size
    assert prune(model, x[:20], masks=to_size.again(fitted.stored())).stem.out_features == 6  # type: ignore
