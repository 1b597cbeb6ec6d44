"""The pruning report: units that only rounding kept, and converted layers that the example inputs never reach."""

from __future__ import annotations

import pytest
import torch
from masking import gap, masked, outputs, shake
from torch import Tensor, nn

from svdcompress.convert import convert
from svdcompress.layers import variational_layers
from svdcompress.prune import groups, prune


def all_alive(model: nn.Module) -> dict[str, Tensor]:
    return {name: torch.ones_like(layer.weight, dtype=torch.bool) for name, layer in variational_layers(model)}


@pytest.mark.parametrize("verify", [True, False])
def test_rounding_is_told_beside_what_it_would_have_been_without(verify: bool) -> None:
    model = convert(
        shake(nn.Sequential(nn.Linear(8, 16, bias=False), nn.ReLU(), nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 3)))
    )
    masks = all_alive(model)
    masks["2"][:, :11] = False  # 5 of 16 are read
    masks["2"][:3] = False  # 3 of 12 are constants, folded into the last layer
    x = torch.randn(4, 8)
    small, exact = (prune(model, x, masks=masks, round_to=n, verify=verify).pruning for n in (4, 1))
    told = [(group.name, group.kept, group.kept_unrounded) for group in small.groups]
    assert told == [("0", 8, 5), ("2", 12, 9), ("4", 3, 3)]
    assert [(group.kept, group.kept_unrounded) for group in exact.groups] == [(5, 5), (9, 9), (3, 3)]
    assert (small.round_to, exact.round_to) == (4, 1)
    assert small.parameters_after == 8 * 8 + 8 * 12 + 12 + 12 * 3 + 3
    assert small.parameters_unrounded == exact.parameters_after == exact.parameters_unrounded == 8 * 5 + 5 * 9 + 9 + 9 * 3 + 3
    assert small.to_dict()["parameters_unrounded"] == exact.parameters_after


class Branches(nn.Module):
    """A layer and a convolution that no input reaches, and one used only with `deep`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.spare, self.deconv = nn.Linear(8, 5), nn.ConvTranspose1d(4, 7, 3)
        self.extra = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor, deep: bool = False) -> Tensor:
        x = torch.relu(self.first(x))
        return self.last(self.extra(x) if deep else x)


def test_layers_that_never_ran_are_named_and_left_as_they_are() -> None:
    model = convert(shake(Branches()).eval())
    masks, x = all_alive(model), torch.randn(3, 6)
    masks["last"][:, :2] = False
    masks["spare"][:, 3] = False
    reason = "never ran on the example inputs: left as it is"
    small = prune(model, x, masks=masks)
    assert small.first.out_features == 6
    assert gap(outputs(small.eval(), x), outputs(masked(model, masks), x)) <= 1e-6
    for report in (small.pruning, groups(model, x)):
        idle = {g.name: g for g in report.groups if g.reason == reason}
        assert {name: (g.removed, g.kept, g.prunable) for name, g in idle.items()} == {
            "spare": (0, 5, False),
            "deconv": (0, 7, False),
            "extra": (0, 8, False),
        }
        assert {name: (g.unit_parameters, g.unit_macs) for name, g in idle.items()} == {
            "spare": (9, 0),
            "deconv": (13, 0),
            "extra": (8, 0),
        }
    for name in ("spare", "deconv", "extra"):
        before, after = getattr(model, name), getattr(small, name)
        assert torch.equal(before.weight, after.weight) and torch.equal(after.mask, masks[name])
    all_of_it = groups(model, {"x": x, "deep": torch.tensor(True)})
    assert {g.name for g in all_of_it.groups if g.reason == reason} == {"spare", "deconv"}
