"""In-place changes of a layer's output in training work as with the dense layer."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import svdcompress as svdc

CASES = {
    "linear, one row": (lambda: nn.Linear(3, 4), (3,)),
    "linear, rows": (lambda: nn.Linear(3, 4), (5, 3)),
    "linear, 4 dimensions": (lambda: nn.Linear(3, 4), (2, 5, 6, 3)),
    "linear without bias, 4 dimensions": (lambda: nn.Linear(3, 4, bias=False), (1, 5, 6, 3)),
    "convolution": (lambda: nn.Conv2d(3, 4, 3), (2, 3, 5, 5)),
    "convolution, without batch": (lambda: nn.Conv2d(3, 4, 3), (3, 5, 5)),
}


def zeroed(y):
    y[..., :1] = 0
    return y


@pytest.mark.parametrize("change", [F.relu_, zeroed, lambda y: y.add_(1.0).mul_(2.0)], ids=["relu", "slice", "arithmetic"])
@pytest.mark.parametrize("case", CASES)
def test_changes_in_place_are_those_of_the_dense_layer(case, change):
    """With almost no noise, values and gradients are those of the dense layer."""
    make, shape = CASES[case]
    torch.manual_seed(0)
    dense = make().double()
    x = torch.randn(shape, dtype=torch.float64)
    ours = svdc.convert(nn.Sequential(make().double()), log_sigma2=-60.0).train()
    ours[0].load_state_dict(dense.state_dict(), strict=False)

    expected, found = change(dense(x)), change(ours(x))
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    expected.square().sum().backward()
    found.square().sum().backward()
    torch.testing.assert_close(ours[0].weight.grad, dense.weight.grad, atol=1e-5, rtol=1e-5)
