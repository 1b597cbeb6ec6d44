"""A model's memory layout while it trains on a GPU, tested on the CPU: channels last where possible, then restored."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from svdcompress import convert, kl_divergence
from svdcompress.likelihoods import make_loss
from svdcompress.prune import on_cpu
from svdcompress.recipe import Distillation, LossSection, Training
from svdcompress.sources import InMemory
from svdcompress.sources.given import given
from svdcompress.train import _network, fit
from svdcompress.train._optim import lay_out
from svdcompress.train._steps import Steps

LAST = torch.channels_last


class Image(nn.Module):
    """flatten: how outputs of a convolution become rows. Records the layout of its weight."""

    def __init__(self, flatten):
        super().__init__()
        self.conv, self.head, self.flatten = nn.Conv2d(2, 4, 3), nn.Linear(64, 2), flatten
        self.seen = []

    def forward(self, x):
        self.seen.append(self.conv.weight.is_contiguous(memory_format=LAST))
        return self.head(self.flatten(self.conv(x)))


def by_view(x):
    return x.view(len(x), -1)


def by_flatten(x):
    return x.flatten(1)


def trained(model, monkeypatch, memory=LAST, **more):
    """Train with a memory format; returns the notes."""
    g, said = torch.Generator().manual_seed(0), []
    x = torch.randn(32, 2, 6, 6, generator=g)
    monkeypatch.setattr(_network, "_faster_format", lambda work: memory)
    settings = Training(epochs=1, batch_size=16)
    data = InMemory(x, (x.mean((1, 2, 3)) > 0).long())
    fit(model, data, make_loss(LossSection()), settings, stage="dense", on_note=lambda *line: said.append(line), **more)
    return said


@pytest.mark.parametrize("flatten", [by_view, by_flatten])
def test_a_model_that_cannot_run_channels_last_trains_without(monkeypatch, flatten):
    torch.manual_seed(0)
    model = Image(flatten)
    plain = copy.deepcopy(model)
    said = trained(model, monkeypatch)
    assert set(model.seen[-2:]) == {flatten is by_flatten}
    assert [settled for line, settled in said if "channels-last" in line] == [True] * (flatten is by_view)
    assert model.conv.weight.is_contiguous()
    trained(plain, monkeypatch, None)
    for own, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("flatten", [by_view, by_flatten])
def test_the_teacher_lies_as_its_student_does(monkeypatch, flatten):
    torch.manual_seed(0)
    teacher, student = Image(flatten).eval(), Image(by_flatten)
    before = {name: value.clone() for name, value in teacher.state_dict().items()}
    said = trained(student, monkeypatch, teacher=teacher, distill=Distillation(weight=0.5))
    assert set(teacher.seen[-2:]) == set(student.seen[-2:]) == {flatten is by_flatten}
    assert any("channels-last" in line for line, _ in said) == (flatten is by_view)
    assert teacher.conv.weight.is_contiguous() and student.conv.weight.is_contiguous()
    for name, value in teacher.state_dict().items():
        assert torch.equal(value, before[name])


def test_three_dimensional_convolutions_stay_as_they_are(monkeypatch):
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.flat, self.deep, self.head = nn.Conv2d(2, 4, 3), nn.Conv3d(1, 2, 3), nn.Linear(2 * 2 * 2 * 2, 2)

        def forward(self, x):
            return self.head(self.deep(self.flat(x).unsqueeze(1)).flatten(1))

    model = Both()
    trained(model, monkeypatch)
    assert model.flat.weight.is_contiguous() and model.deep.weight.is_contiguous()


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD])
def test_a_state_from_another_layout_follows_its_parameters(kind):
    """Two steps in one layout equal a step, a change of layout, and another step."""
    torch.manual_seed(0)
    one = nn.Conv2d(3, 4, 3)
    other, x = copy.deepcopy(one), torch.randn(5, 3, 6, 6)
    more = {"momentum": 0.9} if kind is torch.optim.SGD else {}

    def step(model, optimizer):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    optimizers = [kind(model.parameters(), lr=0.1, **more) for model in (one, other)]
    for model, optimizer in zip((one, other), optimizers, strict=True):
        step(model, optimizer)
    other.to(memory_format=LAST)
    saved = optimizers[1].state_dict()
    again = kind(other.parameters(), lr=0.1, **more)
    again.load_state_dict(saved)
    lay_out(again)
    for parameter, state in again.state.items():
        kept = [value for value in state.values() if isinstance(value, torch.Tensor) and value.shape == parameter.shape]
        assert kept and all(value.stride() == parameter.stride() for value in kept)
    step(one, optimizers[0])
    step(other, again)
    torch.testing.assert_close(other.weight, one.weight)


def test_a_variance_of_rank_one_has_its_short_kl_channels_last(monkeypatch):
    from svdcompress.layers.posteriors import _rank_one

    torch.manual_seed(0)
    model = convert(nn.Sequential(nn.Conv2d(8, 6, 3)), posterior="rank-one")
    wanted = kl_divergence(model)
    grads = torch.autograd.grad(wanted, [*model.parameters()], allow_unused=True)
    asked, kl = [], _rank_one.kl_rank_one
    monkeypatch.setattr(_rank_one, "kl_rank_one", lambda *given: asked.append(True) or kl(*given))
    weight = model[0].weight
    weight.data = weight.data.contiguous(memory_format=LAST)
    found = kl_divergence(model)
    assert asked and not weight.is_contiguous()
    torch.testing.assert_close(found, wanted)
    for own, other in zip(torch.autograd.grad(found, [*model.parameters()], allow_unused=True), grads, strict=True):
        assert (own is None) == (other is None)
        if own is not None:
            torch.testing.assert_close(own, other)


def test_a_copy_on_the_cpu_has_its_usual_layout_and_no_graph():
    model = nn.Sequential(nn.Conv2d(3, 4, 3)).to(memory_format=LAST)
    model[0].seen = model(torch.randn(2, 3, 5, 5))  # what a module keeps from a pass
    copied = on_cpu(model)
    assert copied[0].weight.is_contiguous() and not model[0].weight.is_contiguous()
    assert torch.equal(copied[0].weight, model[0].weight) and copied[0].seen.grad_fn is None


def test_a_loss_with_weights_goes_along_and_the_users_stays(monkeypatch):
    """A device is not needed: the loss is only asked to move to where the model is."""
    moved = []

    class Weighted(nn.CrossEntropyLoss):
        def to(self, *given, **more):
            moved.append(given)
            return super().to(*given, **more)

    own = Weighted(weight=torch.tensor([1.0, 3.0]))
    with given(loss=own) as names:
        loss = make_loss(LossSection(name=names["loss"], task="classification"))
    assert isinstance(loss, Weighted) and loss is not own and torch.equal(loss.weight, own.weight)
    g = torch.Generator().manual_seed(0)
    data = InMemory(torch.randn(20, 3, generator=g), torch.randint(2, (20,), generator=g))
    fit(nn.Linear(3, 2), data, loss, Training(epochs=1), stage="dense")
    assert [torch.device(*where).type for where in moved] == ["cpu"]


def test_a_step_in_fp16_unscales_for_one_optimizer():
    """accelerate unscales for all optimizers it was ever given, and after shrinking two of them share gradients."""

    class Accelerator:
        scaler = object()

        def __init__(self):
            self._optimizers = []

        def prepare_optimizer(self, optimizer):
            self._optimizers.append(optimizer)
            return optimizer

    model, accelerator = nn.Linear(3, 2), Accelerator()
    work = SimpleNamespace(model=model, settings=Training(epochs=1), lr_log_sigma2=None, accelerator=accelerator)
    steps = [Steps(work) for _ in range(2)]
    assert accelerator._optimizers == [steps[-1]._optimizer]
