"""Normalization statistics of a model that is cut, against numpy; and that they show which of two cuts is better."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from svdcompress.convert import convert
from svdcompress.layers import variational_layers
from svdcompress.pipeline._adapted import BATCH, adapted, normalisations
from svdcompress.pipeline._choose_masks import option
from svdcompress.pipeline._way import Way
from svdcompress.relevance import as_masks, hold
from svdcompress.sources import InMemory


def net() -> nn.Sequential:
    """Two layers with a normalization between them whose statistics are from other data, and dropout, which must stay off."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 3))
    with torch.no_grad():
        model[1].running_mean.normal_()
        model[1].running_var.uniform_(0.5, 3.0)
        model[1].weight.uniform_(0.5, 2.0)
        model[1].bias.normal_()
        model[1].num_batches_tracked.fill_(7)
    return convert(model).eval()


def by_hand(model: Any, masks: dict[str, torch.Tensor], fresh: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Outputs for x with the masked means, normalized by the averages over batches of `fresh` of their means and variances."""

    def first(rows: np.ndarray) -> np.ndarray:
        weight = model[0].weight.detach().double().numpy() * masks["0"].numpy()
        return rows @ weight.T + model[0].bias.detach().double().numpy()

    fresh = fresh[torch.randperm(len(fresh), generator=torch.Generator().manual_seed(0)).numpy()]
    batches = [first(fresh[i : i + BATCH]) for i in range(0, len(fresh) - 1, BATCH)]  # a batch of one has no variance
    mean = np.mean([batch.mean(0) for batch in batches], 0)
    variance = np.mean([batch.var(0, ddof=1) for batch in batches], 0)
    gamma, beta = (model[1].state_dict()[name].double().numpy() for name in ("weight", "bias"))
    h = np.maximum((first(x) - mean) / np.sqrt(variance + 1e-5) * gamma + beta, 0)
    return h @ (model[4].weight.detach().double().numpy() * masks["4"].numpy()).T + model[4].bias.detach().double().numpy()


def cut(model: nn.Module) -> dict[str, torch.Tensor]:
    """Masks that remove units 1 and 4 on both sides, and a few single weights."""
    masks = {name: torch.ones_like(layer.weight, dtype=torch.bool) for name, layer in variational_layers(model)}
    masks["0"][[1, 4]] = False
    masks["0"][0, 2] = False
    masks["4"][:, [1, 4]] = False
    return masks


@pytest.mark.parametrize("count", [100, 3 * BATCH, 2 * BATCH + 1])
def test_statistics_are_those_of_what_is_left_and_are_put_back(count: int) -> None:
    torch.manual_seed(1)
    model, fresh, x = net(), torch.randn(count, 4) * 2 + 1, torch.randn(50, 4)
    masks, before = cut(model), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    examples = InMemory(fresh, torch.zeros(count, dtype=torch.long))
    hold(model, as_masks(model, masks))
    with torch.no_grad():
        former = model(x)
        with adapted(model, examples, "cpu"):
            assert not any(module.training for module in model.modules())
            found = model(x)
        assert torch.equal(model(x), former)  # unchanged
    hold(model, None)
    wanted = by_hand(model, masks, fresh.double().numpy(), x.double().numpy())
    assert np.allclose(found.double().numpy(), wanted, atol=1e-5)
    assert not torch.allclose(found, former, atol=0.1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model[1].momentum == 0.1 and not model[1].training


def test_data_that_lie_class_by_class_are_mixed() -> None:
    """In batches of one class each, the variance would be that within a class: here a hundredth of the whole."""
    torch.manual_seed(1)
    model, classes = net(), torch.arange(8).repeat_interleave(BATCH)
    x = 3.0 * classes[:, None] + torch.randn(len(classes), 4)
    with torch.no_grad():
        whole = model[0](x)
        with adapted(model, InMemory(x, classes), "cpu"):
            found = model[1].running_var.clone()
    assert torch.allclose(found, whole.var(0), rtol=0.05)


def test_an_option_loses_what_it_loses_with_statistics_of_its_own() -> None:
    torch.manual_seed(2)
    model, x = net(), torch.randn(300, 4)
    masks, y = cut(model), torch.randint(0, 3, (300,))
    data: Any = SimpleNamespace(train=InMemory(x, y), task="classification", dim=1, target_scale=None)
    way = Way("even", as_masks(model, masks), 9.0, None, 9.0)
    found = option(model, way, data.train, data, "cpu")
    logits = by_hand(model, masks, x.double().numpy(), x.double().numpy())
    logits -= logits.max(1, keepdims=True)
    rows = (np.log(np.exp(logits).sum(1)) - logits[np.arange(300), y.numpy()]).astype(float)
    assert found.nll == pytest.approx(rows.mean(), rel=1e-5) and np.allclose(found.rows.numpy(), rows, atol=1e-4)
    assert all(layer.mask is None for _, layer in variational_layers(model))


def test_statistics_are_put_back_after_an_error() -> None:
    model = net()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(RuntimeError), adapted(model, InMemory(torch.randn(9, 4), torch.zeros(9)), "cpu"):
        raise RuntimeError
    with pytest.raises(RuntimeError), adapted(model, InMemory(torch.randn(9, 5), torch.zeros(9)), "cpu"):
        pass  # inputs of the wrong shape
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not model[1].training and model[1].momentum == 0.1


def test_one_example_has_no_variance() -> None:
    model = net()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with adapted(model, InMemory(torch.randn(1, 4), torch.zeros(1)), "cpu"):
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_models_without_such_statistics_are_left_alone() -> None:
    examples: Any = range(9)  # has no batches
    for layer in (nn.LayerNorm(4), nn.GroupNorm(2, 4), nn.BatchNorm1d(4, track_running_stats=False)):
        model = nn.Sequential(nn.Linear(4, 4), layer).eval()
        assert normalisations(model) == []
        with adapted(model, examples, "cpu"):
            pass
