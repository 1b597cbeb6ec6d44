"""Weights in matrix products in the forward: on either side, square or not, and with functions that write in place."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from svdcompress.convert import convert
from svdcompress.prune import prune


class Between(nn.Module):
    """A parameter between two layers: `x @ w` (9, width), or `(w @ x.T).T` (width, 9) with the weight on the left."""

    def __init__(self, width: int, left: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 9, bias=False), nn.Linear(width, 3)
        self.w = nn.Parameter(torch.randn(width, 9) if left else torch.randn(9, width))
        self.left = left

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.a(x))
        return self.b(torch.relu((self.w @ x.T).T if self.left else x @ self.w))


@pytest.mark.parametrize("left", [False, True], ids=["on the right", "on the left"])
@pytest.mark.parametrize("width", [9, 5], ids=["square", "oblong"])
def test_a_weight_multiplied_by_hand_loses_the_rows_of_dead_units(width, left):
    torch.manual_seed(width + left)
    dense = Between(width, left)
    model = convert(dense).eval()
    masks = {"a": torch.ones(9, 6, dtype=torch.bool), "b": torch.ones(3, width, dtype=torch.bool)}
    masks["a"][[1, 4, 5]] = False  # units of a
    masks["b"][:, 2] = False  # a unit of w that nothing reads
    small = prune(model, torch.randn(4, 6), masks=masks)
    assert sorted(small.w.shape) == sorted([6, width - 1]) and small.w.shape == ((width - 1, 6) if left else (6, width - 1))

    x = torch.randn(5, 6)  # the oracle: the same by hand, with zeros for what is masked
    with torch.no_grad():
        hidden = F.relu(F.linear(x, dense.a.weight * masks["a"]))
        hidden = torch.relu(hidden @ (dense.w.T if left else dense.w))
        expected = F.linear(hidden, dense.b.weight * masks["b"], dense.b.bias)
        assert torch.allclose(small(x), expected, atol=1e-5)


class InPlace(nn.Module):
    """An activation that overwrites its input or writes into its own buffer."""

    def __init__(self, buffer: bool) -> None:
        super().__init__()
        self.a, self.b, self.buffer = nn.Linear(6, 9), nn.Linear(9, 3), buffer

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        if self.buffer:
            with torch.no_grad():
                return self.b(torch.sigmoid(x, out=torch.zeros_like(x)))
        return self.b(torch.sigmoid_(x))


def test_units_go_through_functions_that_write_in_place():
    torch.manual_seed(0)
    for buffer, width in ((False, 6), (True, 9)):  # buffers that are written to are not followed: the units stay, masked
        model = convert(InPlace(buffer)).eval()
        with torch.no_grad():
            model.a.log_sigma2[:3] = 20.0
        x = torch.randn(5, 6)
        small = prune(model, x)
        assert small.b.in_features == width
        dead = (torch.arange(9) >= 3).float()[:, None]
        with torch.no_grad():
            expected = model.b(torch.sigmoid(F.linear(x, model.a.weight * dead, model.a.bias)))
            assert torch.allclose(small(x), expected, atol=1e-6)
