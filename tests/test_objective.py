"""The objective against one written by hand, and the schedules against their definitions."""

from __future__ import annotations

import copy
import math
import subprocess
import sys
import warnings
from dataclasses import FrozenInstanceError
from typing import get_args

import numpy as np
import pytest
import torch
from torch import nn

import svdcompress as svdc
from svdcompress.errors import UsageError
from svdcompress.objective import SCHEDULES
from svdcompress.recipe import BetaSchedule


def variational(**options) -> nn.Sequential:
    torch.manual_seed(0)
    model = svdc.convert(nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3)), **options)
    with torch.no_grad():
        for layer in (model[0], model[2]):
            layer.log_sigma2.uniform_(-6, 2)
    return model


def kl_by_hand(model: nn.Module) -> torch.Tensor:
    """KL of Kharitonov et al. 2018, weight by weight, through torch.distributions at the best prior variance."""
    total = torch.zeros((), dtype=torch.float64)
    for layer in (model[0], model[2]):
        for mu, log_sigma2 in zip(layer.weight.flatten(), layer.log_sigma2.flatten(), strict=True):
            mu, sigma2 = mu.double(), log_sigma2.double().exp()
            posterior = torch.distributions.Normal(mu, sigma2.sqrt())
            prior = torch.distributions.Normal(torch.zeros_like(mu), (mu**2 + sigma2).sqrt())
            total = total + torch.distributions.kl_divergence(posterior, prior)
    return total


# The loss


def test_the_loss_is_nll_plus_beta_kl_over_n_and_so_are_its_gradients():
    model = variational().eval()  # only the mean: no noise in either computation
    x, y = torch.randn(11, 5), torch.randint(3, (11,))
    elbo = svdc.ELBO(model, nn.CrossEntropyLoss(), num_examples=400, schedule=0.7)
    loss = elbo(model(x), y)
    logits = model(x)
    nll = -logits.log_softmax(1)[torch.arange(11), y].mean()
    kl = kl_by_hand(model)
    expected = nll.double() + 0.7 * kl / 400
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert float(elbo.last_nll) == pytest.approx(nll.item(), rel=1e-6)
    assert float(elbo.last_kl) == pytest.approx(kl.item(), rel=1e-5)

    parameters = [model[0].weight, model[0].log_sigma2, model[2].weight, model[2].log_sigma2, model[0].bias]
    ours = torch.autograd.grad(loss, parameters)
    by_hand = torch.autograd.grad(expected, parameters)
    for a, b in zip(ours, by_hand, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
        assert a.abs().sum() > 0


def test_gradients_reach_mean_and_variance_through_the_noise_too():
    model = variational().train()
    elbo = svdc.ELBO(model, nn.CrossEntropyLoss(), num_examples=400, schedule=0.0)
    elbo(model(torch.randn(11, 5)), torch.randint(3, (11,))).backward()
    for layer in (model[0], model[2]):
        assert layer.weight.grad.abs().sum() > 0 and layer.log_sigma2.grad.abs().sum() > 0


def test_kl_is_summed_over_weights_and_divided_by_n_alone():
    model = variational().eval()
    kl = svdc.kl_divergence(model).item()
    for batch in (1, 64):
        x, y = torch.randn(batch, 5), torch.randint(3, (batch,))
        elbo = svdc.ELBO(model, nn.CrossEntropyLoss(), num_examples=1000)
        extra = (elbo(model(x), y) - nn.functional.cross_entropy(model(x), y)).item()
        assert extra == pytest.approx(kl / 1000, rel=1e-3)
    double = nn.Sequential(variational(), variational())
    assert svdc.kl_divergence(double).item() == pytest.approx(2 * kl, rel=1e-6)


@pytest.mark.parametrize(
    "shares", [("input", "weight"), ("input", "output"), ("weight", "weight"), ("layer", "weight")], ids=str
)
def test_kl_of_layers_of_several_kinds_is_that_of_each_by_itself(shares):
    """Some kinds are computed together and others one by one; none may be left out."""
    torch.manual_seed(0)
    layers = [svdc.convert(nn.Linear(size, size + 1), share=share) for size, share in zip((5, 6), shares, strict=True)]
    each = [svdc.kl_divergence(layer).item() for layer in layers]
    assert min(each) > 1
    assert svdc.kl_divergence(nn.Sequential(*layers)).item() == pytest.approx(sum(each), rel=1e-6)


def test_training_by_the_objective_is_training_by_hand():
    """A few steps written in plain torch give the same numbers."""

    def steps(loss_of):
        model = variational()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        torch.manual_seed(1)
        x, y = torch.randn(40, 5), torch.randint(3, (40,))
        for epoch in range(4):
            loss = loss_of(model, epoch, model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    def ours(model, epoch, output, y):
        elbo = svdc.ELBO(model, nn.CrossEntropyLoss(), num_examples=40, schedule=svdc.LinearWarmup(1, 3, 0.5))
        elbo.set_epoch(epoch)
        return elbo(output, y)

    def by_hand(model, epoch, output, y):
        return nn.functional.cross_entropy(output, y) + (0, 0, 0.25, 0.5)[epoch] * kl_by_hand(model).float() / 40

    torch.testing.assert_close(steps(ours), steps(by_hand), rtol=1e-4, atol=1e-5)


def test_shared_layers_count_once():
    layer = nn.Linear(4, 4)
    model = svdc.convert(nn.Sequential(layer, nn.Tanh(), layer))
    assert svdc.kl_divergence(model).item() == pytest.approx(layer.kl().item(), rel=1e-6)


def test_at_beta_zero_no_kl_is_computed(monkeypatch):
    model = variational()
    monkeypatch.setattr(type(model[0]), "kl", lambda self: pytest.fail("kl was computed"))
    elbo = svdc.ELBO(model, nn.MSELoss(), num_examples=3, schedule=svdc.LinearWarmup(1, 2))
    elbo(model(torch.randn(2, 5)), torch.randn(2, 3))
    assert elbo.beta == 0 and elbo.last_kl is None


def test_a_loss_of_any_arguments_and_a_model_that_stays_outside():
    model = variational().eval()
    elbo = svdc.ELBO(model, lambda mean, log_variance, *, target: (mean - target).square().mean() + log_variance, 10, 1)
    value = elbo(torch.zeros(3), torch.tensor(2.0), target=torch.ones(3))
    assert value.item() == pytest.approx(3 + svdc.kl_divergence(model).item() / 10, rel=1e-6)
    assert not list(elbo.parameters()) and not elbo.state_dict()


def test_wrong_use_is_an_error_that_says_what_to_do():
    model = variational()
    svdc.ELBO(model, nn.MSELoss(), num_examples=1)
    with pytest.raises(UsageError, match="num_examples: 0 is not a number of training examples"):
        svdc.ELBO(model, nn.MSELoss(), 0)
    for count in ("100", math.nan, math.inf, None):
        with pytest.raises(UsageError, match=f"num_examples: {count!r} is not a number of training examples"):
            svdc.ELBO(model, nn.MSELoss(), count)
    with pytest.raises(UsageError, match="schedule: 'linear' is neither a number nor a function of the epoch"):
        svdc.ELBO(model, nn.MSELoss(), 10, "linear")
    with pytest.raises(UsageError, match="nll: returned tuple; it must return a tensor of one number"):
        svdc.ELBO(model, lambda *given: given, 10)(torch.zeros(2, 3), torch.zeros(2, 3))
    with pytest.raises(UsageError, match=r"no variational layer; call svdcompress\.convert"):
        svdc.kl_divergence(nn.Linear(2, 2))
    elbo = svdc.ELBO(model, nn.MSELoss(reduction="none"), 10)
    with pytest.raises(UsageError, match=r"nll: returned shape \(2, 3\).*average over the batch"):
        elbo(torch.zeros(2, 3), torch.zeros(2, 3))


def test_a_model_that_was_never_converted_is_told_of_at_the_first_loss():
    plain, x, y = nn.Linear(5, 3), torch.randn(4, 5), torch.randn(4, 3)
    elbo = svdc.ELBO(plain, nn.MSELoss(), 10, svdc.LinearWarmup())
    svdc.ELBO(plain, nn.MSELoss(), 10, 0.0)(plain(x), y)  # allowed if beta is always 0
    with pytest.raises(UsageError, match=r"no variational layer; call svdcompress\.convert"):
        elbo(plain(x), y)
    late = svdc.ELBO(plain, nn.MSELoss(), 10, svdc.LinearWarmup())
    svdc.convert(plain)
    late(plain(x), y)


# Schedules


def test_constant():
    assert [svdc.Constant(0.3)(epoch) for epoch in (0, 7.5, 1e6)] == [0.3] * 3


@pytest.mark.parametrize(("epoch", "expected"), [(0, 0), (4.99, 0), (5, 0), (12.5, 0.5), (20, 1), (500, 1)])
def test_linear_warm_up(epoch, expected):
    assert svdc.LinearWarmup(5, 20)(epoch) == pytest.approx(expected)
    assert svdc.LinearWarmup(5, 20, final=0.1)(epoch) == pytest.approx(0.1 * expected)


@pytest.mark.parametrize(("epoch", "expected"), [(0, 0), (5, 0), (12.5, 0.5), (8.75, 0.5 - math.sqrt(0.125)), (20, 1), (99, 1)])
def test_cosine_warm_up(epoch, expected):
    assert svdc.CosineWarmup(5, 20, final=2.0)(epoch) == pytest.approx(2 * expected, abs=1e-12)


def test_warm_ups_are_those_of_epochs_5_to_20_unless_told_otherwise():
    for schedule in (svdc.LinearWarmup(), svdc.CosineWarmup()):
        assert schedule(5) == 0 < schedule(5.01) and schedule(19.99) < schedule(20) == 1


@pytest.mark.parametrize("schedule", [svdc.LinearWarmup(), svdc.CosineWarmup(), svdc.AdditiveWarmup()], ids=repr)
def test_a_schedule_is_a_value(schedule):
    """It is hashable, and a user cannot change it for others."""
    assert hash(schedule) == hash(type(schedule)()) and schedule == type(schedule)()
    with pytest.raises(FrozenInstanceError):
        schedule.final = 2.0


def test_a_warm_up_of_no_length_is_a_step():
    for schedule in (svdc.LinearWarmup(3, 3), svdc.CosineWarmup(3, 3)):
        assert [schedule(epoch) for epoch in (2.9, 3, 4)] == [0, 1, 1]


def test_additive_warm_up_is_the_lectures_loop():
    """`kl_weight = min(kl_weight + 0.02, 1)` at the start of each epoch (Mittov's training code)."""
    schedule, kl_weight = svdc.AdditiveWarmup(), 0.0
    for epoch in range(100):
        kl_weight = min(kl_weight + 0.02, 1)
        assert schedule(epoch) == pytest.approx(kl_weight)
        assert schedule(epoch + 0.99) == schedule(epoch)
    assert svdc.AdditiveWarmup(step=0.3, final=0.5)(7) == 0.5


@pytest.mark.parametrize("warmup", [svdc.LinearWarmup, svdc.CosineWarmup])
def test_a_warm_up_in_the_wrong_order_is_refused(warmup):
    for start, stop in ((20, 5), (math.nan, 5), (5, math.nan)):
        with pytest.raises(UsageError, match=f"stop: epoch {stop} is before start, epoch {start}"):
            warmup(start=start, stop=stop)


@pytest.mark.parametrize("beta", [-1.0, math.nan, math.inf])
def test_a_beta_that_is_no_weight_is_refused(beta):
    for name, use in {
        "final": (svdc.Constant, svdc.LinearWarmup, svdc.CosineWarmup, svdc.AdditiveWarmup),
        "step": (svdc.AdditiveWarmup,),
        "schedule": (lambda schedule: svdc.ELBO(variational(), nn.MSELoss(), 10, schedule),),
    }.items():
        for make in use:
            with pytest.raises(UsageError, match=f"{name}: {beta} is not a finite number of at least 0"):
                make(**{name: beta})


@pytest.mark.parametrize("schedule", [np.float32(0.5), torch.tensor(0.5), np.array(0.5)], ids=repr)
def test_numbers_of_any_kind_are_constants(schedule):
    elbo = svdc.ELBO(variational(), nn.MSELoss(), np.int64(10), schedule)
    assert elbo.schedule == svdc.Constant(0.5) and elbo.beta == 0.5


def test_set_epoch_follows_the_schedule_and_a_number_is_a_constant():
    model = variational()
    elbo = svdc.ELBO(model, nn.MSELoss(), 10, svdc.LinearWarmup(0, 10))
    assert [elbo.set_epoch(epoch) for epoch in (0, 5, 20)] == [0, 0.5, 1] and elbo.beta == 1
    assert svdc.ELBO(model, nn.MSELoss(), 10, 3).set_epoch(8) == 3
    assert svdc.ELBO(model, nn.MSELoss(), 10, lambda epoch: epoch**2).set_epoch(3) == 9


# Losses that do not average


def train(elbo: svdc.ELBO, model: nn.Module, epochs: int, set_epoch: bool = False) -> None:
    torch.manual_seed(0)
    for epoch in range(epochs):
        if set_epoch:
            elbo.set_epoch(epoch)
        for _ in range(4):
            elbo(model(torch.randn(5, 5)), torch.randint(3, (5,))).backward()


def test_a_warm_up_that_never_begins_is_told_of_once():
    model = variational()
    elbo = svdc.ELBO(model, nn.CrossEntropyLoss(), num_examples=20, schedule=svdc.LinearWarmup(start=5, stop=10))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(elbo, model, epochs=1)
        with torch.no_grad():
            elbo(model(torch.randn(5, 5)), torch.randint(3, (5,)))  # a validation pass
    with pytest.warns(UserWarning, match=r"beta is still 0.*elbo\.set_epoch\(epoch\)") as found:
        train(elbo, model, epochs=2)
    assert len(found) == 1 and found[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warm = svdc.LinearWarmup(start=5, stop=10)
        train(svdc.ELBO(model, nn.CrossEntropyLoss(), 20, warm), model, epochs=3, set_epoch=True)
        for schedule in (0.0, 1.0, svdc.Constant(0.5)):
            train(svdc.ELBO(model, nn.CrossEntropyLoss(), 20, schedule), model, epochs=2)


def test_a_schedule_that_begins_above_zero_and_is_not_followed_is_told_of_too():
    model = variational()
    elbo = svdc.ELBO(model, nn.CrossEntropyLoss(), num_examples=20, schedule=svdc.AdditiveWarmup())
    with pytest.warns(UserWarning, match=r"beta is still 0\.02.*elbo\.set_epoch\(epoch\).*stays at that weight") as found:
        train(elbo, model, epochs=3)
    assert len(found) == 1 and found[0].filename == __file__


def test_the_loss_of_another_copy_of_the_model_is_told_of():
    model = variational()
    for other in (copy.deepcopy(model), torch.optim.swa_utils.AveragedModel(model), svdc.prune(model, torch.randn(2, 5))):
        with pytest.warns(UserWarning, match="on none of ELBO's model") as found:
            train(svdc.ELBO(other, nn.CrossEntropyLoss(), num_examples=20), model, epochs=1)
        assert len(found) == 1 and found[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(svdc.ELBO(model, nn.CrossEntropyLoss(), num_examples=20), nn.DataParallel(model), epochs=1)
        svdc.ELBO(model, lambda loss: loss, 20)(torch.ones((), requires_grad=True) * 2)  # without any parameter
        frozen = copy.deepcopy(model).requires_grad_(False)
        train(svdc.ELBO(frozen, nn.CrossEntropyLoss(), num_examples=20), nn.Sequential(nn.Linear(5, 5), frozen), epochs=1)


def test_a_loss_that_says_that_it_sums_is_refused():
    with pytest.raises(UsageError, match=r"nll.*average over the batch"):
        svdc.ELBO(variational(), nn.CrossEntropyLoss(reduction="sum"), num_examples=10)


def summed(logits, y):
    return -logits.log_softmax(1)[torch.arange(len(y)), y].sum()


def averaged(logits, y):
    return summed(logits, y) / len(y)


def test_a_function_that_sums_is_found_by_a_repeated_batch():
    model = variational()
    x, y = torch.randn(11, 5), torch.randint(3, (11,))
    with pytest.raises(UsageError, match=r"sums over the batch.*reduction='mean'"):
        svdc.ELBO(model, summed, num_examples=400)(model(x), y)
    svdc.ELBO(model, averaged, num_examples=400)(model(x), y)
    # with one example, a sum equals a mean, but not with the example repeated
    with pytest.raises(UsageError, match="sums over the batch"):
        svdc.ELBO(model, summed, num_examples=400)(model(x[:1]), y[:1])


def test_the_look_at_a_loss_happens_once_and_leaves_random_numbers_alone():
    calls = []

    def noisy(logits, y):
        calls.append(len(y))
        return averaged(logits + torch.randn(()), y)

    x, y = torch.randn(4, 3), torch.randint(3, (4,))
    elbo = svdc.ELBO(variational(), noisy, num_examples=400, schedule=0.0)
    torch.manual_seed(1)
    values = [float(elbo(x, y)) for _ in range(3)]
    torch.manual_seed(1)
    assert values == [float(averaged(x + torch.randn(()), y)) for _ in range(3)]
    assert calls == [4, 8, 4, 4]


def test_the_look_at_a_loss_that_runs_the_model_leaves_running_statistics_alone():
    x, y = torch.randn(6, 5), torch.randint(3, (6,))
    found = []
    for closure in (False, True):
        model = nn.Sequential(variational(), nn.BatchNorm1d(3), nn.Linear(3, 3))
        model.register_buffer("places", torch.arange(3).expand(2, -1))  # it cannot be written to
        nll = (lambda x, y: nn.functional.cross_entropy(model(x), y)) if closure else nn.CrossEntropyLoss()  # noqa: B023
        elbo = svdc.ELBO(model, nll, num_examples=6)
        torch.manual_seed(1)
        (elbo(x, y) if closure else elbo(model(x), y)).backward()
        found.append(dict(model[1].named_buffers()))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
    assert int(found[1]["num_batches_tracked"]) == 1


def test_a_loss_of_one_batch_size_or_of_a_number_is_taken_as_it_is():
    def of_four(logits, y):
        return averaged(logits.view(4, 3), y)

    svdc.ELBO(variational(), of_four, num_examples=400)(torch.randn(4, 3), torch.randint(3, (4,)))
    svdc.ELBO(variational(), lambda loss: loss, num_examples=400)(torch.tensor(0.3))


# By the names of recipes


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_of_a_recipe_ends_at_its_beta(name):
    """Also, each name that recipes accept has a schedule, so adding one takes two files: `objective.py` and the schema."""
    assert set(SCHEDULES) == set(get_args(BetaSchedule.model_fields["name"].annotation))
    settings = BetaSchedule(name=name, start="20%", stop=8.0, step=0.1)
    schedule = SCHEDULES[name](settings, 20, 0.7)
    betas = [schedule(epoch) for epoch in range(21)]
    assert betas[-1] == 0.7 and betas == sorted(betas)
    assert betas[0] == {"constant": 0.7, "additive": 0.1}.get(name, 0.0)
    assert betas[6] == pytest.approx({"linear": 0.35, "cosine": 0.35}.get(name, 0.7))  # halfway from 20% of 20 to 8


def test_training_by_hand_reads_no_recipe():
    code = "import sys, svdcompress; svdcompress.LinearWarmup, svdcompress.ELBO; sys.exit('pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
