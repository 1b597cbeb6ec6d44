"""The choice of the number of threads: the fastest, without any effect on what is trained."""

import time

import pytest
import torch
from torch import nn

from svdcompress import Constant, convert
from svdcompress.errors import ModelError
from svdcompress.likelihoods import make_loss
from svdcompress.recipe import LossSection, Training
from svdcompress.sources import InMemory
from svdcompress.train import Trial, _threads, choosing, fastest, fit

LOSS = make_loss(LossSection())


@pytest.fixture(autouse=True)
def four_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(_threads, "TURN", 0.002)


def sleeps(seconds):
    """A step whose duration depends on the current number of threads."""
    return lambda: time.sleep(seconds[torch.get_num_threads()])


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({1: 0.004, 2: 0.012, 4: 0.030}, 1),
        ({1: 0.030, 2: 0.008, 4: 0.020}, 2),
        ({1: 0.040, 2: 0.020, 4: 0.008}, 4),
        ({1: 0.0200, 2: 0.0195, 4: 0.0190}, 1),  # hardly faster, so not worth the threads
    ],
)
def test_the_fastest_number_is_taken(short, seconds, chosen, monkeypatch):
    clock = [0.0]  # a real clock jitters by more than the differences in the last case

    def step():
        clock[0] += seconds[torch.get_num_threads()]

    monkeypatch.setattr(_threads.time, "perf_counter", lambda: clock[0])
    found = fastest(step, 4)
    assert found.threads == chosen
    assert set(found.seconds) == {1, 2, 4}
    assert all(found.seconds[number] == pytest.approx(seconds[number], rel=0.5, abs=0.01) for number in seconds)


def test_numbers_are_powers_of_two_and_the_one_that_is_set(short):
    assert set(fastest(sleeps(dict.fromkeys(range(13), 0.001)), 12).seconds) == {1, 2, 4, 8, 12}
    assert set(fastest(sleeps({1: 0.001}), 1).seconds) == {1}


def test_steps_that_take_long_are_not_tried_with_less(monkeypatch):
    monkeypatch.setattr(_threads, "MOST", 0.05)
    done = []
    found = fastest(lambda: (done.append(torch.get_num_threads()), time.sleep(0.04)), 4)
    assert found.threads == 4 and set(found.seconds) == {4} and set(done) == {4}


def net(middle=None):
    torch.manual_seed(0)
    layers = [nn.Linear(6, 64), nn.BatchNorm1d(64), nn.ReLU(), *([middle] if middle else []), nn.Linear(64, 2)]
    return convert(nn.Sequential(*layers), log_sigma2=-6.0)


def train(model, **more):
    x = torch.randn(60, 6, generator=torch.Generator().manual_seed(0))
    settings = Training(epochs=2, batch_size=16, lr=1e-2)
    return fit(model, InMemory(x, (x[:, 0] > 0).long()), LOSS, settings, schedule=Constant(0.5), device="cpu", **more)


def assert_same(one, other):
    assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in one.state_dict().items())


def test_a_trial_leaves_no_trace_but_the_number(short):
    tried, plain, found = net(), net(), []
    with choosing(found.append):
        result = train(tried)
        (trial,) = found
        assert torch.get_num_threads() == trial.threads
        train(net())  # another fit keeps that number
        assert len(found) == 1
    assert not trial.failed and set(trial.seconds) == {1, 2, 4} and trial.threads in trial.seconds
    assert result.history == train(plain).history
    assert_same(tried, plain)


def test_what_is_told_comes_before_any_training(short, tmp_path):
    model = net()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def tell(trial):
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
        raise KeyboardInterrupt

    with choosing(tell), pytest.raises(KeyboardInterrupt):
        train(model, state=tmp_path / "fit.pt")
    assert torch.load(tmp_path / "fit.pt", weights_only=True)["epoch"] == 0


def test_a_known_number_is_taken_without_a_trial_even_where_nothing_is_left_to_train(tmp_path):
    train(net(), state=tmp_path / "fit.pt")
    with choosing(pytest.fail, known=3):
        assert torch.get_num_threads() == 4  # until training starts
        train(net(), state=tmp_path / "fit.pt")
        assert torch.get_num_threads() == 3


def test_a_finished_fit_tries_nothing(tmp_path):
    train(net(), state=tmp_path / "fit.pt")
    with choosing(pytest.fail):
        train(net(), state=tmp_path / "fit.pt")


def test_a_number_that_somebody_sets_stays():
    found = []
    with choosing(found.append):
        torch.set_num_threads(3)  # as a model's own module might
        train(net())
        assert torch.get_num_threads() == 3
    assert found == [Trial(3)]
    assert str(found[0]) == "3 PyTorch threads, as set"
    torch.set_num_threads(1)
    with choosing(found.append):
        train(net())
    assert found[1] == Trial(1)


def test_a_fit_alone_tries_nothing(monkeypatch):
    monkeypatch.setattr(_threads, "_tried", lambda *args: pytest.fail("a trial"))
    train(net())
    assert torch.get_num_threads() == 4


class Faulty(nn.Module):
    def forward(self, x):
        raise ZeroDivisionError("mine")


def test_a_trial_that_fails_is_said_and_the_error_is_the_trainings(short):
    found = []
    with choosing(found.append), pytest.raises(ModelError, match="ZeroDivisionError: mine"):
        train(net(Faulty()))
    assert found[0].threads == torch.get_num_threads() == 4
    assert "the trial of other numbers failed (ZeroDivisionError: mine)" in str(found[0])


def test_figures_are_said_in_a_line():
    assert str(Trial(1, {1: 0.0007, 2: 0.00342})) == "PyTorch threads: 1 (a step takes 0.7 ms with 1, 3.42 ms with 2)"
