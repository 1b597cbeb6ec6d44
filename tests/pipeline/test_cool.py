"""A trial that is cut to its size in steps: the size of each step, that removed units stay away, and stops between steps."""

import re
from dataclasses import replace

import pytest
import torch
from test_search import searching

from svdcompress.errors import CheckpointError, Interrupted
from svdcompress.layers import variational_layers
from svdcompress.pipeline import _trainer, levels_and_trials, run
from svdcompress.pipeline._path import Climb
from svdcompress.pipeline._search_trials import Trials
from svdcompress.pipeline._unit_ways import Units

SHAPES = (
    "model.args={sizes: [64, 24, 20, 10]}",
    "search.goal='parameters=6x'",
    "search.trials=1",
    "search.levels=1",
    "search.mixture=off",
    "search.reconstruct=off",  # test_reconstruct_cuts.py has it on
    "train.epochs=13",  # four of them to cool
    "recover.epochs=2",
)


class Seen:
    """The size asked for in each step of a search, and the masks and weights around its training."""

    def __init__(self, patch):
        self.sizes, self.names, self.stages, self.masks, self.before, self.after = [], [], [], [], [], []
        part, fit = Units.part, Climb.fit

        def noting_part(ways, size, name):
            self.sizes.append(size)
            self.names.append(name)
            return part(ways, size, name)

        def noting_fit(climb, model, stage, *given):
            self.stages.append(stage)
            self.masks.append({name: layer.mask for name, layer in variational_layers(model)})
            self.before.append({name: layer.weight.detach().clone() for name, layer in variational_layers(model)})
            found = fit(climb, model, stage, *given)
            self.after.append({name: layer.weight.detach().clone() for name, layer in variational_layers(model)})
            return found

        patch.setattr(Units, "part", noting_part)
        patch.setattr(Climb, "fit", noting_fit)


@pytest.fixture(scope="module")
def cut(tiny_recipe, tmp_path_factory):
    out = tmp_path_factory.mktemp("cool") / "run"
    with pytest.MonkeyPatch.context() as patch:
        seen = Seen(patch)
        results = run(searching(tiny_recipe, *SHAPES), out)
    return seen, out, results


def test_steps_are_equal_ratios_from_what_is_there_to_the_goal(cut):
    seen, _, results = cut
    (trial,) = results["search"]["trials"]
    dense, target = results["search"]["dense"]["costs"]["parameters"], results["search"]["dense"]["costs"]["parameters"] / 6
    natural = dense / trial["natural"]
    assert natural > 2 * target  # otherwise there is nothing to test
    ratio = (target / natural) ** 0.25
    assert seen.sizes == pytest.approx([natural * ratio, natural * ratio**2, natural * ratio**3], rel=1e-6)
    assert trial["costs"]["parameters"] <= 1.02 * target and results["search"]["reached"] is True
    assert [re.sub(r"pressure [\d.-]+, ", "", stage) for stage in seen.stages] == ["part 1", "part 2", "part 3", "part 4"]


def test_what_went_stays_away_and_is_whole_units(cut):
    seen, _, results = cut
    assert all(mask is None for mask in seen.masks[0].values())
    left = []
    for masks, before, after in zip(seen.masks[1:], seen.before[1:], seen.after[1:], strict=True):
        moved = False
        for name, mask in masks.items():
            assert torch.equal(before[name][~mask], after[name][~mask])
            moved |= not torch.equal(before[name][mask], after[name][mask])
            rows, columns = mask.any(1), mask.any(0)
            assert torch.equal(mask, rows[:, None] & columns[None, :])  # no masked weights between remaining units
        assert moved
        left.append(sum(int(mask.sum()) for mask in masks.values()))
    assert left == sorted(left, reverse=True) and len(set(left)) == 3
    for earlier, later in zip(seen.masks[1:], seen.masks[2:], strict=False):
        assert all(not (later[name] & ~earlier[name]).any() for name in later)
    last = {row["name"]: row["weights"] for row in results["layers"]}
    assert all(last[name] <= int(mask.sum()) for name, mask in seen.masks[-1].items())


def test_all_steps_go_the_way_that_is_chosen_once(cut, tiny_recipe, tmp_path, monkeypatch):
    """An even ranking leaves other units in each step than the usual one; after a stop, nothing is chosen again."""
    asked = []

    def choose(trials, to_size):
        asked.append((usual := to_size.usual()).name)
        return replace(usual, name="even-by-outputs")

    def stop(self, row):
        if row["stage"].endswith(", part 2"):
            self.context.stop.signal = "SIGTERM"

    monkeypatch.setattr(Trials, "_way", choose)
    seen, recipe = Seen(monkeypatch), searching(tiny_recipe, *SHAPES)
    with monkeypatch.context() as patched:
        patched.setattr(_trainer.Trainer, "_log", stop)
        with pytest.raises(Interrupted):
            run(recipe, tmp_path / "run")
    run(recipe, tmp_path / "run", resume=True)
    assert asked == ["global"] and set(seen.names) == {"even-by-outputs"} and len(seen.names) >= 3
    assert cut[0].names == ["global"] * 3  # without a choice
    usual, even = ([int(mask.any(1).sum()) for mask in found.masks[1].values()] for found in (cut[0], seen))
    assert usual != even


@pytest.mark.parametrize("part", [1, 2, 4])
def test_a_stop_in_a_step_ends_in_the_same_bytes(cut, tiny_recipe, tmp_path, monkeypatch, part):
    _, whole, results = cut

    def stop(self, row):
        if row["stage"].endswith(f", part {part}"):
            self.context.stop.signal = "SIGTERM"

    with monkeypatch.context() as patched:
        patched.setattr(_trainer.Trainer, "_log", stop)
        with pytest.raises(Interrupted):
            run(searching(tiny_recipe, *SHAPES), tmp_path / "run")
    again = run(searching(tiny_recipe, *SHAPES), tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert again["search"]["epochs"] == results["search"]["epochs"]
    assert [row["stage"] for row in again["history"]] == [row["stage"] for row in results["history"]]


@pytest.mark.parametrize("other", [["search.cuts=1"], ["search.goal='nonzero=6x'"]], ids=["at once", "single weights"])
def test_one_cut_is_one_part(tiny_recipe, tmp_path, monkeypatch, other):
    seen = Seen(monkeypatch)
    results = run(searching(tiny_recipe, *SHAPES, *other), tmp_path / "run")
    assert len(seen.stages) == 1 and seen.sizes == []
    assert results["search"]["reached"] is True
    assert results["search"]["epochs"] == {"search": 2 + 4 + 2, "one_run": 13 + 2}


def test_a_trial_whose_posterior_is_gone_is_said(tiny_recipe, tmp_path, monkeypatch):
    out = tmp_path / "run"

    def stop(self, row):
        if row["stage"] == "trial 2":
            self.context.stop.signal = "SIGTERM"

    recipe = searching(tiny_recipe, *SHAPES, "search.trials=2")
    with monkeypatch.context() as patched:
        patched.setattr(_trainer.Trainer, "_log", stop)
        with pytest.raises(Interrupted):
            run(recipe, out)
    file = out / "state" / "search" / "cooled-1.safetensors"
    assert file.is_file() and not (file.parent / "trial-1").exists()
    file.unlink()
    with pytest.raises(CheckpointError, match=r"cooled-1.safetensors: missing, .*remove .*search to search again"):
        run(recipe, out, resume=True)


# What may change, and what is reported


@pytest.mark.parametrize("stage", ["part 2", "trial 2"])
def test_more_trials_on_resume_make_another_trial_of_the_one_that_was_under_way(tiny_recipe, tmp_path, monkeypatch, stage):
    """With a goal and a budget, half of the trials are for the goal: what the second trial is for depends on their number."""
    both = ("search.max_drop=0", "search.levels=2")
    stages = []

    def stop(self, row):
        stages.append(row["stage"])
        if row["stage"].endswith(stage) and ("trial 1" in stages or stage == "trial 2"):
            self.context.stop.signal = "SIGTERM"

    with monkeypatch.context() as patched:
        patched.setattr(_trainer.Trainer, "_log", stop)
        with pytest.raises(Interrupted):
            run(searching(tiny_recipe, *SHAPES, *both, "search.trials=2"), tmp_path / "run")
    wanted = searching(tiny_recipe, *SHAPES, *both, "search.trials=4")
    found = run(wanted, tmp_path / "run", resume=True)
    whole = run(wanted, tmp_path / "whole")
    asked = [(trial["pressure"], trial["ratio"], trial["costs"]["parameters"]) for trial in whole["search"]["trials"]]
    assert len(asked) == 4 and asked[0][1] == asked[1][1]  # the second one is for the goal too
    assert [(trial["pressure"], trial["ratio"], trial["costs"]["parameters"]) for trial in found["search"]["trials"]] == asked
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == (tmp_path / "whole" / "model.safetensors").read_bytes()


def test_a_posterior_of_one_pressure_is_cooled_once_where_all_goes_at_once(tiny_recipe, tmp_path, monkeypatch):
    seen = Seen(monkeypatch)
    results = run(
        searching(tiny_recipe, *SHAPES, "search.goal='nonzero=40x'", "search.max_drop=0", "search.trials=4"), tmp_path / "r"
    )
    pressures = [trial["pressure"] for trial in results["search"]["trials"]]
    assert len(set(pressures)) < len(pressures) == 4
    assert len(seen.stages) == len(set(pressures))
    assert results["search"]["epochs"]["search"] == 2 + 4 * len(set(pressures)) + 2 * 4


def test_a_goal_that_pressure_reaches_is_not_cut_for(tiny_recipe, tmp_path, monkeypatch):
    seen = Seen(monkeypatch)
    results = run(searching(tiny_recipe, *SHAPES, "search.goal='parameters=1x'"), tmp_path / "run")
    assert [re.sub(r"pressure [\d.-]+, ", "", stage) for stage in seen.stages] == ["part 1", "part 4"] and seen.sizes == []
    assert results["search"]["epochs"]["search"] == 2 + 4 + 2


def test_few_steps_are_said_under_a_budget_too(tiny_recipe, tmp_path):
    few = ("search.max_drop=90", "search.objective=parameters", "train.epochs=6", "search.levels=2", "search.trials=3")
    recipe = searching(tiny_recipe, *[one for one in SHAPES if "goal" not in one], *few)
    results = run(recipe, tmp_path / "run")
    (line,) = [line for line in results["warnings"] if "by rank alone" in line]
    assert "in 2 steps (one per epoch, at most 8: search.cuts)" in line and "search.levels" not in line


@pytest.mark.parametrize("goal", ["parameters=3x", "nonzero=3x"])
def test_a_dry_run_tells_as_many_levels_and_trials_as_the_run_makes(tiny_recipe, tmp_path, goal):
    own = [one for one in SHAPES if not one.startswith(("search.trials", "search.levels", "search.goal"))]
    recipe = searching(tiny_recipe, *own, f"search.goal='{goal}'", "search.trials=null", "search.levels=null")
    levels, trials = levels_and_trials(recipe)
    found = run(recipe, tmp_path / "run")["search"]
    assert levels == (3 if goal.startswith("parameters") else 6)
    asked = [trial for trial in found["trials"] if trial["continues"] is None]
    assert len(found["path"]) <= levels and len(asked) <= trials
    assert found["epochs"]["search"] <= 3 * found["epochs"]["one_run"]


def test_a_size_of_a_file_is_aimed_at_by_what_it_follows(tiny_recipe, tmp_path, monkeypatch):
    """Files are larger than their parameters: the steps end where the file has its size, not at that ratio of parameters."""
    seen = Seen(monkeypatch)
    results = run(searching(tiny_recipe, *SHAPES, "search.goal='bytes=5x'"), tmp_path / "run")
    (trial,) = results["search"]["trials"]
    dense = results["search"]["dense"]["costs"]
    aim = seen.sizes[-1] * (seen.sizes[-1] / seen.sizes[-2])  # one ratio further
    assert aim < dense["parameters"] / 5  # the graph does not get smaller
    assert trial["costs"]["parameters"] == pytest.approx(aim, rel=0.25) and results["search"]["reached"] is True
