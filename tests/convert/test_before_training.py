"""What conversion says of a model that could not be trained as it is: weights in half precision."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

import svdcompress as svdc


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_log_variances_in_half_precision_are_told_of_once(dtype):
    name = str(dtype).removeprefix("torch.")
    with pytest.warns(UserWarning, match=rf"cannot be trained in {name}, .*\(0, 2\).*model\.float\(\)") as found:
        svdc.convert(net().to(dtype))
    assert len(found) == 1 and found[0].filename == __file__
    mixed = net()
    mixed[2].to(dtype)
    with pytest.warns(UserWarning, match=r"\(2\)"):
        svdc.convert(copy.deepcopy(mixed))
    frozen = net().to(dtype).requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        svdc.convert(mixed, exclude=["2"])
        svdc.convert(frozen)
        svdc.convert(net().to(dtype).float())
        svdc.convert(net().double())


def test_log_variances_train_under_autocast():
    """The cure that the warning names."""
    model = svdc.convert(net().bfloat16().float())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    elbo = svdc.ELBO(model, nn.CrossEntropyLoss(), num_examples=8)
    with torch.autocast("cpu", torch.bfloat16):
        loss = elbo(model(torch.randn(8, 6)), torch.arange(8) % 3)
    loss.backward()
    optimizer.step()
    assert all((layer.log_sigma2 != -10).all() for _, layer in svdc.layers.variational_layers(model))
