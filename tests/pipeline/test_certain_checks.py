"""`svdc verify` computes again how sure the files are: one that answers as before but is too sure of it is found."""

import json
import shutil

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from svdcompress import report
from svdcompress.pipeline import run, verify_run
from svdcompress.recipe import load_recipe

QUICK = [
    "train.epochs=1",
    "recover.epochs=1",
    "uncertainty.samples=5",
    "report.latency=false",
    "report.html=false",
    "device=cpu",
]
PROMISED = ["calibrate.coverage=0.8", "export.sets=true"]


def data_of(task, folder):
    """Settings for a small problem of this task, which a network learns only in part."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(600, 4)).astype(np.float32)
    noise = rng.normal(size=(600, 2))
    value = 50 + 20 * (x[:, :2] + 0.5 * noise)
    if task == "classification":
        y = np.digitize(value[:, 0], [40, 60])
        settings, outputs = ["loss=cross-entropy"], 3
    elif task == "binary":
        y, settings, outputs = (value[:, 0] > 55).astype(np.float32), ["loss=binary"], 1
    elif task == "regression":
        y, settings, outputs = value.astype(np.float32), ["loss=mse", "data.target_scale=standardize"], 2
    else:
        y, settings, outputs = value[:, :1].astype(np.float32), ["loss=gaussian-nll", "data.target_scale=standardize"], 2
    np.savez(folder / "data.npz", x=x, y=y)
    settings += [f"data=npz:{folder}/data.npz", "data.validation=0.3", "dense.epochs=20", "dense.lr=0.01"]
    return [*settings, f"model={{name: mlp, args: {{sizes: [4, 16, {outputs}]}}}}"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Finished runs by task, made when they are first asked for."""
    made = {}

    def of(task):
        if task not in made:
            folder = tmp_path_factory.mktemp(task)
            answers = ["calibrate.answer_above=0.85"] if task in ("classification", "binary") else []
            promised = answers if task == "binary" else PROMISED + answers
            run(load_recipe(None, [*data_of(task, folder), *QUICK, *promised]), folder / "run")
            made[task] = folder / "run"
        return made[task]

    return of


def checked(folder):
    found = verify_run(folder)
    return found, {(check.file, check.name) for check in found.checks if check.passed}


@pytest.mark.parametrize("task", ["classification", "binary", "regression", "gaussian"])
def test_what_the_files_say_of_their_certainty_is_computed_again(runs, task):
    found, names = checked(runs(task))
    assert not found.failed and not found.skipped
    asked = {"coverage": ("coverage", "size"), "answer_above": ("accuracy", "answered")}
    promises = json.loads((runs(task) / "report.json").read_text())["promises"]
    assert (
        set(promises)
        == {
            "classification": {"coverage", "answer_above"},
            "binary": {"answer_above"},
            "regression": {"coverage"},
            "gaussian": {"coverage"},
        }[task]
    )
    for name in promises:
        for figure in asked[name]:
            assert ("model.onnx", f"{name}: {figure} of 120 test examples") in names
        assert ("model_mc.onnx", f"{name}: {asked[name][0]} of 120 test examples") in names
        assert {("model.onnx", f"promise: {name}"), ("model_mc.onnx", f"promise: {name}")} <= names
    figure = "ece" if task in ("classification", "binary") else "coverage"
    assert ("model.onnx", f"calibration: {figure} of 120 test examples") in names


@pytest.mark.parametrize("task", ["classification", "regression", "gaussian"])
def test_coverage_is_that_of_the_sets_that_the_files_give(runs, task):
    """In plain numpy: how often the truth lies in what the files themselves return."""
    import onnxruntime

    from svdcompress.pipeline import open_run

    folder = runs(task)
    test, scale = open_run(folder).data.test, open_run(folder).data.target_scale
    truth = test.targets.numpy() if scale is None else test.targets.numpy() * scale[1] + scale[0]
    for file, more in (("model.onnx", {}), ("model_mc.onnx", {"samples": np.array(100)})):
        session = onnxruntime.InferenceSession(str(folder / file))
        outputs = dict(
            zip([o.name for o in session.get_outputs()], session.run(None, {"input": test.inputs.numpy(), **more}), strict=True)
        )
        if task == "classification":
            inside = outputs["set"][np.arange(len(truth)), truth] > 0.5
        else:
            inside = (outputs["lower"] <= truth.reshape(outputs["lower"].shape)) & (
                truth.reshape(outputs["lower"].shape) <= outputs["upper"]
            )
        (check,) = (c for c in verify_run(folder).checks if c.name.startswith("coverage: coverage") and c.file == file)
        assert check.found == pytest.approx(inside.mean(), abs=1e-9 if file == "model.onnx" else 0.03)


def change(folder, edit):
    """Edit the stored results, and stamp the folder's files as if the run had written them."""
    results = json.loads((folder / "report.json").read_text())
    edit(results)
    report.write_json(folder / "report.json", report.stamped(results, folder))


def failed(folder):
    return {(check.file, check.name) for check in verify_run(folder).failed}


def test_a_file_that_answers_alike_but_is_too_sure_is_found(runs, tmp_path):
    folder = shutil.copytree(runs("classification"), tmp_path / "copy")
    for name in ("model.onnx", "model_mc.onnx"):
        model = onnx.load(str(folder / name))
        weights = [t for t in model.graph.initializer if t.data_type == onnx.TensorProto.FLOAT and 3 in t.dims]
        for tensor in weights:  # logits four times as large: the same answers, with too high probabilities
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * np.float32(4), tensor.name))
        assert weights
        onnx.save(model, str(folder / name))
    change(folder, lambda results: None)
    wrong = failed(folder)
    assert ("model.onnx", "calibration: ece of 120 test examples") in wrong
    assert ("model.onnx", "coverage: coverage of 120 test examples") in wrong
    assert ("model_mc.onnx", "Monte-Carlo mean") in wrong
    assert ("model.onnx", "error of 120 test examples") not in wrong


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_a_promise_that_was_changed_is_found(runs, tmp_path, task):
    folder = shutil.copytree(runs(task), tmp_path / "copy")

    def edit(results):
        results["promises"]["coverage"]["mean"]["test"]["coverage"] += 0.05
        results["promises"]["coverage"]["samples"]["test"]["coverage"] = 0.3
        results["promises"]["coverage"]["mean"]["examples"] += 1

    change(folder, edit)
    assert failed(folder) == {
        ("model.onnx", "promise: coverage"),
        ("model.onnx", "coverage: coverage of 120 test examples"),
        ("model_mc.onnx", "coverage: coverage of 120 test examples"),
    }


def test_answers_that_were_changed_are_found(runs, tmp_path):
    folder = shutil.copytree(runs("binary"), tmp_path / "copy")

    def edit(results):
        results["promises"]["answer_above"]["mean"]["test"]["answered"] -= 0.05
        results["uncertainty"]["sparse, mean"]["ece"] += 0.05

    change(folder, edit)
    assert failed(folder) == {
        ("model.onnx", "answer_above: answered of 120 test examples"),
        ("model.onnx", "calibration: ece of 120 test examples"),
    }


def test_reports_without_such_figures_verify(runs, tmp_path):
    folder = shutil.copytree(runs("classification"), tmp_path / "copy")
    (folder / "model_mc.onnx").unlink()

    def edit(results):
        results["promises"]["coverage"]["mean"]["test"] = None
        results["promises"]["answer_above"]["mean"]["test"] = {"accuracy": None, "answered": 0.0}
        for name in ("uncertainty", "uncertainty_of"):
            results[name] = None

    change(folder, edit)
    assert failed(folder) == {("model.onnx", "answer_above: answered of 120 test examples")}


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_sets_in_the_file_that_are_not_those_of_the_promise_are_found(runs, tmp_path, task):
    """The promise that is made by draws is another one than the graph was written with."""
    folder = shutil.copytree(runs(task), tmp_path / "copy")

    def edit(results):
        promise = results["promises"]["coverage"]["samples"]
        if task == "classification":
            promise["limit"] = 0.0
        else:
            promise["width"] = [1.5 * each for each in promise["width"]]

    assert ("model_mc.onnx", "sets or intervals, not as promised") in checked(folder)[1]
    change(folder, edit)
    assert ("model_mc.onnx", "sets or intervals, not as promised") in failed(folder)


def test_an_accuracy_of_few_answers_is_no_alarm(runs, tmp_path):
    folder = shutil.copytree(runs("classification"), tmp_path / "copy")

    def edit(results):
        results["promises"]["answer_above"]["samples"]["test"] = {"accuracy": 0.1, "answered": 0.1}  # of 12 answers

    change(folder, edit)
    wrong = failed(folder)
    assert ("model_mc.onnx", "answer_above: answered of 120 test examples") in wrong
    assert ("model_mc.onnx", "answer_above: accuracy of 120 test examples") not in wrong
