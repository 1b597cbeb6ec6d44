"""A long fit done in parts: each continues where the one before ended, bit for bit."""

import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from svdcompress import Constant, LinearWarmup, convert
from svdcompress.errors import TrainingError, UsageError
from svdcompress.likelihoods import make_loss
from svdcompress.recipe import LossSection, Training
from svdcompress.sources import InMemory
from svdcompress.train import _loop, fit
from svdcompress.train._shrink import shrink, size

LOSS = make_loss(LossSection())
SETTINGS = {"epochs": 6, "batch_size": 16, "lr": 1e-2, "schedule": {"name": "cosine", "start": 0.0}}


def examples():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 6, generator=generator)
    return InMemory(x, (x[:, 0] + x[:, 1] > 0).long())


def net(dead=6):
    """A converted net with a batch norm, whose running averages continue too; its first units are irrelevant."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
    model = convert(model, log_sigma2=-6.0)
    model[0].log_sigma2.data[:dead] = 5.0
    return model


def train(model, smaller=False, schedule=None, **more):
    """A fit whose validation prefers the middle of the training, so that the best epoch is not one of the last."""
    fields = {**SETTINGS, **({"keep": more.pop("keep")} if "keep" in more else {})}
    if smaller:
        more |= {"shrink_from": 2.0, "shrink": partial(shrink, inputs=examples().inputs[:2])}
    scores = {epoch: abs(epoch - 4.0) for epoch in range(7)}
    done = iter(range(len(more.pop("seen", [])) + 1, 7))
    validate = lambda model: {"error": scores[next(done)], "nll": 0.5}  # noqa: E731
    return fit(
        model,
        examples(),
        LOSS,
        Training(**fields),
        schedule=schedule or LinearWarmup(1, 4, 0.5),
        lr_log_sigma2=5e-2,
        validate=validate,
        device="cpu",
        **more,
    )


def state_of(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_time_of_a_fit_is_told(monkeypatch):
    passed = iter(range(1000, 1_000_000))
    monkeypatch.setattr(_loop, "time", SimpleNamespace(monotonic=lambda: float(next(passed)), perf_counter=time.perf_counter))
    started = 1000.0
    result = train(net())
    assert result.seconds == next(passed) - 1 - started > 0


@pytest.mark.parametrize("smaller", [False, True], ids=["whole", "shrinking"])
@pytest.mark.parametrize("keep", ["last", "best"])
@pytest.mark.parametrize("anew", [True, False], ids=["fresh", "same"])
def test_parts_end_where_one_long_fit_does(tmp_path, smaller, keep, anew):
    straight = net()
    whole = train(straight, smaller, keep=keep)
    model, result = net(), None
    for last in (2, 3, 6):
        model = net() if anew else model
        result = train(model, smaller, keep=keep, state=tmp_path / "fit.pt", last_epoch=last,
                       seen=result.history if result else [])  # fmt: skip
        assert len(result.history) == last
    assert result.history == whole.history
    assert result.kept_epoch == whole.kept_epoch == (6 if keep == "last" else 4)
    assert_same(state_of(model), state_of(straight))
    assert (size(straight) < size(net())) == smaller  # it shrank only if asked to


def test_a_part_is_trained_under_the_whole_schedule(tmp_path):
    """Unlike a short fit, whose learning rate has decayed by its end."""
    part, short = net(), net()
    first = train(part, state=tmp_path / "fit.pt", last_epoch=2)
    found = fit(short, examples(), LOSS, Training(**{**SETTINGS, "epochs": 2}), device="cpu")
    assert first.history[-1]["lr"] > 5 * found.history[-1]["lr"]


def test_the_optimizer_goes_on_and_beta_may_rise(tmp_path):
    """Like one fit whose beta jumps in the middle; without Adam's averages the weights would differ."""
    model = net()
    train(model, schedule=Constant(0.1), state=tmp_path / "fit.pt", last_epoch=3)
    raised = train(model, schedule=Constant(5.0), state=tmp_path / "fit.pt", seen=[0, 0, 0])
    assert [row["beta"] for row in raised.history] == [0.1] * 3 + [5.0] * 3
    by_epoch = net()
    train(by_epoch, schedule=lambda epoch: 0.1 if epoch < 3 else 5.0)
    assert_same(state_of(model), state_of(by_epoch))
    forgetful = net()
    train(forgetful, schedule=Constant(0.1), state=tmp_path / "other.pt", last_epoch=3)
    saved = torch.load(tmp_path / "other.pt", weights_only=True)
    saved["optimizer"]["state"] = {}
    torch.save(saved, tmp_path / "other.pt")
    train(forgetful, schedule=Constant(5.0), state=tmp_path / "other.pt", seen=[0, 0, 0])
    assert not torch.equal(forgetful[0].weight, model[0].weight)


def test_a_state_without_the_number_of_weights_is_gone_on_from(tmp_path):
    """Like states saved before fits could be continued with the model that they left."""
    straight, model = net(), net()
    whole = train(straight, smaller=True)
    part = train(model, smaller=True, state=tmp_path / "fit.pt", last_epoch=4)
    saved = torch.load(tmp_path / "fit.pt", weights_only=True)
    del saved["total"]
    torch.save(saved, tmp_path / "fit.pt")
    model = net()
    again = train(model, smaller=True, state=tmp_path / "fit.pt", seen=part.history)
    assert again.history == whole.history
    assert_same(state_of(model), state_of(straight))


def test_a_last_epoch_that_cannot_be_is_refused(tmp_path):
    for last in (0, 7):
        with pytest.raises(UsageError, match=rf"last_epoch: {last} is not one of the 6 epochs \(train.epochs\)"):
            train(net(), last_epoch=last)
    train(net(), state=tmp_path / "fit.pt", last_epoch=4)
    with pytest.raises(TrainingError, match=r"fit.pt: it is at epoch 4, past the last one requested, 3"):
        train(net(), state=tmp_path / "fit.pt", last_epoch=3, seen=[0] * 4)
    result = train(net(), state=tmp_path / "fit.pt", last_epoch=4, seen=[0] * 4)  # already done: nothing is repeated
    assert len(result.history) == 4


def test_gradients_left_by_the_users_own_training_do_not_count():
    clean, left = net(), net()
    for parameter in left.parameters():
        parameter.grad = torch.ones_like(parameter)
    train(clean)
    train(left)
    assert_same(state_of(left), state_of(clean))
