"""Weights that older hooks compute, in plans that know example inputs: read by the layer itself, not past it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import prune, spectral_norm, weight_norm

import svdcompress as svdc
from svdcompress.layers import VariationalLinear

pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
KINDS = [weight_norm, spectral_norm, lambda layer: prune.l1_unstructured(layer, "weight", 0.3)]


def made(wrap) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.ReLU(), wrap(nn.Linear(10, 8)), nn.ReLU(), nn.Linear(8, 3))


@pytest.mark.parametrize("wrap", KINDS)
def test_they_are_folded_with_inputs_as_without(wrap):
    x = torch.randn(4, 6)
    model = made(wrap).eval()
    hooks = dict(model[2]._forward_pre_hooks)
    plan = {entry.name: entry for entry in svdc.plan(model, derived="fold", example_inputs=x)}
    assert plan["2"].converted, plan["2"].reason
    assert dict(model[2]._forward_pre_hooks) == hooks  # looking changed nothing
    with torch.no_grad():
        wanted = model(x)
        found = svdc.convert(model, derived="fold", example_inputs=x).eval()
        assert torch.allclose(found(x), wanted, atol=1e-6)
    assert isinstance(found[2], VariationalLinear) and not found[2]._forward_pre_hooks


class Past(nn.Module):
    """A model that also reads the tensor that a layer's weight is computed from."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = weight_norm(nn.Linear(6, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + self.inner.weight_v.sum()


def test_reads_by_others_still_count():
    (entry,) = svdc.plan(Past(), derived="fold", example_inputs=torch.randn(4, 6))
    assert not entry.converted and "read directly" in entry.reason
