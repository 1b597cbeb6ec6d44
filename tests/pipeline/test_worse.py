"""A recovery that clearly makes a network worse is undone, repeated at a tenth of its rate, and reported; any other is kept."""

import pytest
import torch
from test_search import searching

from svdcompress.errors import Interrupted, TrainingError
from svdcompress.pipeline import open_run, run
from svdcompress.pipeline._trainer import Trainer
from svdcompress.search import Losses, surely_worse
from svdcompress.train import NotFinite

AT_ONCE = ("search.goal='parameters=1.5x'", "search.trials=1", "search.levels=1", "train.epochs=0", "dense.epochs=8")
MEANS = ("recover.epochs=2", "recover.noise=false", "recover.clip=null")
WILD = (*MEANS, "recover.lr=3")


def tensors(out):
    return {name: value for name, value in open_run(out).model.state_dict().items() if "log_sigma2" not in name}


def worse(results):
    return [line for line in results["warnings"] if "made the network worse" in line]


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def untrained(tiny_recipe, tmp_path_factory):
    """A network that was cut and never trained again."""
    out = tmp_path_factory.mktemp("cut") / "run"
    results = run(searching(tiny_recipe, *AT_ONCE, "recover.epochs=0"), out)
    assert not worse(results)
    return tensors(out), results


def test_steps_that_are_too_large_are_undone_in_a_search(tiny_recipe, tmp_path, untrained):
    results = run(searching(tiny_recipe, *AT_ONCE, *WILD), tmp_path / "run")
    (line,) = worse(results)
    assert line.startswith("trial 1: 2 epochs of recovery") and line.endswith("--set recover.lr=0.03")
    assert f"{untrained[1]['search']['trials'][0]['error']:.4g}% before them" in line
    assert "and again after as many epochs at a learning rate of 0.3 instead of 3" in line
    assert results["search"]["trials"][0]["error"] == untrained[1]["search"]["trials"][0]["error"]
    assert same(tensors(tmp_path / "run"), untrained[0])
    rows = [row["epoch"] for row in results["history"] if row["stage"] == "trial 1"]
    assert rows == [1, 2, 1, 2]  # discarded epochs stay recorded
    assert results["search"]["epochs"]["search"] == 4


def test_a_tenth_of_the_rate_does_what_it_would_have_done_at_once(tiny_recipe, tmp_path, monkeypatch):
    recipe = searching(tiny_recipe, *AT_ONCE, *MEANS, "recover.lr=0.3")
    results = run(recipe, tmp_path / "twice")
    (line,) = worse(results)
    assert "so it was restored, and recovered at a learning rate of 0.03 instead of 0.3 (" in line
    assert line.endswith("--set recover.lr=0.03 does so at once")
    once = run(searching(tiny_recipe, *AT_ONCE, *MEANS, "recover.lr=0.03"), tmp_path / "once")
    assert not worse(once) and same(tensors(tmp_path / "twice"), tensors(tmp_path / "once"))
    assert f"({once['search']['trials'][0]['error']:.4g}%)" in line

    def stopped(self, model, stage, settings, **more):
        if settings.lr < 0.1 and stage != "dense":
            raise Interrupted("stopped")
        return fit(self, model, stage, settings, **more)

    fit = Trainer.fit
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "fit", stopped)
        with pytest.raises(Interrupted):
            run(recipe, tmp_path / "stopped")
    again = run(recipe, tmp_path / "stopped", resume=True)
    assert worse(again) == [line] and same(tensors(tmp_path / "stopped"), tensors(tmp_path / "once"))


def test_a_loss_that_is_not_finite_is_worse_too(tiny_recipe, tmp_path, monkeypatch):
    def diverges(self, model, stage, settings, **more):
        if stage.startswith("trial") and settings.lr > most:
            with torch.no_grad():
                next(iter(model.parameters())).fill_(torch.nan)
            raise NotFinite("the loss is nan", stage, "recover", where="at step 3 (epoch 1)", rate=rate and settings.lr)
        return fit(self, model, stage, settings, **more)

    most, rate, fit = 0.02, True, Trainer.fit
    given = (*AT_ONCE, *MEANS, "recover.lr=0.01")
    once = run(searching(tiny_recipe, *given), tmp_path / "once")
    monkeypatch.setattr(Trainer, "fit", diverges)
    results = run(searching(tiny_recipe, *given, "recover.lr=0.1"), tmp_path / "run")
    (line,) = [line for line in results["warnings"] if "not finite" in line]
    assert line.startswith("trial 1: the loss of recovery was not finite at step 3 (epoch 1), so the network was restored, and")
    assert f"at a learning rate of 0.01 instead of 0.1 ({once['search']['trials'][0]['error']:.4g}%)" in line
    assert same(tensors(tmp_path / "run"), tensors(tmp_path / "once"))
    most = 0.001
    with pytest.raises(TrainingError, match="the loss is nan"):  # at both rates
        run(searching(tiny_recipe, *given, "recover.lr=0.1"), tmp_path / "both")
    most, rate = 0.02, None  # because of the inputs
    with pytest.raises(TrainingError, match="the loss is nan"):
        run(searching(tiny_recipe, *given, "recover.lr=0.1"), tmp_path / "inputs")


def test_when_the_time_is_up_there_is_no_second_attempt(tiny_recipe, tmp_path, untrained):
    results = run(searching(tiny_recipe, *AT_ONCE, *WILD, "search.max_minutes=0.0001"), tmp_path / "run")
    (line,) = worse(results)
    assert line.endswith("so it was restored. Steps this large destroy more than they recover: --set recover.lr=0.3 (it was 3)")
    assert same(tensors(tmp_path / "run"), untrained[0])
    assert len([row for row in results["history"] if row["stage"] == "trial 1"]) == 2


def test_a_recovery_that_helps_is_kept(tiny_recipe, tmp_path, untrained):
    results = run(searching(tiny_recipe, *AT_ONCE, "recover.epochs=2", "recover.lr=0.001"), tmp_path / "run")
    assert not worse(results) and not same(tensors(tmp_path / "run"), untrained[0])


def test_a_run_without_a_search_has_it_too(tiny_recipe, tmp_path):
    found = {}
    for name, settings in {"none": ("recover.epochs=0",), "wild": WILD}.items():
        recipe = searching(tiny_recipe, "train.epochs=3", "dense.epochs=8", *settings)
        recipe = recipe.model_copy(update={"search": tiny_recipe.search})
        found[name] = run(recipe, tmp_path / name), tensors(tmp_path / name)
    (line,) = worse(found["wild"][0])
    assert line.startswith("recover: 2 epochs") and same(found["wild"][1], found["none"][1])


def test_what_chance_explains_is_not_worse():
    def losses(wrong, count=500):
        return Losses(torch.arange(count) < wrong, torch.ones(count), True)

    assert not surely_worse(losses(30), losses(30)) and not surely_worse(losses(30), losses(31))
    assert not surely_worse(losses(30), losses(20)) and surely_worse(losses(30), losses(57))


def test_squares_are_compared_by_pairs():
    squares = torch.rand(400, generator=torch.Generator().manual_seed(0)) ** 2
    one = torch.ones(400)
    before = Losses(squares, one, False)
    assert not surely_worse(before, before) and surely_worse(before, Losses(1.05 * squares, one, False))
    assert not surely_worse(before, Losses(squares.flip(0), one, False)) and not surely_worse(
        before, Losses(0.9 * squares, one, False)
    )
