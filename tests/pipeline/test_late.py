"""A run stopped after training: finished work is not repeated unless its inputs changed."""

import copy
import json
import shutil
from types import SimpleNamespace

import pytest
from torch import nn

from svdcompress.errors import Interrupted
from svdcompress.files import sealed, unsealed
from svdcompress.pipeline import _finish, _late, _onnx, _stages, run
from svdcompress.pipeline._context import Context
from svdcompress.pipeline._results import RunResults
from svdcompress.recipe import load_recipe

TIMES = {"seconds", "created", "latency", "latency_ms", "threads", "faster", "files"}

WORK = {
    "calibrate": (_stages, "calibrate_stage"),
    "promises": (_stages, "promise_stage"),
    "evaluate": (_stages, "evaluate_stage"),
    "export": (_onnx.Files, "sparse"),
    "figures": (_stages, "figures_stage"),
    "promises on the test data": (_stages, "measure_promises"),
    "verify": (_stages, "verify_stage"),
}
"""The functions whose calls count as a stage's work, wherever they are called."""


def stopped(recipe, out, before, monkeypatch):
    """Run until just before a stage."""
    stage = Context.stage

    def stopping(self, name):
        if name == before:
            raise Interrupted(f"stopped before {name}.")
        return stage(self, name)

    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(Context, "stage", stopping)
        run(recipe, out)
    return out


def resumed(recipe, out, monkeypatch):
    """The work that a resumed run does, and its results."""
    done = []
    with monkeypatch.context() as patch:
        for name, (where, function) in WORK.items():
            real = getattr(where, function)

            def counted(*args, name=name, real=real):
                done.append(name)
                return real(*args)

            patch.setattr(where, function, counted)
        return done, run(recipe, out, resume=True)


def without_times(value):
    if isinstance(value, dict):
        return {key: without_times(item) for key, item in value.items() if key not in TIMES}
    return [without_times(item) for item in value] if isinstance(value, list) else value


def same(left, right):
    names = [sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*")) for folder in (left, right)]
    assert names[0] == names[1]
    for name in names[0]:
        if name.endswith((".onnx", ".safetensors")):
            assert (left / name).read_bytes() == (right / name).read_bytes(), name
    reports = [without_times(json.loads((folder / "report.json").read_text())) for folder in (left, right)]
    for each in reports:
        del each["name"]
        checks = each["verified"]["checks"]
        each["verified"]["checks"] = [check for check in checks if "latency" not in check["name"]]
        each["notes"] = [line for line in each.get("notes", []) if "not faster than" not in line]
    assert reports[0] == reports[1]


@pytest.fixture(scope="module")
def recipe(tiny_recipe):
    text = tiny_recipe.model_copy(deep=True)
    text.export.precision, text.calibrate.coverage, text.uncertainty.budget = "int8", 0.8, "none"
    text.report.html = False
    return text


@pytest.fixture(scope="module")
def whole(recipe, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "whole"
    run(recipe, folder)
    return folder


@pytest.fixture(scope="module")
def late(recipe, tmp_path_factory):
    """A run stopped before its files were checked."""
    with pytest.MonkeyPatch.context() as patch:
        return stopped(recipe, tmp_path_factory.mktemp("runs") / "late", "verify", patch)


def test_what_was_finished_is_not_done_again(recipe, whole, late, tmp_path, monkeypatch):
    out = shutil.copytree(late, tmp_path / "run")
    done, results = resumed(recipe, out, monkeypatch)
    assert done == ["verify"] and results["verified"]["failed"] == 0
    same(whole, out)
    assert results["int8"]["latency_ms"] and not (out / "state").exists()


@pytest.mark.parametrize(("before", "again"), [("evaluate", 5), ("figures", 3)])
def test_the_stage_that_was_under_way_is(recipe, whole, tmp_path, monkeypatch, before, again):
    out = stopped(recipe, tmp_path / "run", before, monkeypatch)
    done, _ = resumed(recipe, out, monkeypatch)
    assert done == list(WORK)[-again:]
    same(whole, out)


def test_a_file_that_is_another_is_written_again(recipe, whole, late, tmp_path, monkeypatch):
    out = shutil.copytree(late, tmp_path / "run")
    (out / "model_int8.onnx").write_bytes(b"another")
    assert resumed(recipe, out, monkeypatch)[0] == ["export", "verify"]
    same(whole, out)
    out = shutil.copytree(late, tmp_path / "second")
    (out / "model.safetensors").unlink()
    assert resumed(recipe, out, monkeypatch)[0] == list(WORK)
    same(whole, out)


def test_settings_that_changed_are_obeyed(recipe, late, tmp_path, monkeypatch):
    out = shutil.copytree(late, tmp_path / "run")
    other = recipe.model_copy(deep=True)
    other.uncertainty.samples = 3
    done, results = resumed(other, out, monkeypatch)
    assert done == ["figures", "promises on the test data", "verify"] and "sparse, 3 samples" in results["uncertainty"]
    out = shutil.copytree(late, tmp_path / "second")
    other = recipe.model_copy(deep=True)
    other.export.precision = "none"
    done, results = resumed(other, out, monkeypatch)
    assert done == ["export", "verify"] and "int8" not in results


@pytest.mark.parametrize("text", ["", "[]", '{"key": 1}', "{"])
def test_a_damaged_file_is_not_believed(recipe, whole, late, tmp_path, monkeypatch, text):
    out = shutil.copytree(late, tmp_path / "run")
    stored = unsealed((out / "state" / "evaluate.json").read_text())
    (out / "state" / "evaluate.json").write_text(text)
    (out / "state" / "figures.json").write_text(sealed({**stored, "results": {"nothing": 1}}))
    done, _ = resumed(recipe, out, monkeypatch)
    assert done == ["evaluate", "figures", "promises on the test data", "verify"]
    same(whole, out)


def test_a_figure_that_was_changed_by_accident_is_computed_again(recipe, whole, late, tmp_path, monkeypatch):
    out = shutil.copytree(late, tmp_path / "run")
    file = out / "state" / "figures.json"
    stored = json.loads(file.read_text())
    stored["results"]["uncertainty"]["sparse, mean"]["ece"] *= 0.5
    file.write_text(json.dumps(stored))
    assert resumed(recipe, out, monkeypatch)[0] == ["figures", "promises on the test data", "verify"]
    same(whole, out)


def test_figures_that_failed_are_tried_again(recipe, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(_finish, "changes", lambda *_: 1 / 0)
        out = stopped(recipe, tmp_path / "run", "verify", monkeypatch)
    assert not (out / "state" / "evaluate.json").exists() and (out / "state" / "calibrate.json").exists()
    done, results = resumed(recipe, out, monkeypatch)
    assert "evaluate" in done and results["changes"] and "failed" not in results


@pytest.mark.slow
def test_a_run_whose_checks_fail_does_everything_anew(recipe, tmp_path, monkeypatch):
    from svdcompress.errors import VerifyError

    out = tmp_path / "run"
    with monkeypatch.context() as patch, pytest.raises(VerifyError):
        patch.setattr(_stages, "verify_stage", lambda *_: VerifyError("wrong"))
        run(recipe, out)
    assert not list((out / "state").glob("e*.json")) and (out / "state" / "run.json").exists()
    assert resumed(recipe, out, monkeypatch)[0] == list(WORK)


@pytest.mark.slow
@pytest.mark.parametrize("more", [["search.max_drop=30", "search.levels=2", "search.trials=2"], []], ids=["search", "plain"])
def test_a_searched_run_and_one_that_drops_inputs_too(tmp_path, monkeypatch, more):
    given = ["prune.remove_inputs=true", "data.transform=[flatten]", "data.limit=300", "uncertainty={samples: 5, budget: none}"]
    given += ["model.args={sizes: [64, 24, 10]}", "dense.epochs=3", "train.epochs=4", "recover.epochs=2", "device=cpu"]
    recipe = load_recipe("digits", [*given, "report={html: false, latency: false}", *more])
    run(recipe, tmp_path / "whole")
    out = stopped(recipe, tmp_path / "run", "verify", monkeypatch)
    assert resumed(recipe, out, monkeypatch)[0] == ["verify"]
    same(tmp_path / "whole", out)


def test_what_a_stage_found_is_of_one_small_model_and_one_dense_one(tmp_path, tiny_recipe, monkeypatch):
    monkeypatch.setattr(_late, "seen", lambda data: "the data")
    nets = [nn.Linear(3, 2), nn.Linear(3, 2)]
    context = SimpleNamespace(
        recipe=tiny_recipe, results=RunResults(), place=SimpleNamespace(device="cpu"), state=SimpleNamespace(folder=tmp_path)
    )
    late = _late.Late(context, None, nets[0])
    assert late._key("evaluate", nets[0]) == late._key("evaluate", copy.deepcopy(nets[0])) != late._key("evaluate", nets[1])
    assert _late.Late(context, None, nets[1])._key("evaluate", nets[0]) != late._key("evaluate", nets[0])
