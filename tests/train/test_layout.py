"""The memory layout of convolutions during training."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from svdcompress import convert
from svdcompress.likelihoods import make_loss
from svdcompress.recipe import LossSection, Training
from svdcompress.sources import InMemory
from svdcompress.train import fit

LOSS = make_loss(LossSection())


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_convolutions_keep_their_layout_on_a_cpu(precision):
    """In channels last, kernels of torch 2.13 are wrong for some shapes, such as those below."""
    torch.manual_seed(0)
    model = convert(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2)))
    data, seen = InMemory(torch.randn(20, 3, 4, 4), torch.randint(0, 2, (20,))), []
    model[0].register_forward_hook(lambda layer, args, out: seen.extend([layer.weight, layer.log_sigma2, args[0], out]))
    fit(model, data, LOSS, Training(epochs=1, batch_size=16, precision=precision), device="cpu")
    assert seen and all(tensor.is_contiguous() for tensor in seen)
    assert all(parameter.is_contiguous() for parameter in model.parameters())


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv2d(52, 110, (64, 1)), (52, 95, 1)),
        (nn.Conv2d(131, 504, (64, 1)), (131, 71, 1)),
        (nn.Conv2d(157, 64, (64, 1)), (157, 191, 1)),
        (nn.Conv2d(52, 7, 2, dilation=2), (52, 32, 32)),
        (nn.Conv2d(110, 131, 2, dilation=2), (110, 32, 32)),
    ],
    ids=str,
)
def test_gradients_of_odd_convolutions_are_right(precision, layer, shape):
    """Pruned networks have such shapes. In channels last with AVX512, bfloat16 gradients were NaN or far off."""
    torch.manual_seed(0)
    x, y = torch.randn(2, *shape), torch.tensor([0, 0])  # with two classes, gradients would cancel to rounding errors
    before = nn.Conv2d(shape[0], shape[0], 1)  # makes gradients of the layer's inputs necessary
    units = copy.deepcopy(layer)(x).flatten(1).shape[1]
    model = nn.Sequential(before, copy.deepcopy(layer), nn.Flatten(), nn.Linear(units, 2))
    exact = copy.deepcopy(model).double()
    F.cross_entropy(exact(x.double()), y).backward()
    one_step = {"epochs": 1, "batch_size": 2, "optimizer": "sgd", "lr": 1.0, "schedule": {"name": "constant"}, "clip": None}
    begun = [p.detach().double() for p in model.parameters()]
    fit(model, InMemory(x, y), LOSS, Training(**one_step, precision=precision), device="cpu")
    for first, last, wanted in zip(begun, model.parameters(), exact.parameters(), strict=True):
        assert (first - last - wanted.grad).abs().max() < 0.05 * wanted.grad.abs().max()
