"""How many examples fit into a pass: by the widest output of any module, and by the inputs where no module can be seen."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

import svdcompress as svdc
from svdcompress import batch
from svdcompress.batch import UNSEEN, UNSEEN_IDS, WIDEST, at_once
from svdcompress.errors import Interrupted


class Wide(nn.Module):
    """Widens an example of 4 numbers to `width` inside; `sizes` are the batches it was called with."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.wide, self.narrow, self.sizes = nn.Linear(4, width), nn.Linear(width, 2), []

    def forward(self, x):
        self.sizes.append(len(x))
        return self.narrow(self.wide(x).relu())


@pytest.mark.parametrize("most", [1, 7, 1000])
def test_the_widest_activation_decides(monkeypatch, most):
    monkeypatch.setattr(batch, "WIDEST", 640)
    assert at_once(Wide(), torch.randn(3, 4), most) == min(most, 10)
    assert at_once(Wide(641), torch.randn(3, 4), most) == 1  # one example in any case
    assert at_once(Wide(2), torch.randn(3, 4), 1000) == 160  # the input itself is wider
    assert at_once(Wide(4), torch.randn(3, 4), 1000, draws=32) == 10  # 2 outputs, 32 times


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32)])
def test_small_networks_keep_their_batches(shape):
    small = nn.Sequential(nn.Conv2d(shape[0], 64, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10))
    small(torch.zeros(1, *shape))
    assert at_once(small, torch.randn(2, *shape), 1000) == 1000
    assert at_once(small, torch.randn(2, *shape), 500, draws=100) == 500
    assert at_once(nn.Identity(), torch.randn(2, *shape), 1000) == 1000  # as for a file


def test_photos_do_not():
    photos = torch.randn(1, 3, 224, 224)
    assert at_once(nn.Conv2d(3, 64, 3, padding=1), photos, 1000) == WIDEST // (64 * 224 * 224) == 41
    assert at_once(nn.Identity(), photos, 1000) == WIDEST // (UNSEEN * 3 * 224 * 224) == 27
    assert at_once(None, photos, 1000) == WIDEST // (3 * 224 * 224) == 891
    assert at_once(nn.Identity(), torch.zeros(1, 512, dtype=torch.long), 1000) == WIDEST // (UNSEEN_IDS * 512) == 256


class Two(nn.Module):
    """Named inputs, and a dict of outputs with a wide one that is not the main one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x, other):
        return {"logits": self.layer(x), "features": (x + other).repeat(1, 20)}


@pytest.mark.parametrize("named", [True, False])
def test_inputs_and_outputs_of_any_form(monkeypatch, named):
    monkeypatch.setattr(batch, "WIDEST", 800)
    inputs = torch.randn(5, 4), torch.randn(5, 4)
    given = dict(zip(("x", "other"), inputs, strict=True)) if named else inputs
    assert at_once(Two(), given, 1000) == 10


class Touchy(nn.Module):
    """Refuses batches of some sizes, draws random numbers, and counts its calls in a buffer."""

    def __init__(self, *refused: int) -> None:
        super().__init__()
        self.layer, self.drop, self.refused = nn.Linear(4, 64), nn.Dropout(0.5), refused
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("last", torch.zeros(4))

    def forward(self, x):
        torch.rand(3)
        random.random()
        self.calls += 1
        self.last = x[0]
        if len(x) in self.refused:
            raise ValueError("not this many")
        return self.drop(self.layer(x))


@pytest.mark.parametrize(("refused", "found"), [((), 10), ((1,), 10), ((1, 2), 640 // (4 * UNSEEN))])
def test_a_model_is_left_as_it_was_even_if_it_fails(monkeypatch, refused, found):
    monkeypatch.setattr(batch, "WIDEST", 640)
    model = Touchy(*refused)
    model.layer.eval()
    before, x = model.last, torch.randn(3, 4)
    states = torch.get_rng_state(), random.getstate()
    assert at_once(model, x, 1000) == found
    assert model.training and model.drop.training and not model.layer.training
    assert model.calls == 0 and model.last is before
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert not any(module._forward_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_one_that_has_no_memory_for_an_example_gets_one_at_a_time():
    class Hungry(nn.Module):
        def forward(self, x):
            raise MemoryError

    assert at_once(Hungry(), torch.randn(3, 4), 1000) == 1


def test_a_stop_is_not_taken_for_a_failure():
    class Stopped(nn.Module):
        def forward(self, x):
            raise Interrupted("stopped")

    with pytest.raises(Interrupted):
        at_once(Stopped(), torch.randn(3, 4), 1000)


def test_weights_that_modules_return_are_no_activations(monkeypatch):
    monkeypatch.setattr(batch, "WIDEST", 640)
    model = Wide()
    nn.utils.parametrizations.weight_norm(model.wide)  # its module returns 64 x 4 = 256 numbers
    assert at_once(model, torch.randn(3, 4), 1000) == 10
    assert at_once(svdc.convert(Wide()), torch.randn(3, 4), 1000) == 10


def test_scripted_parts_are_taken_by_the_inputs(monkeypatch):
    monkeypatch.setattr(batch, "WIDEST", 640)
    scripted = nn.Sequential(nn.Linear(4, 8), torch.jit.script(nn.Linear(8, 64)))
    assert at_once(scripted, torch.randn(3, 4), 1000) == 640 // (4 * UNSEEN)
