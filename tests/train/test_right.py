"""Convolutions that a CPU computes wrongly in bfloat16 are reported by layer name, before training."""

import pytest
import torch
from torch import nn

from svdcompress import convert
from svdcompress.errors import TrainingError
from svdcompress.likelihoods import make_loss
from svdcompress.recipe import Distillation, LossSection, Training
from svdcompress.sources import InMemory
from svdcompress.train import fit, is_right


class Faulty(nn.Conv1d):
    """A kernel that is wrong in bfloat16, on any machine."""

    def forward(self, x):
        return super().forward(x) * (3 if torch.is_autocast_enabled("cpu") else 1)


def net(kind=nn.Conv1d):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4), kind(4, 4, 3), nn.Flatten(), nn.Linear(16, 2))


def trained(model, precision="bf16", x=None, **more):
    x = torch.randn(12, 3, 8, generator=torch.Generator().manual_seed(0)) if x is None else x
    data = InMemory(x, torch.arange(12) % 2)
    settings = Training(epochs=1, batch_size=4, precision=precision)
    return fit(model, data, make_loss(LossSection()), settings, device="cpu", **more)


@pytest.mark.parametrize("stage", ["dense", "recover"])
def test_a_wrong_layer_is_named_with_what_to_set(stage):
    model = net(Faulty)
    before = [tensor.clone() for tensor in model.state_dict().values()]
    with pytest.raises(
        TrainingError,
        match=rf"{stage}.precision.*layer '2' incorrectly in bfloat16 \(off from .* by 2.0 times.*Set {stage}.precision=no",
    ):
        trained(model, stage=stage)
    assert all(torch.equal(one, other) for one, other in zip(before, model.state_dict().values(), strict=True))


def test_a_wrong_teacher_is_named_as_one():
    with pytest.raises(TrainingError, match="the teacher's layer '2'"):
        trained(net(), teacher=net(Faulty), distill=Distillation(weight=0.5))


def test_nothing_is_looked_at_in_float32(monkeypatch):
    looked = []
    monkeypatch.setattr("svdcompress.train._right._distances", lambda model, *given: looked.append(model) or {})
    trained(net(), "no")
    assert not looked
    trained(net(), "bf16")
    assert len(looked) == 1


@pytest.mark.parametrize(("kind", "right"), [(nn.Conv1d, True), (Faulty, False)])
def test_a_model_can_be_asked_outside_of_a_fit(kind, right):
    x = torch.randn(12, 3, 8, generator=torch.Generator().manual_seed(0))
    model = net(kind).train()
    assert is_right(model, x, "bf16", "cpu") == right and model.training
    assert is_right(model, x, "no", "cpu") and is_right(model, x, "bf16", "cuda")  # neither is checked


@pytest.mark.parametrize("make", [net, lambda: convert(net(), log_sigma2=-4.0)])
def test_looking_changes_no_number_of_the_training(make, monkeypatch):
    looked, once = make(), make()
    found = trained(looked)
    monkeypatch.setattr("svdcompress.train._loop.refuse_wrong", lambda work: None)
    assert trained(once).history == found.history
    assert all(
        torch.equal(one, other) for one, other in zip(looked.state_dict().values(), once.state_dict().values(), strict=True)
    )


def test_rounding_is_no_fault_however_much_a_sum_cancels():
    model = net()
    model[0].weight.data = torch.tensor([1.0, -1.0, 0.0]).expand(4, 3, 3).clone()  # differences of numbers near 1,000
    assert trained(model, x=1000 + torch.randn(12, 3, 8, generator=torch.Generator().manual_seed(0))).history


def test_numbers_that_are_no_results_at_all_are_wrong_too():
    """Some kernels return memory that was never written to (PyTorch issue 169688), sometimes NaN."""

    class Unwritten(nn.Conv1d):
        def forward(self, x):
            y = super().forward(x)
            return y * float("nan") if torch.is_autocast_enabled("cpu") else y

    with pytest.raises(TrainingError, match=r"layer '2' incorrectly in bfloat16 \(off from float32 by inf times"):
        trained(net(Unwritten))


def test_an_output_of_zeros_is_no_fault():
    model = net()
    nn.init.zeros_(model[2].weight)
    nn.init.zeros_(model[2].bias)
    assert trained(model).history


class ByKeyword(nn.Sequential):
    """Passes the input to its faulty layer by keyword."""

    def forward(self, x):
        return self[4](self[3](self[2](x=self[1](self[0](x)))))


def test_a_layer_that_is_called_by_keyword_is_looked_at_too():
    with pytest.raises(TrainingError, match="layer '2' incorrectly"):
        trained(ByKeyword(*net(Faulty)))
