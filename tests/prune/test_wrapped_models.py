"""A model inside a wrapper for torch.compile, data-parallel training or averaged weights is treated as the model itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from svdcompress.batch import unwrapped
from svdcompress.checkpoint import load, save
from svdcompress.convert import convert
from svdcompress.prune import groups, prune
from svdcompress.reconstruction import reconstruct
from svdcompress.relevance import Masks, hold, relevance
from svdcompress.selection import coupled_relevance, ranked, whole_units
from svdcompress.selection._counted import count_nonzero

WRAPPERS: dict[str, Any] = {
    "averaged": AveragedModel,
    "parallel": nn.DataParallel,
    "compiled": lambda model: torch.compile(model, backend="eager"),
}


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))


def made(wrap: Any) -> tuple[nn.Module, Any]:
    """A wrapped model with three dead units in its first layer, and the model inside."""
    torch.manual_seed(0)
    wrapped = wrap(convert(net(), share="input").eval())
    plain: Any = unwrapped(wrapped)
    with torch.no_grad():
        plain[2].log_sigma2[:, ::2] = 9.0
    return wrapped, plain


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_the_one_within_is_pruned_saved_and_loaded(wrap, tmp_path, monkeypatch) -> None:
    wrapped, plain = made(wrap)
    monkeypatch.setattr(type(wrapped), "forward", lambda *_: pytest.fail("the wrapper ran"))  # dynamo would compile the tracer
    x = torch.randn(4, 8)
    small = prune(wrapped, x)
    assert type(small) is nn.Sequential and small[0].out_features == 3
    assert torch.allclose(small(x), plain(x), atol=1e-6)
    save(small, tmp_path / "small.safetensors")
    assert torch.equal(load(tmp_path / "small.safetensors", net()).eval()(x), small(x))
    told = groups(wrapped, x, masks=relevance(plain))
    assert [(group.name, group.removed) for group in told.groups] == [(g.name, g.removed) for g in small.pruning.groups]


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_masks_of_the_one_within_are_those_of_the_wrapped_one(wrap, tmp_path) -> None:
    wrapped, plain = made(wrap)
    x = torch.randn(4, 8)
    masks = relevance(plain)
    masks.save(tmp_path / "masks.safetensors")
    for found in (
        relevance(wrapped),
        coupled_relevance(wrapped, x),
        Masks.load(tmp_path / "masks.safetensors", wrapped),
        whole_units(wrapped, masks),
    ):
        assert list(found) == ["0", "2"] and torch.equal(found["2"], masks["2"])
    goal = {"macs": 0.5}
    assert torch.equal(ranked(wrapped, x, goal=goal)["0"], ranked(plain, x, goal=goal)["0"])
    assert count_nonzero(wrapped, x, masks) == count_nonzero(plain, x, masks)
    assert hold(wrapped, masks) is wrapped and torch.equal(plain[2].mask, masks["2"])
    assert prune(wrapped, x, masks=masks).pruning.parameters_after == prune(plain, x, masks=masks).pruning.parameters_after
    found = reconstruct(wrapped, x, masks)
    assert {*found.left, *(layer.name for layer in found.layers)} == {"0", "2"}
