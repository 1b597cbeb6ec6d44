"""Optimizers and learning rates: both update rules by hand, and a stop halfway."""

import copy

import pytest
import torch
from torch import nn

from svdcompress import Constant, convert
from svdcompress.likelihoods import make_loss
from svdcompress.recipe import LossSection, LrSchedule, Training
from svdcompress.sources import InMemory
from svdcompress.train import LrFactor, fit, make_optimizer

LOSS = make_loss(LossSection())


def examples(count):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 6, generator=generator)
    return InMemory(x, (x[:, 0] + x[:, 1] > 0).long())


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))


def test_optimizer_groups_and_the_learning_rates_path():
    model = convert(net())
    groups = make_optimizer(model, Training(lr=1e-2, weight_decay=0.1), 5e-2).param_groups
    assert [(g["lr"], g["weight_decay"], len(g["params"])) for g in groups] == [(1e-2, 0.1, 4), (5e-2, 0.0, 2)]
    factor = LrFactor(LrSchedule(name="linear", start="50%", end=0.1, warmup=2.0), 10)
    assert [round(factor(e), 6) for e in (0, 1, 2, 5, 7.5, 10)] == [0, 0.5, 1, 1, 0.55, 0.1]
    cosine = LrFactor(LrSchedule(name="cosine", start=0.0), 10)
    assert cosine(5) == pytest.approx(0.5)
    assert LrFactor(LrSchedule(name="constant"), 10)(9.9) == 1


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd"])
def test_a_step_counts_as_one_even_where_it_is_too_small_to_be_seen(name):
    model = convert(net(), log_sigma2=-60.0)
    optimizer = make_optimizer(model, Training(optimizer=name, lr=1e-2), 1e-9)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    assert not model[0].variance_moved
    optimizer.step()
    assert (model[0].log_sigma2 == -60).all() and model[0].variance_moved


def test_sgd_steps_the_means_and_adam_the_log_variances():
    """Against both update rules by hand, with changing learning rates, in two parts through the saved state."""
    torch.manual_seed(0)
    model = convert(net())
    made = Training(optimizer="sgd", lr=0.1, momentum=0.8, weight_decay=0.01)
    optimizer = make_optimizer(model, made, 0.02)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.02]
    spread = {name for name, _ in model.named_parameters() if "log_sigma2" in name}
    assert 0 < len(spread) < len(list(model.parameters()))
    values = {name: p.detach().clone().double() for name, p in model.named_parameters()}
    first = {name: torch.zeros_like(value) for name, value in values.items()}
    second = {name: torch.zeros_like(value) for name, value in values.items()}
    for step in range(1, 7):
        if step == 4:
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer = make_optimizer(model, made, 0.02)
            optimizer.load_state_dict(saved)
        for group, rate in zip(optimizer.param_groups, (0.1, 0.02), strict=True):
            group["lr"] = rate / step
        optimizer.zero_grad()
        for name, p in model.named_parameters():
            p.grad = torch.randn(p.shape)
            g = p.grad.double()
            if name in spread:
                first[name] = 0.9 * first[name] + 0.1 * g
                second[name] = 0.999 * second[name] + 0.001 * g**2
                up, down = first[name] / (1 - 0.9**step), (second[name] / (1 - 0.999**step)).sqrt() + 1e-8
                values[name] -= 0.02 / step * up / down
            else:
                g = g + 0.01 * values[name]
                first[name] = g if step == 1 else 0.8 * first[name] + g
                values[name] -= 0.1 / step * first[name]
        optimizer.step()
    for name, p in model.named_parameters():
        assert torch.allclose(p.detach().double(), values[name], atol=1e-5), name


def test_sgd_goes_on_from_a_stop_in_the_same_bytes(tmp_path):
    def model():
        return convert(net())

    whole, halved = model(), model()
    made = Training(optimizer="sgd", lr=0.05, epochs=4, batch_size=16)
    fit(whole, examples(64), LOSS, made, schedule=Constant(1.0), device="cpu")
    fit(halved, examples(64), LOSS, made, schedule=Constant(1.0), device="cpu", state=tmp_path / "fit.pt", last_epoch=2)
    fit(halved, examples(64), LOSS, made, schedule=Constant(1.0), device="cpu", state=tmp_path / "fit.pt")
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), halved.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(whole.parameters(), model().parameters(), strict=True))
