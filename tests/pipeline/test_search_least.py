"""A goal below the size with one unit in each layer: reported before training, with the size that is aimed at instead."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from svdcompress.errors import ExportError
from svdcompress.files import sealed, unsealed
from svdcompress.pipeline import estimate, run
from svdcompress.pipeline._search_trials import Trials
from svdcompress.pipeline._search_words import below_least, outcome
from svdcompress.pipeline._unit_ways import Units, next_count
from svdcompress.recipe import dump_recipe, parse_goal, parse_recipe, parse_yaml
from svdcompress.search import CLOSE

QUICK = {"train.epochs": 4, "recover.epochs": 1, "uncertainty.samples": 0, "report.html": False, "report.latency": False}
SEARCH = {"search.levels": 1, "search.trials": 1, "export.onnx": False}


def searching(tiny_recipe, **settings):
    content = parse_yaml(dump_recipe(tiny_recipe))
    for name, value in {**QUICK, **SEARCH, **settings}.items():
        section, _, field = name.partition(".")
        content[section][field] = value
    return parse_recipe(content)


def test_a_goal_below_one_unit_in_each_layer_is_told_and_what_lies_above_it_is_made(tiny_recipe, tmp_path):
    settings = {"search.goal": "parameters=5", "prune.remove_inputs": False, "model.args": {"sizes": [64, 24, 24, 24, 10]}}
    recipe = searching(tiny_recipe, **settings)
    results = run(recipe, tmp_path / "run")
    least = (64 + 1) + (1 + 1) + (1 + 1) + (10 + 10)  # for 64-1-1-1-10; another unit between two of these costs 3
    (line,) = [line for line in results["warnings"] if "cannot be reached" in line]
    assert f"still has {least} parameters" in line and f"aims at {1.1 * least:,.0f} instead" in line
    found = results["search"]
    assert found["reached"] is False and least < results["sparse"]["parameters"] <= 1.1 * least * 1.02
    size = results["sparse"]["parameters"]
    (told,) = [line for line in found["notes"] if f"parameters=5 was not reached: {size:g} against 5 parameters;" in line]
    assert told.endswith(f"As the goal is out of reach, the search aimed at {1.1 * least:.4g}")
    assert line in estimate(recipe).warnings


def test_a_size_that_was_not_reached_is_told_beside_that_of_the_goal():
    best = SimpleNamespace(costs={"macs": 11768.0, "latency": 0.51234}, met=True, mixture=None)
    lines = [
        outcome(best, [], measure, parse_goal(f"{measure}={size}"), number * (1 + CLOSE), None, False, 0)  # type: ignore[arg-type]
        for measure, size, number in (
            ("macs", "1.5", 1.5),
            ("macs", "11k", 11000),
            ("macs", "9x", 4.578),
            ("latency", "0.25ms", 0.25),
            ("latency", "2x", 0.2578),
        )
    ]
    macs = [f"11,768 against {size} multiply-accumulates" for size in ("1.5", "11,000", "4")]
    told = [*macs, *(f"0.5123 against {size} milliseconds" for size in ("0.25", "0.2578"))]
    assert all(text in line for text, (line,) in zip(told, lines, strict=True))
    aimed = best, [], "latency", parse_goal("latency=2x"), 0.2578, None, False, 0
    (line,) = outcome(*aimed, steps=4, aimed=0.5)  # type: ignore[arg-type]
    assert line.endswith("As the goal is out of reach, the search aimed at 0.5")
    (line,) = outcome(*aimed, steps=4, aimed=0.2578 / (1 + CLOSE))  # type: ignore[arg-type]
    assert "One unit of each layer stays" in line
    third = 11768 / 3  # the size of the goal is told without its fraction
    within = best, [], "macs", parse_goal("macs=3x"), third * (1 + CLOSE), None, False, 0
    (line,) = outcome(*within, steps=4, aimed=third)  # type: ignore[arg-type]
    assert "against 3,922 multiply" in line and "One unit of each layer stays" in line


def test_a_time_that_was_reached_when_units_were_chosen_is_told_with_a_goal_that_leaves_room():
    def told(size, goal, target, cost=0.275):
        mixture = {"chosen": "even", "candidates": [{"name": "global", "size": 0.1}, {"name": "even", "size": size}]}
        best = SimpleNamespace(costs={"latency": cost, "macs": cost}, met=True, mixture=mixture)
        given = best, [], goal.partition("=")[0], parse_goal(goal), target * (1 + CLOSE), None, False, 0
        (line,) = outcome(*given, steps=4, aimed=target)  # type: ignore[arg-type]
        return line.partition("the closest is kept. ")[2]

    room = "When its units were chosen, it took 0.252: measurements differ. --goal latency={} leaves room"
    assert told(0.252, "latency=2x", 0.25) == room.format("2.2x")
    assert told(0.252, "latency=0.25ms", 0.25) == room.format("0.227ms")
    for size, goal in ((0.27, "latency=2x"), (None, "latency=2x"), (0.252, "macs=2x")):
        assert told(size, goal, 0.25).startswith("One unit of each layer stays")


def test_a_dry_run_tells_of_goals_out_of_reach_alone(tiny_recipe):
    for goal, told in (("macs=3", True), ("macs=2x", False), ("nonzero=3", False)):
        said = estimate(searching(tiny_recipe, **{"search.goal": goal})).warnings
        assert any(f"the goal {goal} cannot be reached: one unit in each layer" in line for line in said) == told


def test_a_goal_that_can_be_reached_is_aimed_at(tiny_recipe, tmp_path):
    recipe = searching(tiny_recipe, **{"search.goal": "parameters=2x"})
    results = run(recipe, tmp_path / "run")
    assert results["search"]["reached"] is True and not any("cannot be reached" in line for line in results["warnings"])


def test_a_budget_that_all_sizes_keep_ends_at_what_can_be_had(tiny_recipe, tmp_path):
    layers = {"model.args": {"sizes": [64, 24, 24, 10]}, "prune.remove_inputs": False}
    asked = {"search.max_drop": 100.0, "search.objective": "parameters", "search.trials": 8}
    found = run(searching(tiny_recipe, **layers, **asked), tmp_path / "run")["search"]
    least = (64 + 1) + (1 + 1) + (10 + 10)
    assert found["least"] == least
    sizes = [trial["costs"]["parameters"] for trial in found["trials"]]
    chosen = found["trials"][found["chosen"] - 1]["costs"]["parameters"]
    assert least <= min(sizes) == chosen <= 1.1 * least * 1.02
    assert len([size for size in sizes if size <= 1.1 * least]) == 1  # no other pressure is tried there
    dense = (64 + 1) * 24 + (24 + 1) * 24 + (24 + 1) * 10
    assert any(
        "nothing smaller was tried" in line and f"cannot be removed, gives {dense / least:.3g}x" in line
        for line in found["notes"]
    )


def test_where_the_least_cannot_be_measured_the_search_says_so_and_goes_on(tiny_recipe, tmp_path, monkeypatch):
    def fails(self):
        raise ExportError("no file of one unit")

    monkeypatch.setattr(Units, "least", fails)
    results = run(searching(tiny_recipe, **{"search.goal": "macs=2x"}), tmp_path / "run")
    assert any("could not be measured (no file of one unit)" in line for line in results["warnings"])
    assert results["search"]["least"] is None and results["search"]["reached"] is True


def test_the_least_latency_is_measured_once(tiny_recipe, tmp_path, monkeypatch):
    """With the milliseconds of a machine on which every file takes a minimum time."""
    from svdcompress import cost
    from svdcompress.pipeline import _search

    asked = []

    def latencies(paths, make_input, batch_sizes=(1, 128), *, threads=1, seconds=1.0, agreeing=0.0):
        asked.append(sorted(paths))
        return {name: dict.fromkeys(("batch_1", "batch_128"), 5 + cost.file_bytes(path) / 1e4) for name, path in paths.items()}

    monkeypatch.setattr(cost, "latencies", latencies)
    recipe, out = searching(tiny_recipe, **{"search.goal": "latency=50x"}), tmp_path / "run"

    class Killed(Exception):
        pass

    def killed(self, *ask):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(_search.Search, "_trial", killed)
        with pytest.raises(Killed):
            run(recipe, out)
    assert asked == [["dense"], ["dense", "small"]]
    kept = unsealed((out / "state" / "search" / "trials.json").read_text())
    dense, least = kept["dense"]["costs"]["latency"], kept["least"]
    assert 5 < least < dense
    least = kept["least"] = least + 0.1  # a new measurement would differ from it
    (out / "state" / "search" / "trials.json").write_text(sealed(kept))
    results = run(recipe, out, resume=True)
    (line,) = [line for line in results["warnings"] if "cannot be reached" in line]
    assert f"still takes {least:.4g} milliseconds" in line and "search.latency_batch=128" in line
    size = results["search"]["trials"][0]["costs"]["latency"]
    assert size == pytest.approx(min(1.1 * least, dense), rel=0.02)
    assert results["search"]["reached"] is False


@pytest.mark.parametrize(
    ("wanted", "least", "target"),
    [
        (100.0, 90.0, 100.0),
        (89.0, 90.0, 89.0),  # within the 2% that count as reached
        (50.0, 90.0, 99.0),
        (50.0, 950.0, 1000.0),  # no larger than the dense model
        (50.0, None, 50.0),
    ],
)
def test_what_is_aimed_at(wanted, least, target):
    search = Trials.__new__(Trials)
    search.goal, search.kept = parse_goal(f"macs={wanted:g}"), SimpleNamespace(least=least)  # type: ignore[assignment]
    search.measure, search.costs = SimpleNamespace(name="macs"), {"macs": 1000.0}  # type: ignore[assignment]
    assert search._target == pytest.approx(target)


@pytest.mark.parametrize("probabilities", [True, False])
def test_a_trial_that_leaves_one_answer_is_put_down_as_no_model(probabilities):
    told, kept = [], SimpleNamespace(trials=[], epochs={})
    search = SimpleNamespace(
        judged=SimpleNamespace(error=3.0, probabilities=probabilities),
        allowed=1.0,
        path=SimpleNamespace(beta=lambda pressure: 0.5),
        costs={"macs": 1000.0},
        measure=SimpleNamespace(name="macs"),
        kept=kept,
        _dense_size=1000.0,
        _spend=lambda: None,
        _say=told.append,
    )
    Trials._nothing_left(search, 1, 2.0, 10.0, 0.0, [])  # type: ignore[arg-type]
    (trial,) = kept.trials
    assert (
        trial.empty
        and trial.lost == float("inf")
        and not trial.met
        and "the model gives the same answer to all inputs" in told[0]
    )
    assert trial.error == (103.0 if probabilities else 6.0)  # 100 percentage points of error, or 100% of the RMSE
    assert json.loads(json.dumps(trial.to_dict(), allow_nan=False))["drop"] == 100.0


def test_a_search_that_a_former_version_began_keeps_its_aim():
    kept = SimpleNamespace(least=None, trials=["one"])
    of = SimpleNamespace(name="macs")
    search = SimpleNamespace(goal=parse_goal("macs=50"), kept=kept, measure=of, _target=50.0, _wanted=50.0)
    Trials._find_least(search)  # type: ignore[arg-type]
    assert kept.least == 0.0


def test_the_words_for_each_measure():
    goal = parse_goal("latency=12x")
    one = below_least(goal, "latency", 0.6, 0.1, 0.11, {"batches": [128], "threads": 1})
    assert "still takes 0.1 milliseconds (6x faster) (batch 128, 1 thread)" in one and "latency_batch" not in one
    assert "latency_batch" not in below_least(goal, "latency", 0.6, 0.1, 0.11, {"command": "./ask.sh"})
    assert "`svdc inspect`" in below_least(parse_goal("macs=0.01"), "macs", 100, 10, 11, {})


def test_the_count_for_a_size_of_which_a_part_stays():
    """With 5 + count / 100 ms, two points determine the line; with one point, size is taken as proportional."""
    seen = [(1000.0, 15.0)]
    assert next_count(seen, 7.5) == 500.0
    seen.append((500.0, 10.0))
    assert next_count(seen, 7.5) == pytest.approx(250.0)
    assert next_count(seen, 5.5) == 125.0  # at least a quarter
    for chance in (15.1, 14.9, 14.4):  # two nearly equal sizes determine no line
        assert next_count([(1000.0, 15.0), (500.0, chance)], 7.5) == pytest.approx(500 * 7.5 / chance)
    assert next_count([(1000.0, 15.0), (100.0, 6.0)], 7.5) == pytest.approx(100 + 900 * (7.5 * 0.99 - 6) / 9)  # between


def test_a_cut_too_deep_after_a_slow_measurement_is_not_the_last(monkeypatch):
    """Milliseconds as they would be measured: 5 + count / 100, but once 5% too slow and then 7% too fast."""
    found, measured = [], iter([15.0, 10.0, 7.9, 6.5, 7.4])

    def costs(count):
        found.append(count)
        return {"macs": count, "latency": next(measured)}

    units: Any = Units.__new__(Units)
    units.measure, units.follows, units.target, units.asked = SimpleNamespace(name="latency"), "macs", 7.5, 3.0
    units.found, units._finished, units._costs = 1000.0, lambda masks: masks, costs
    monkeypatch.setattr(Units, "_at", lambda units, name, count: SimpleNamespace(masks=count))
    way = units._to_target()
    assert way.size == 7.4 and found[3] < way.count < found[2]
