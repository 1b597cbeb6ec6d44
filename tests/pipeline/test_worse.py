"""A recovery that clearly makes a network worse is undone, repeated at a tenth of its rate, and reported; any other is kept."""

from dataclasses import replace

import pytest
import torch
from test_search import searching

from svdcompress.errors import CheckpointError, Interrupted, TrainingError
from svdcompress.pipeline import _recover, open_run, run
from svdcompress.pipeline._search_cost import trained
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
    first, second = worse(results)
    assert first.startswith("trial 1: 2 epochs of recovery made the network worse") and "so it was restored. Rec" in first
    assert f"{untrained[1]['search']['trials'][0]['error']:.4g}% before)" in first
    assert first.endswith("at a learning rate of 0.3 (it was 3); --set recover.lr=0.3 does so at once")
    assert "the second attempt made the network worse, too" in second and second.endswith("--set recover.lr=0.03")
    assert results["search"]["trials"][0]["error"] == untrained[1]["search"]["trials"][0]["error"]
    assert same(tensors(tmp_path / "run"), untrained[0])
    rows = [row["epoch"] for row in results["history"] if row["stage"] == "trial 1"]
    assert rows == [1, 2, 1, 2]  # discarded epochs stay recorded
    assert results["search"]["epochs"]["search"] == 4
    assert results["recover_lr"] == open_run(tmp_path / "run").recovery.lr == 0.03  # neither of those that failed


def test_epochs_of_a_second_attempt_count_where_trials_share_their_cooling_too():
    cooled = [{"stage": "pressure 1.000, part 1", "epoch": epoch} for epoch in (1, 2)]
    rows = [{"stage": "trial 1", "epoch": epoch} for epoch in (1, 2, 1, 2)]
    more = [{"stage": "trial 2", "epoch": epoch} for epoch in (1, 2)]
    assert trained(3, [cooled + rows, cooled + more], shared=True) == 3 + 2 + 4 + 2
    assert trained(3, [cooled + rows, cooled + more], shared=False) == 3 + 4 + 4 + 2


def stopping(monkeypatch, attempts, steps=0):
    """Stops a run in its recovery of this number, after so many steps of it."""
    fit, seen = Trainer.fit, []

    def stopped(self, model, stage, settings, **more):
        if stage not in ("dense", "train"):
            seen.append(settings.lr)
            if len(seen) == attempts:
                asked = iter([False] * steps)
                self = replace(self, context=replace(self.context, stop=lambda: next(asked, True)))
        return fit(self, model, stage, settings, **more)

    monkeypatch.setattr(Trainer, "fit", stopped)
    monkeypatch.setattr("svdcompress.train._state.SHARE_OF_TIME", 1e9)  # save after each epoch
    return seen


@pytest.mark.parametrize("steps", [0, 12])
def test_a_tenth_of_the_rate_does_what_it_would_have_done_at_once(tiny_recipe, tmp_path, monkeypatch, steps):
    recipe = searching(tiny_recipe, *AT_ONCE, *MEANS, "recover.lr=0.3", "recover.batch_size=32")
    results = run(recipe, tmp_path / "twice")
    (line,) = worse(results)
    assert line.endswith("Recovery begins again at a learning rate of 0.03 (it was 0.3); --set recover.lr=0.03 does so at once")
    once = searching(tiny_recipe, *AT_ONCE, *MEANS, "recover.lr=0.03", "recover.batch_size=32")
    alone = run(once, tmp_path / "once")
    assert not worse(alone) and same(tensors(tmp_path / "twice"), tensors(tmp_path / "once"))
    assert (results["recover_lr"], results["search"]["trials"][0]["recover_lr"]) == (0.03, 0.03)
    assert open_run(tmp_path / "twice").recovery.lr == 0.03 and open_run(tmp_path / "once").recovery.lr == 0.03
    assert not alone.get("recover_lr")
    with monkeypatch.context() as patch:
        seen = stopping(patch, 2, steps)
        with pytest.raises(Interrupted):
            run(recipe, tmp_path / "stopped")
        assert seen == [0.3, 0.03]
    again = run(recipe, tmp_path / "stopped", resume=True)
    assert worse(again) == [line] and same(tensors(tmp_path / "stopped"), tensors(tmp_path / "once"))
    assert [row["lr"] for row in again["history"]] == [row["lr"] for row in results["history"]]


@pytest.mark.parametrize("search", [True, False])
def test_a_run_that_is_resumed_with_another_rate_tries_that_one(tiny_recipe, tmp_path, monkeypatch, search):
    settings = AT_ONCE if search else ("train.epochs=3", "dense.epochs=8")

    def recipe(lr):
        made = searching(tiny_recipe, *settings, *MEANS, f"recover.lr={lr}")
        return made if search else made.model_copy(update={"search": tiny_recipe.search})

    run(recipe(0.002), tmp_path / "once")
    with monkeypatch.context() as patch:
        seen = stopping(patch, 2)
        with pytest.raises(Interrupted):
            run(recipe(3), tmp_path / "run")
        assert seen == [3, pytest.approx(0.3)]
    results = run(recipe(0.002), tmp_path / "run", resume=True)
    assert same(tensors(tmp_path / "run"), tensors(tmp_path / "once"))
    if search:  # the first attempt is not repeated
        before, line = worse(results)
        assert "at a learning rate of 0.3 (it was 3)" in before and "at a learning rate of 0.002 (it was 3)" in line
    else:
        assert not worse(results)


@pytest.mark.parametrize("done", [1, 2])
def test_rates_of_attempts_that_were_done_before_a_stop_are_told_as_they_were(tiny_recipe, tmp_path, monkeypatch, done):
    judged, calls = _recover.on_validation, []

    def stops(context, *given, **more):
        calls.append(1)
        if len(calls) == 1 + done:
            raise Interrupted("stopped")
        return judged(context, *given, **more)

    with monkeypatch.context() as patch:
        patch.setattr(_recover, "on_validation", stops)
        with pytest.raises(Interrupted):
            run(searching(tiny_recipe, *AT_ONCE, *WILD), tmp_path / "run")
    results = run(searching(tiny_recipe, *AT_ONCE, *MEANS, "recover.lr=0.002"), tmp_path / "run", resume=True)
    first, *second = worse(results)
    assert f"Recovery begins again at a learning rate of {0.002 if done == 1 else 0.3} (it was 3)" in first
    if done == 1:
        assert not second and results["recover_lr"] == 0.002
    else:
        assert second[0].endswith("--set recover.lr=0.03")


def test_the_rate_of_the_variances_falls_with_the_other(tiny_recipe, tmp_path, monkeypatch):
    def noted(self, model, stage, settings, **more):
        if stage.startswith("trial"):
            seen.append((settings.lr, settings.lr_log_sigma2))
        return fit(self, model, stage, settings, **more)

    fit, seen = Trainer.fit, []
    monkeypatch.setattr(Trainer, "fit", noted)
    monkeypatch.setattr(_recover, "surely_worse", lambda before, after: len(seen) < 2)
    noisy = (*MEANS, "recover.noise=true", "recover.lr=0.003", "recover.lr_log_sigma2=0.02")
    results = run(searching(tiny_recipe, *AT_ONCE, *noisy), tmp_path / "run")
    assert seen == [(0.003, 0.02), (0.0003, pytest.approx(0.002))] and results["recover_lr"] == 0.0003


def test_a_damaged_note_of_a_failure_says_what_to_remove(tiny_recipe, tmp_path, monkeypatch):
    recipe = searching(tiny_recipe, *AT_ONCE, *WILD)
    with monkeypatch.context() as patch:
        stopping(patch, 2)
        with pytest.raises(Interrupted):
            run(recipe, tmp_path / "run")
    (file,) = (tmp_path / "run").rglob("recover-again.json")
    whole = file.read_text()
    for content in (whole[:-9], whole.replace('"rate": 3', '"rate": "3"'), "[]"):
        file.write_text(content)
        with pytest.raises(CheckpointError, match=r"recover-again.json: damaged \(.*; remove it and recover\*.pt beside it"):
            run(recipe, tmp_path / "run", resume=True)
    for one in (file, *file.parent.glob("recover*.pt")):
        one.unlink()
    run(recipe, tmp_path / "run", resume=True)


def test_a_loss_that_is_not_finite_is_worse_too(tiny_recipe, tmp_path, monkeypatch, untrained):
    def diverges(self, model, stage, settings, **more):
        if stage.startswith("trial") and not low < settings.lr < high:
            with torch.no_grad():
                next(iter(model.parameters())).fill_(torch.nan)
            raise NotFinite("the loss is nan.", stage, "recover", where="at step 3 (epoch 1)", rate=rate and settings.lr)
        return fit(self, model, stage, settings, **more)

    low, high, rate, fit = 0.0, 0.02, True, Trainer.fit
    given = (*AT_ONCE, *MEANS, "recover.lr=0.01")
    run(searching(tiny_recipe, *given), tmp_path / "once")
    monkeypatch.setattr(Trainer, "fit", diverges)
    fast = searching(tiny_recipe, *given, "recover.lr=0.1")
    results = run(fast, tmp_path / "run")
    (line,) = [line for line in results["warnings"] if "not finite" in line]
    assert line.startswith(
        "trial 1: the loss of recovery was not finite at step 3 (epoch 1), so the network was restored. Recovery begins again"
    )
    assert line.endswith("at a learning rate of 0.01 (it was 0.1); --set recover.lr=0.01 does so at once")
    assert same(tensors(tmp_path / "run"), tensors(tmp_path / "once"))
    late = run(searching(tiny_recipe, *given, "recover.lr=0.1", "search.max_minutes=0.0001"), tmp_path / "late")
    (line,) = [line for line in late["warnings"] if "not finite" in line]
    assert "so the network was restored. Steps this large" in line and "--set recover.lr=0.01 (it was 0.1)" in line
    assert same(tensors(tmp_path / "late"), untrained[0])
    high = 0.001
    with pytest.raises(
        TrainingError, match=r"the loss is nan. \(This was the second attempt; at 0.1, the loss of recovery was"
    ):
        run(fast, tmp_path / "both")
    low, high = 0.1, 1.0  # worse at 0.3, not finite at 0.03
    results = run(searching(tiny_recipe, *given, "recover.lr=0.3"), tmp_path / "other")
    lines = [line for line in results["warnings"] if "trial 1: " in line and "restored" in line]
    assert len(lines) == 2 and "the loss of the second attempt was not finite at step 3 (epoch 1), so it was" in lines[1]
    assert same(tensors(tmp_path / "other"), untrained[0])
    low, high, rate = 0.0, 0.02, None  # because of the inputs
    with pytest.raises(TrainingError, match="the loss is nan"):
        run(fast, tmp_path / "inputs")


def test_when_the_time_is_up_there_is_no_second_attempt(tiny_recipe, tmp_path, untrained):
    results = run(searching(tiny_recipe, *AT_ONCE, *WILD, "search.max_minutes=0.0001"), tmp_path / "run")
    (line,) = worse(results)
    assert line.endswith("so it was restored. Steps this large destroy more than they recover: --set recover.lr=0.3 (it was 3)")
    assert same(tensors(tmp_path / "run"), untrained[0])
    assert len([row for row in results["history"] if row["stage"] == "trial 1"]) == 2
    assert results["recover_lr"] == 0.3


def test_a_recovery_that_helps_is_kept(tiny_recipe, tmp_path, untrained):
    results = run(searching(tiny_recipe, *AT_ONCE, "recover.epochs=2", "recover.lr=0.001"), tmp_path / "run")
    assert not worse(results) and not same(tensors(tmp_path / "run"), untrained[0])


def test_a_run_without_a_search_has_it_too(tiny_recipe, tmp_path):
    found = {}
    for name, settings in {"none": ("recover.epochs=0",), "wild": WILD}.items():
        recipe = searching(tiny_recipe, "train.epochs=3", "dense.epochs=8", *settings)
        recipe = recipe.model_copy(update={"search": tiny_recipe.search})
        found[name] = run(recipe, tmp_path / name), tensors(tmp_path / name)
    line, _ = worse(found["wild"][0])
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
