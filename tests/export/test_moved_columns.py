"""Example inputs: their names and how they are varied; each column of a table stays near its own values."""

from __future__ import annotations

import pytest
import torch

from svdcompress.export._inputs import Signature
from svdcompress.likelihoods import likelihood_for
from svdcompress.pipeline._baked import Baked

SIZES = torch.tensor([1e-6, 1.0, 1e5])


@pytest.mark.parametrize("rows", [1, 2, 200])
def test_columns_move_in_their_own_units(rows):
    x = (3 + torch.randn(rows, 3, generator=torch.Generator().manual_seed(0))) * SIZES
    seen = []

    def answer(tensors):
        seen.append(tensors[0])
        return {"output": tensors[0]}

    Signature(torch.nn.Identity(), x).tried(rows, answer)
    moved = (seen[0] - x) / SIZES
    assert float(moved.abs().min(0).values.max()) > 0 and float(moved.abs().max()) < 15
    assert bool((moved.abs().max(0).values > 0).all())


def test_columns_of_zeros_move_as_most_others_do_and_all_zeros_do_move():
    x = torch.zeros(2, 5)
    x[:, :3] = torch.tensor([[2.0, 0, 0], [4.0, 1, 3]])
    seen = []
    Signature(torch.nn.Identity(), x).tried(2, lambda tensors: seen.append(tensors[0]) or {"output": tensors[0]})
    assert 0 < float((seen[0] - x)[:, 3:].abs().max()) < 4
    Signature(torch.nn.Identity(), 0 * x).tried(2, lambda tensors: seen.append(tensors[0]) or {"output": tensors[0]})
    assert float(seen[1].abs().max()) > 0.1


class Around(torch.nn.Module):
    """A model with a part called `inner`, as is common, which takes other arguments."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Bilinear(3, 3, 2)

    def forward(self, left, right):
        return self.inner(left, right)


def test_inputs_have_the_names_of_the_models_own_arguments():
    inputs = (torch.randn(2, 3), torch.randn(2, 3))
    assert Signature(Around(), inputs).names == ["left", "right"]
    scaled = Baked(target=(5.0, 2.0), likelihood=likelihood_for("regression")).model(Around())
    assert Signature(scaled, inputs).names == ["left", "right"]
    assert torch.allclose(scaled(*inputs), 5 + 2 * scaled.model(*inputs))
