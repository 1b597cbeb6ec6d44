"""A search for latency: measured once for the dense model, next to it for the others, with the requested batch size."""

import json

import onnx
import pytest
import torch

from svdcompress import cost
from svdcompress.errors import RecipeError
from svdcompress.pipeline import _finish, _measure, _search, run
from svdcompress.pipeline._measure import Measure
from svdcompress.pipeline._outcome import slower_file
from svdcompress.pipeline._results import RunResults, Side
from svdcompress.pipeline._search_words import other_machine, told_how
from svdcompress.recipe import changed, dump_recipe, load_recipe, parse_recipe, parse_yaml
from svdcompress.sources import open_data

QUICK = ["uncertainty.samples=0", "report.html=true", "export.monte_carlo=false", "train.epochs=2", "recover.epochs=1"]
SEARCH = ["search.levels=1", "search.trials=2", "search.goal='latency=1.3x'", "search.latency_batch=8"]


class Killed(Exception):
    pass


@pytest.fixture
def machine(monkeypatch):
    """Files take time proportional to their size, times the machine's speed; calls: [(files, batches)]."""
    state = {"speed": 1.0, "calls": [], "name": "one"}

    def latencies(paths, make_input, batch_sizes=(1, 128), *, threads=1, seconds=1.0, agreeing=0.0):
        state["calls"].append((sorted(paths), list(batch_sizes)))
        assert threads == 1 and all(len(make_input(batch)) == batch for batch in batch_sizes)
        return {
            name: {f"batch_{batch}": state["speed"] * cost.file_bytes(path) / 1e4 for batch in batch_sizes}
            for name, path in paths.items()
        }

    monkeypatch.setattr(cost, "latencies", latencies)
    monkeypatch.setattr(_measure, "machine", lambda: state["name"], raising=False)
    return state


@pytest.mark.slow
def test_the_dense_latency_is_measured_once_and_others_beside_it(tiny_recipe, tmp_path, monkeypatch, machine):
    content = parse_yaml(dump_recipe(tiny_recipe))
    for text in [*QUICK, *SEARCH]:
        field, _, value = text.partition("=")
        section, name = field.split(".")
        content[section][name] = parse_yaml(value)
    recipe, out = parse_recipe(content), tmp_path / "run"
    export, exported = _measure.export_onnx, []

    def counted(model, path, *given, **more):
        exported.append(path.name)
        return export(model, path, *given, **more)

    monkeypatch.setattr(_measure, "export_onnx", counted)
    trial, made = _search.Search._trial, []

    def first_alone(self, *ask):
        if made:
            raise Killed
        made.append(trial(self, *ask))

    monkeypatch.setattr(_search.Search, "_trial", first_alone)
    with pytest.raises(Killed):
        run(recipe, out)
    assert machine["calls"][0] == (["dense"], [8])
    assert all(names == ["dense", "small"] and batches == [8] for names, batches in machine["calls"][1:])
    kept = json.loads((out / "state" / "search" / "trials.json").read_text())["dense"]
    first = kept["costs"]["latency"]
    monkeypatch.setattr(_search.Search, "_trial", trial)
    machine["calls"].clear()
    machine.update(speed=3.0, name="another")  # three times slower
    results = run(recipe, out, resume=True)
    found = results["search"]
    assert found["dense"]["costs"]["latency"] == first
    assert all(names != ["dense"] for names, _ in machine["calls"])
    assert exported.count("dense.onnx") == 2  # once in each sitting
    chosen = found["trials"][found["chosen"] - 1]
    for each in found["trials"]:  # in milliseconds of the first machine
        assert each["costs"]["latency"] == pytest.approx(first * each["costs"]["bytes"] / kept["costs"]["bytes"])
    assert found["reached"] is True and chosen["costs"]["latency"] <= 1.02 * first / 1.3
    (line,) = [line for line in results["warnings"] if "the search began" in line]
    assert "machine another (it was one)" in line and "factors such as 2x hold" in line
    # the conditions of the measurement are reported
    assert found["measured"]["batches"] == [8] and found["measured"]["threads"] == 1
    assert found["measured"]["clock"] == results["clock"] == cost.clock_name(1)
    assert set(results["dense"]["latency_ms"]) == {"batch_1", "batch_8", "batch_128"}
    page = (out / "report.html").read_text()
    assert f"Latencies are for batch 8 by {results['clock']}, in onnxruntime with 1 thread on another" in page
    assert f"Medians of {results['clock']} in onnxruntime on the CPU, 1 thread." in page


def test_a_clock_that_an_earlier_version_did_not_record():
    now = {"batches": [1], "threads": 1, "clock": "CPU time"}
    line = other_machine({"batches": [1], "threads": 1}, now, 2.5)
    assert "here clock CPU time (it was not recorded)" in line and "still took 2.5" in line


def test_what_a_latency_was_measured_with_in_words():
    assert told_how({"batches": [8], "threads": 1}) == " (batch 8, 1 thread)"
    assert told_how({"batches": [1, 128], "threads": 1}) == " (geometric mean of batch 1 and 128, 1 thread)"
    assert told_how({"command": "./ask.sh"}) == " (by ./ask.sh)" and told_how({}) == ""


def test_the_batch_of_a_latency():
    plain = load_recipe(None, ["search.goal='latency=2x'"])
    assert _measure.Measure("latency", plain, None, None).batches == (1, 128)  # type: ignore[arg-type]
    for wrong, said in (
        (["search.latency_batch=0", "search.goal='latency=2x'"], "search.latency_batch"),
        (["search.latency_batch=1.5", "search.goal='latency=2x'"], "search.latency_batch"),
        (["search.latency_batch=8", "search.goal='macs=2x'"], "latency_batch is for goal latency"),
        (["search.latency_batch=8", "search.max_drop=1"], "latency_batch is for goal latency"),
        (["search.latency_batch=8", "search.goal='latency=2x'", "search.latency_command=./ask.sh"], "leave one of them out"),
    ):
        with pytest.raises(RecipeError, match=said):
            load_recipe(None, wrong)
    assert load_recipe(None, ["search.latency_batch=8"]).search.latency_batch == 8  # allowed, since a goal may be added later
    assert load_recipe(None, ["search.latency_batch=8", "search.max_drop=1", "search.objective=latency"]).search.wanted


def test_a_latency_is_told_as_a_share_of_the_first_measure(monkeypatch):
    recipe = load_recipe(None, ["search.goal=latency=2x"])
    measured = {"dense": {"latency": 4.0, "macs": 9.0}, "small": {"latency": 1.0, "macs": 3.0}}
    monkeypatch.setattr(Measure, "of", lambda self, **models: {name: measured[name] for name in models})
    assert Measure("latency", recipe, None, None, first=10.0).of_small(None, None) == {"latency": 2.5, "macs": 3.0}
    assert Measure("latency", recipe, None, None).of_small(None, None)["latency"] == 1.0


@pytest.mark.parametrize("measure", ["latency", "bytes"])
def test_the_file_of_a_trial_holds_what_the_runs_own_will(monkeypatch, measure):
    """A temperature and prediction sets take time, and the dense file has neither."""
    seen = {}

    def latencies(files, *given, **options):
        for name, file in files.items():
            seen.setdefault(name, {node.op_type for node in onnx.load(str(file)).graph.node})
        return {name: {"batch_1": 1.0, "batch_128": 1.0} for name in files}

    monkeypatch.setattr("svdcompress.cost.latencies", latencies)
    monkeypatch.setattr(cost, "file_bytes", lambda file: latencies({file.stem: file}) and 1)
    recipe = load_recipe("digits", [f"search.goal={measure}=2x", "calibrate.coverage=0.9", "export.sets=true"])
    model, data = torch.nn.Linear(64, 10), open_data(recipe.data, recipe.task)
    Measure(measure, recipe, data, torch.zeros(2, 64)).of(dense=model, small=model)
    assert {"Div", "TopK"} <= seen["small"]
    assert not {"Div", "TopK"} & seen["dense"]


def test_of_files_that_are_only_measured_the_dense_one_is_verified(monkeypatch):
    """Once is enough to know early that a model cannot be exported."""
    verified, write = [], _measure.export_onnx
    monkeypatch.setattr(
        _measure, "export_onnx", lambda *given, **more: verified.append(more["verify"]) or write(*given, **more)
    )
    recipe = load_recipe("digits", ["search.goal=bytes=2x"])
    model, data = torch.nn.Linear(64, 10), open_data(recipe.data, recipe.task)
    measure = Measure("bytes", recipe, data, torch.zeros(2, 64))
    measure.of(dense=model, small=model)
    measure.of(dense=model, small=model)
    assert verified == [True, False, False]


def test_a_file_that_became_slower_than_the_goal_is_told():
    dense = {"costs": {"latency": 8.0}}
    found = {"objective": "latency", "goal": "latency=2x", "reached": True, "dense": dense, "measured": {"batches": [1, 128]}}
    before = {"batch_1": 1.0, "batch_8": 9.0, "batch_128": 100.0}

    def told(one, many, **other):
        small = Side(latency_ms={"batch_1": one, "batch_8": 1.0, "batch_128": many})
        results = RunResults(search={**found, "notes": ["before"], **other}, sparse=small, dense=Side(latency_ms=before))
        return slower_file(results), results.search

    (line,), stored = told(0.8, 45.0)  # the geometric mean is 0.6
    assert "takes 4.8 ms against 4" in line and stored["reached"] is False and stored["notes"] == ["before", line]
    assert told(0.6, 45.0)[0] == []  # 0.52: measurements differ
    assert told(0.8, 45.0, goal="latency=1.6x")[0] == []
    assert told(0.8, 45.0, goal="latency=4ms")[0]
    for other in ({"reached": False}, {"objective": "macs"}, {"measured": {"command": "./ask.sh"}}):
        assert told(0.8, 45.0, **other)[0] == []
    assert slower_file(RunResults(search=found)) == []  # report.latency=false


def test_a_run_tells_of_a_file_that_became_slower(tiny_recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(_finish, "slower_file", lambda results: [f"slower than {results.dense.latency_ms['batch_1']}"])
    monkeypatch.setattr(cost, "latencies", lambda paths, *given, **more: {name: {"batch_1": 2.5} for name in paths})
    quick = {"train.epochs": 1, "dense.epochs": 1, "recover.epochs": 0, "uncertainty.samples": 0, "report.html": False}
    results = run(changed(tiny_recipe, {**quick, "report.latency": True}), tmp_path / "run")
    assert "slower than 2.5" in results["warnings"]
