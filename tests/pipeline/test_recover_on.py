"""The epochs that a search's trials leave over: the best trial continues its recovery, with the same masks."""

import pytest
import torch
from test_search import searching

from svdcompress import checkpoint
from svdcompress.errors import Interrupted
from svdcompress.pipeline import _search, _search_trials, _trainer, levels_and_trials, run
from svdcompress.pipeline._search_cost import left_for
from svdcompress.search import Budget, Losses
from svdcompress.sources import make_model
from svdcompress.train import Bars

GOAL = (
    "model.args={sizes: [64, 32, 24, 10]}",
    "search.goal='parameters=6x'",
    "search.trials=null",
    "search.levels=1",
    "train.epochs=7",  # two of them for cooling
    "recover.epochs=3",
)


@pytest.fixture(scope="module")
def undisturbed(tiny_recipe, tmp_path_factory):
    """A search for a size, the small model at the start of the last recovery, and the lines printed."""
    out, began, said = tmp_path_factory.mktemp("on") / "run", [], []
    working = Bars.working
    stage = _search_trials.recover_stage

    def noting(context, dense, variational, small, file, **more):
        if "-of-" in more["state"].parent.name:  # trial-3-of-1-EPOCHS
            began.append({name: value.clone() for name, value in small.model.state_dict().items()})
        return stage(context, dense, variational, small, file, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_search_trials, "recover_stage", noting)
        patch.setattr(_search.Search, "_say", lambda search, line: said.append(line))
        patch.setattr(Bars, "working", lambda bars, what, stays=True: said.append(what) or working(bars, what, stays))
        results = run(searching(tiny_recipe, *GOAL), out)
    return out, results, began, said


def model_of(results, out, number, recipe):
    return checkpoint.load(out / "trials" / f"{number:02d}.safetensors", make_model(recipe.model))


def test_the_best_trial_recovers_on_with_its_masks(undisturbed, tiny_recipe):
    out, results, (began,), _ = undisturbed
    *asked, last = results["search"]["trials"]
    assert [trial["continues"] for trial in asked] == [None] * len(asked) and last["number"] == len(asked) + 1
    best = min(asked, key=lambda one: one["drop"] if one["estimate"] is None else one["estimate"])
    assert last["continues"] == best["number"] and last["costs"] == best["costs"]
    if results["search"]["chosen"] == last["number"]:
        assert last["costs"]["parameters"] == results["sparse"]["parameters"]
    recipe = searching(tiny_recipe, *GOAL)
    before, after = (model_of(results, out, number, recipe).state_dict() for number in (best["number"], last["number"]))
    assert before.keys() == after.keys() == began.keys()
    assert all(torch.equal(began[name], before[name]) for name in before)
    names = [name for name in before if name.endswith(".weight") and before[name].ndim == 2]
    assert names and all(torch.equal(before[name] == 0, after[name] == 0) for name in names)
    assert not any(torch.equal(before[name], after[name]) for name in names)


def test_it_has_the_epochs_that_are_left(undisturbed, tiny_recipe):
    _, results, *_ = undisturbed
    found, recipe = results["search"], searching(tiny_recipe, *GOAL)
    _, trials = levels_and_trials(recipe)
    assert trials == len(found["trials"]) - 1
    spent = len(found["path"]) * 1 + trials * (2 + 3)  # by hand: a level, and the cooling and recovery of each trial
    assert found["epochs"] == {"search": spent + min(3 * 10 - spent, 2 * 3), "one_run": 10}
    assert left_for(recipe, spent) == min(3 * 10 - spent, 2 * 3) >= 3  # at least one recovery
    chosen = next(trial for trial in found["trials"] if trial["number"] == found["chosen"])
    stages = [row["stage"] for row in results["history"]]
    ways = {chosen["number"], chosen["continues"]} - {None}
    assert {stage for stage in stages if stage.startswith("trial ")} == {f"trial {number}" for number in ways}


def test_the_better_one_of_both_is_taken(undisturbed):
    _, results, *_ = undisturbed
    found = results["search"]
    size = 1.02 * found["dense"]["costs"]["parameters"] / 6
    there = [trial for trial in found["trials"] if trial["costs"]["parameters"] <= size]
    lost = [trial["drop"] if trial["estimate"] is None else trial["estimate"] for trial in there]
    chosen = next(trial for trial in there if trial["number"] == found["chosen"])
    assert (chosen["drop"] if chosen["estimate"] is None else chosen["estimate"]) == min(lost)


def test_it_is_said_which_trial_recovered_on(undisturbed):
    _, results, _, said = undisturbed
    last = results["search"]["trials"][-1]
    assert sum(f"trial {last['number']} (trial {last['continues']} recovered further): " in line for line in said) == 1


def test_what_has_no_epochs_is_seen_to_go_on(undisturbed):
    """With a large model on a CPU, the choice of what to remove took 15 minutes without any output."""
    *_, said = undisturbed
    levels = said.index(next(line for line in said if line.startswith("level ")))
    assert "judging the dense model" in said[:levels]
    assert "measuring" in said[:levels] and "measuring" in said[levels:] and "choosing" in said[levels:]


@pytest.mark.parametrize("epoch", [1, 2])
def test_a_stop_in_it_ends_in_the_same_bytes(undisturbed, tiny_recipe, tmp_path, monkeypatch, epoch):
    whole, results, *_ = undisturbed
    last = results["search"]["trials"][-1]["number"]

    def stop(self, row):
        if row["stage"] == f"trial {last}" and row["epoch"] == epoch:
            self.context.stop.signal = "SIGTERM"

    recipe = searching(tiny_recipe, *GOAL)
    with monkeypatch.context() as patched:
        patched.setattr(_trainer.Trainer, "_log", stop)
        with pytest.raises(Interrupted):
            run(recipe, tmp_path / "run")
    again = run(recipe, tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert again["search"]["epochs"] == results["search"]["epochs"]


def test_a_stop_after_it_ends_in_the_same_bytes_and_more_trials_may_follow(undisturbed, tiny_recipe, tmp_path, monkeypatch):
    whole, results, *_ = undisturbed
    recipe, there = searching(tiny_recipe, *GOAL), len(results["search"]["trials"])

    def die(search, best, lines):
        raise Interrupted("SIGTERM")

    for folder in ("run", "more"):
        with monkeypatch.context() as patched:
            patched.setattr(_search.Search, "_report", die)
            with pytest.raises(Interrupted):
                run(recipe, tmp_path / folder)
    run(recipe, tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    more = run(searching(tiny_recipe, *GOAL, f"search.trials={there + 1}"), tmp_path / "more", resume=True)["search"]["trials"]
    assert [trial["continues"] is None for trial in more] == [True] * (there - 1) + [False] + [True] * (len(more) - there)
    assert len(more) > there


def test_it_recovers_on_once_whatever_is_left_after_it(tiny_recipe, tmp_path, monkeypatch):
    recipe = searching(tiny_recipe, *GOAL, "train.epochs=10", "recover.epochs=1")

    def die(search, best, lines):
        raise Interrupted("SIGTERM")

    with monkeypatch.context() as patched:
        patched.setattr(_search.Search, "_report", die)
        with pytest.raises(Interrupted):
            run(recipe, tmp_path / "run")
    found = run(recipe, tmp_path / "run", resume=True)["search"]
    assert left_for(recipe, found["epochs"]["search"]) > 0  # epochs are left over
    assert [trial["continues"] is None for trial in found["trials"]] == [True] * (len(found["trials"]) - 1) + [False]


def test_within_a_budget_and_of_single_weights_the_best_recovers_on_too(tiny_recipe, tmp_path):
    recipe = searching(
        tiny_recipe, *GOAL, "search.goal=null", "search.max_drop=30", "search.objective=nonzero", "search.cuts=8"
    )
    found = run(recipe, tmp_path / "run")["search"]
    *asked, last = found["trials"]
    assert last["continues"] == min((one for one in asked if one["met"]), key=lambda one: one["costs"]["nonzero"])["number"]
    assert found["epochs"]["search"] <= 30 and found["met"] is True


def test_that_training_examples_fit_better_is_no_evidence():
    def losses(validation, training):
        return Losses(torch.zeros(3), torch.ones(3), True, torch.tensor([validation] * 3 + [training] * 5))

    before, after = losses(0.2, 0.1), losses(0.3, 0.0)
    assert torch.equal(after.held_out(before).nll, torch.tensor([0.3] * 3 + [0.1] * 5))
    dense, budget = losses(0.2, 0.1), Budget(1.0, None, 0.9)
    assert (
        budget.judge(dense, after).estimate
        < budget.judge(dense, before).estimate
        < budget.judge(dense, after.held_out(before)).estimate
    )
    plain = Losses(torch.zeros(3), torch.ones(3), True)
    assert plain.held_out(plain) is plain


def test_where_trials_are_set_or_nothing_is_left_none_recovers_on(tiny_recipe, tmp_path):
    for settings in (["search.trials=1"], ["recover.epochs=0"]):
        found = run(searching(tiny_recipe, *GOAL, *settings), tmp_path / settings[0])["search"]
        assert all(trial["continues"] is None for trial in found["trials"])
