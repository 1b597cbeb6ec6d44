"""Fits in bfloat16 of dense networks with wide kernels, which some CPUs get wrong: as in float32, whatever CPU this is."""

import pytest
import torch
from torch import nn

from svdcompress.likelihoods import make_loss
from svdcompress.recipe import Distillation, LossSection, Training
from svdcompress.sources import InMemory
from svdcompress.train import fit


def wide():
    """With torch 2.13, a CPU with AMX returns 64 times the first layer's result."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv1d(768, 128, 64), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(128, 2))


def narrow():
    torch.manual_seed(1)
    return nn.Sequential(nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(768, 2))


def losses(model, precision, **more):
    """The losses of two epochs, with steps too small to matter."""
    generator = torch.Generator().manual_seed(0)
    data = InMemory(torch.randn(8, 768, 127, generator=generator), torch.arange(8) % 2)
    settings = Training(epochs=2, batch_size=4, lr=1e-9, precision=precision)
    found = fit(model, data, make_loss(LossSection()), settings, device="cpu", **more)
    return [row["loss"] for row in found.history]


def test_a_dense_network_has_the_loss_that_it_has_in_float32():
    with torch.no_grad():
        model = wide()
        model[4].weight.mul_(30)  # so that a first layer's result 64 times too large shows
    assert losses(model, "bf16") == pytest.approx(losses(model, "no"), rel=0.01)


def test_a_teacher_answers_as_in_float32():
    def student():
        model = narrow()
        with torch.no_grad():
            model[2].weight.mul_(300)  # so confident that differences between the teacher's answers show
        return model

    more = {"teacher": wide(), "distill": Distillation(weight=1.0, temperature=1.0)}
    assert losses(student(), "bf16", **more) == pytest.approx(losses(student(), "no", **more), rel=0.01)
