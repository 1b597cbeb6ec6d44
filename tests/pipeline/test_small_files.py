"""The small forms of a run's files: what they are, what the report says about them, and that `verify` detects changes."""

import json
import shutil
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper
from torch import nn
from typer.testing import CliRunner

from svdcompress import report
from svdcompress.cli._app import app
from svdcompress.errors import ExportError
from svdcompress.export import export_onnx, read_metadata
from svdcompress.pipeline import _small_files, open_run, run, verify_run
from svdcompress.pipeline._allowed import Allowed, budget
from svdcompress.pipeline._baked import Baked
from svdcompress.pipeline._four_bits import FourBits
from svdcompress.pipeline._integers import Integers, beside, slower
from svdcompress.recipe import load_recipe
from svdcompress.report._small import small_files
from svdcompress.sources import Data
from svdcompress.sources._examples import InMemory

SMALL = ["export.precision=int8", "export.compact_monte_carlo=true", "export.monte_carlo_dtype=float16"]


@pytest.fixture(scope="module")
def small_run(tiny_recipe, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "small"
    recipe = tiny_recipe.model_copy(deep=True)
    for setting in SMALL:
        name, value = setting.removeprefix("export.").split("=")
        setattr(recipe.export, name, value == "true" if value in ("true", "false") else value)
    recipe.uncertainty.samples = 0
    return folder, run(recipe, folder)


def answers(path, x, **more):
    return onnxruntime.InferenceSession(str(path)).run(None, {"input": x, **more})


def test_a_run_writes_a_compact_file_that_is_the_other(tiny_run):
    folder, results = tiny_run
    path = folder / "model_compact.onnx"
    assert results["sparse"]["bytes_compact"] == path.stat().st_size
    assert results["parity"]["model_compact.onnx"] < 1e-5
    x = np.random.default_rng(0).random((5, 1, 8, 8)).astype(np.float32)
    assert np.allclose(answers(path, x)[0], answers(folder / "model.onnx", x)[0], atol=1e-6)
    assert read_metadata(path) == read_metadata(folder / "model.onnx")
    assert not {"int8", "float16", "bits", "monte_carlo_file"} & set(results)


def test_the_small_forms_are_what_the_report_says(small_run):
    folder, results = small_run
    int8 = results["int8"]
    assert int8["bytes"] == (folder / "model_int8.onnx").stat().st_size < (folder / "model.onnx").stat().st_size
    assert set(int8["layers"].values()) <= {"int8", "float32"} and "int8" in int8["layers"].values()
    assert int8["validation"]["int8"] <= int8["validation"]["limit"] + 1e-9
    test = open_run(folder).data.test
    x = torch.cat([inputs for inputs, _ in test.batches(100)]).numpy()
    y = torch.cat([targets for _, targets in test.batches(100)]).numpy()
    ours, floats = (answers(folder / name, x)[0].argmax(1) for name in ("model_int8.onnx", "model.onnx"))
    assert int8["metrics"]["error"] == pytest.approx(100 * (ours != y).mean(), abs=1e-4)
    assert int8["agreement"] == pytest.approx((ours == floats).mean())
    assert set(int8["latency_ms"]) == set(results["sparse"]["latency_ms"]) and isinstance(int8["faster"], bool)
    assert {row["name"] for row in results["bits"]} == {row["name"] for row in results["layers"] if row["weights"]}
    assert all(2 <= row["suggested"] <= 16 and row["used"] in (8, 32) and row["added"] >= 0 for row in results["bits"])
    text = " ".join(small_files(results))
    assert "model_compact.onnx" in text and "In integers (model_int8.onnx)" in text
    assert "In integers" in (folder / "report.html").read_text()
    said = " ".join(results.get("notes") or [])
    words = slower(int8["latency_ms"], results["sparse"]["latency_ms"])
    assert ("is not faster than model.onnx on this machine" in said) == bool(words)


def test_no_file_has_the_figures_of_another(small_run, tiny_run):
    folder, results = small_run
    assert read_metadata(folder / "model.onnx")["metrics"]["error"] == pytest.approx(
        results["sparse"]["metrics"]["error"], rel=1e-3
    )
    about = {path.name: read_metadata(path) for path in (*folder.glob("*.onnx"), tiny_run[0] / "model_mc.onnx")}
    assert {name for name, found in about.items() if "metrics" in found} == {"model.onnx", "model_compact.onnx"}
    assert all(found["compression"] for name, found in about.items() if name != "dense.onnx")
    own = {name: about["model.onnx"][name] for name in ("preprocessing", "classes", "task")}
    assert {name: about["dense.onnx"][name] for name in own} == own  # it takes the same inputs as the others


def test_a_monte_carlo_file_in_two_bytes_draws_alike(small_run):
    folder, results = small_run
    found = results["monte_carlo_file"]
    assert found["dtype"] == "float16" and 0 < found["difference"] <= 1e-3
    assert found["bytes"] == (folder / "model_mc.onnx").stat().st_size < 0.8 * found["bytes_float32"]
    assert found["bytes_compact"] == (folder / "model_mc_compact.onnx").stat().st_size <= found["bytes"]
    x, more = np.random.default_rng(0).random((5, 1, 8, 8)).astype(np.float32), {"samples": np.array(9), "seed": np.array(4)}
    both = [answers(folder / name, x, **more) for name in ("model_mc.onnx", "model_mc_compact.onnx")]
    assert all(np.array_equal(a, b) for a, b in zip(*both, strict=True))


def test_a_file_of_draws_that_does_not_run_is_named(small_run, tmp_path, monkeypatch):
    """It stays in float32 and is reported by name; its compact form is written."""
    folder, said = shutil.copytree(small_run[0], tmp_path / "copy"), []
    (folder / "model_mc_compact.onnx").unlink()

    def refuses(*given, **more):
        raise ExportError("no")

    monkeypatch.setattr(_small_files, "run", refuses)
    opened = open_run(folder)
    results = SimpleNamespace(monte_carlo_file=None)
    units = SimpleNamespace(inputs=lambda inputs: inputs)
    files = _small_files.SmallFiles.__new__(_small_files.SmallFiles)
    vars(files).update(
        recipe=opened.recipe,
        out=folder,
        results=results,
        units=units,
        data=opened.data,
        warn=said.append,
        parity={"model_mc.onnx": 0.0},
    )
    files.monte_carlo()
    assert said == ["model_mc.onnx stays in float32: no"]
    assert results.monte_carlo_file["dtype"] == "float32" and (folder / "model_mc_compact.onnx").is_file()


def test_verify_sees_each_of_them(small_run, tmp_path):
    folder = shutil.copytree(small_run[0], tmp_path / "copy")
    assert verify_run(folder).failed == []
    for name in ("model_compact.onnx", "model_int8.onnx", "model_mc_compact.onnx"):
        model = onnx.load(str(folder / name))
        for tensor in model.graph.initializer:
            if tensor.data_type in (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16) and np.prod(tensor.dims) > 4:
                array = numpy_helper.to_array(tensor)
                tensor.CopyFrom(numpy_helper.from_array((array * -1.5).astype(array.dtype), tensor.name))
        onnx.save(model, str(folder / name))
    results = json.loads((folder / "report.json").read_text())
    report.write_json(folder / "report.json", report.stamped(results, folder))
    wrong = {check.file for check in verify_run(folder).failed if check.name != "bytes"}
    assert wrong == {"model_compact.onnx", "model_int8.onnx", "model_mc_compact.onnx"}


def test_a_run_has_its_small_files_read_all_test_data_once(small_run):
    """A run's checks use at most 256 test examples; metrics measured when a file was written are checked only by `verify`."""

    def looked_at(checks):
        return {name for name, file in checks if file == "model_int8.onnx"}

    folder, results = small_run
    assert looked_at((one["name"], one["file"]) for one in results["verified"]["checks"]) == {"bytes"}
    figures = {f"{name} of the test data" for name in results["int8"]["metrics"]}
    assert looked_at((one.name, one.file) for one in verify_run(folder).checks) == {"bytes", *figures}


def svdc(*arguments, code=0):
    result = CliRunner().invoke(app, [str(each) for each in arguments])
    assert result.exit_code == code, result.output
    return result.output


def said(*arguments, code=0):
    """The output of a command, joined into one line."""
    return " ".join(svdc(*arguments, code=code).split())


def test_export_once_more(small_run, tmp_path):
    folder, results = small_run
    text = said("export", folder, "--out", tmp_path / "a.onnx", "--precision", "int8", "--compact")
    assert "of the answers as in float32" in text
    assert (tmp_path / "a.onnx").stat().st_size == pytest.approx(results["int8"]["bytes"], rel=0.02)
    svdc("export", folder, "--out", tmp_path / "b.onnx", "--compact")
    assert (tmp_path / "b.onnx").stat().st_size == pytest.approx(results["sparse"]["bytes_compact"], rel=0.05)
    svdc("export", folder, "--out", tmp_path / "c.onnx", "--precision", "float16", "--monte-carlo")
    text = said("export", folder, "--out", tmp_path / "d.onnx", "--precision", "int8", "--monte-carlo", code=2)
    assert "a Monte-Carlo file stays in floating point" in text
    text = said("export", folder, "--out", tmp_path / "e.onnx", "--precision", "int3", code=2)
    assert "'int3' is unknown; one of none, auto, int8, int4, float16" in text
    text = said("export", folder, "--out", tmp_path / "f.onnx", "--precision", "int4", "--compact")
    assert "of the answers as in float32" in text and "in opset 21, because opset 20 has no 4-bit types" in text
    assert [entry.version for entry in onnx.load(str(tmp_path / "f.onnx")).opset_import if not entry.domain] == [21]
    assert (tmp_path / "f.onnx").stat().st_size < (tmp_path / "b.onnx").stat().st_size
    text = said("export", folder, "--out", tmp_path / "h.onnx", "--precision", "int4", "--opset", "21")
    assert "4-bit types" not in text
    text = said("export", folder, "--out", tmp_path / "g.onnx", "--precision", "int4", "--monte-carlo", code=2)
    assert "a Monte-Carlo file stays in floating point" in text


def outlying(tmp_path, spread):
    """A file whose second layer reads one input scaled by `spread` besides those that matter, and its data."""
    torch.manual_seed(0)
    first, second = nn.Linear(4, 4), nn.Linear(4, 2)
    with torch.no_grad():
        first.weight.copy_(torch.diag(torch.tensor([1.0, 1.0, 1.0, spread])))
        first.bias.zero_()
        second.weight.copy_(torch.tensor([[1.0, 0, 0, 0], [-1.0, 0, 0, 0]]))
        second.bias.zero_()
    model = nn.Sequential(first, nn.ReLU(), second, nn.Linear(2, 2))
    with torch.no_grad():
        model[3].weight.copy_(torch.eye(2))
        model[3].bias.copy_(torch.tensor([0.0, 1.0]))
    x = torch.rand(400, 4)
    x[:, 0] = torch.where(x[:, 0] < 0.5, 0.8 * x[:, 0], 0.2 + 0.8 * x[:, 0])  # nothing near the class boundary
    y = (x[:, 0] * 2 < 1).long()
    path = export_onnx(model.eval(), tmp_path / "model.onnx", x[:2]).path
    examples = InMemory(x, y)
    return path, Data(train=examples, validation=examples, test=examples, task="classification", outputs=2)


def test_the_layers_that_lose_too_much_stay_in_float(tmp_path):
    path, data = outlying(tmp_path, 1e5)
    work = Integers(path, data, Baked(), compact=False)
    work.write(tmp_path / "int8.onnx")
    assert work.report["layers"] == {"0": "float32", "2": "float32", "3": "int8"}  # the values between the two are huge
    assert work.report["validation"]["int8"] <= work.limit == work.float_error + 100 / 400
    found = beside(tmp_path / "int8.onnx", path, data, Baked())
    assert found["agreement"] > 0.98
    path, data = outlying(tmp_path, 1.0)
    work = Integers(path, data, Baked(), compact=False, max_drop=5.0, dense=1.0)
    work.write(tmp_path / "int8.onnx")
    assert set(work.report["layers"].values()) == {"int8"} and work.limit == 6.0


@pytest.mark.parametrize(
    ("asked", "limit"),
    [
        ({"max_drop": 5.0, "max_error": 3.0, "dense": 2.0}, 3.0),  # the stricter of two bounds
        ({"max_drop": 0.5, "max_error": 3.0, "dense": 2.0}, 2.5),
        ({"max_error": 2.75, "dense": 2.0}, 2.75),
        ({"max_error": 2.75}, 2.75),  # the dense model's error is unknown
        ({"max_error": 2.2, "dense": 2.0}, 2.4),  # the float file's own error is always allowed
        ({"dense": 2.0}, 2.4 + 100 / 400),
    ],
)
def test_fewer_bits_may_cost_what_the_budget_of_the_search_allows(tmp_path, monkeypatch, asked, limit):
    path, data = outlying(tmp_path, 1.0)
    monkeypatch.setattr(Allowed, "float_error", 2.4)
    assert Allowed(path, data, Baked(), **asked).limit == pytest.approx(limit)
    data.task = "regression"
    relative = {key: value for key, value in asked.items() if key != "max_drop"} | {"max_drop": 50.0}
    if set(asked) == {"max_error", "dense"}:  # the same bound on the RMSE itself; 50% more would be 3.0
        assert Allowed(path, data, Baked(), **relative).limit == pytest.approx(limit)


def test_a_recipe_hands_on_both_bounds_of_its_budget():
    found = budget(load_recipe("digits", ["search.max_drop=5", "search.max_error=3"]), {"error": 2.0})
    assert found == {"max_drop": 5.0, "max_error": 3.0, "dense": 2.0}


def test_ranges_are_of_examples_from_all_over(tmp_path):
    path, data = outlying(tmp_path, 1.0)
    order = data.train.targets.argsort(stable=True)
    x, y = data.train.inputs[order].repeat_interleave(10, 0), data.train.targets[order].repeat_interleave(10)
    data.train = InMemory(x, y)  # as in files sorted by class: the first examples are all of one class
    work = Integers(path, data, Baked())
    seen = np.concatenate([feed[next(iter(feed))] for feed in work._feeds])
    share = (2 * seen[:, 0] < 1).mean()
    assert len(seen) == 320 and abs(share - float((y == 1).double().mean())) < 0.1
    assert np.array_equal(seen, np.concatenate([feed["input"] for feed in Integers(path, data, Baked())._feeds]))


def test_where_nothing_can_be_in_integers_it_says_so(tmp_path, monkeypatch):
    path, data = outlying(tmp_path, 1.0)
    work = Integers(path, data, Baked(), max_drop=0.0, dense=0.0)
    monkeypatch.setattr(Integers, "_tried", lambda *_, **__: 50.0)
    with pytest.raises(ExportError, match=r"no layer can be stored as integers .* the error is 50, and the limit is 0"):
        work.write(tmp_path / "int8.onnx")


@pytest.fixture(scope="module")
def four_run(tiny_recipe, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "four"
    recipe = tiny_recipe.model_copy(deep=True)
    recipe.export.precision, recipe.uncertainty.samples = "int4", 0
    return folder, run(recipe, folder)


def test_a_run_in_four_bits(four_run, tmp_path):
    folder, results = four_run
    found, path = results["int4"], folder / "model_int4.onnx"
    assert found["bytes"] == path.stat().st_size < results["sparse"]["bytes_compact"]
    assert (
        set(found["layers"].values()) <= {"int4", "int8"} and found["validation"]["int4"] <= found["validation"]["limit"] + 1e-9
    )
    test = open_run(folder).data.test
    x = torch.cat([inputs for inputs, _ in test.batches(100)]).numpy()
    y = torch.cat([targets for _, targets in test.batches(100)]).numpy()
    assert found["metrics"]["error"] == pytest.approx(100 * (answers(path, x)[0].argmax(1) != y).mean(), abs=1e-4)
    used = {"int4": 4, "int8": 8}
    assert all(row["used"] == used.get(found["layers"].get(row["name"]), 32) for row in results["bits"])
    assert {row["used"] for row in results["bits"]} != {8}, "else it would not show which layer is which"
    assert {row["used"] for row in results["bits"]} <= {4, 8} and all(row["added"] > 0 for row in results["bits"])
    assert "In four bits (model_int4.onnx)" in " ".join(small_files(results))
    assert verify_run(folder).failed == []
    copy = shutil.copytree(folder, tmp_path / "copy")
    model = onnx.load(str(copy / path.name))
    for tensor in model.graph.initializer:
        if tensor.data_type in (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16) and np.prod(tensor.dims) > 4:
            array = numpy_helper.to_array(tensor)
            tensor.CopyFrom(numpy_helper.from_array((-1.5 * array).astype(array.dtype), tensor.name))
    onnx.save(model, str(copy / path.name))
    report.write_json(copy / "report.json", report.stamped(json.loads((copy / "report.json").read_text()), copy))
    assert path.name in {check.file for check in verify_run(copy).failed}


def test_weights_that_four_bits_spoil_get_eight(tmp_path):
    torch.manual_seed(0)
    fine, coarse = nn.Linear(80, 8, bias=False), nn.Linear(8, 8)
    with torch.no_grad():
        fine.weight.zero_()
        fine.weight[0, 0], fine.weight[0, 1] = 1.0, 0.02  # rounds to 0 with 15 steps
        coarse.weight.copy_(torch.eye(8))
        coarse.bias.copy_(torch.tensor([0.0, 0.0, *[-10.0] * 6]))
    model = nn.Sequential(fine, coarse).eval()
    x = torch.zeros(400, 80)
    x[:, 1] = torch.linspace(-1, 1, 400)
    y = model(x).argmax(1)
    path = export_onnx(model, tmp_path / "model.onnx", x[:2]).path
    data = Data(train=InMemory(x, y), validation=InMemory(x, y), test=InMemory(x, y), task="classification", outputs=8)
    work = FourBits(path, data, Baked())
    work.write(tmp_path / "four.onnx")
    assert work.report["layers"] == {"0": "int8", "1": "int4"}
    assert work.report["validation"]["int4"] <= work.limit == 100 / 400
    loose = FourBits(path, data, Baked(), max_drop=100.0, dense=0.0)
    loose.write(tmp_path / "loose.onnx")
    assert set(loose.report["layers"].values()) == {"int4"}


def test_where_eight_bits_are_too_few_it_says_so(tmp_path, monkeypatch):
    path, data = outlying(tmp_path, 1.0)
    monkeypatch.setattr("svdcompress.export._few_bits.SMALLEST", 4)
    work = FourBits(path, data, Baked(), max_drop=0.0, dense=0.0)
    monkeypatch.setattr(FourBits, "error", lambda self, path, *_, **__: 50.0 if path != self.path else 0.0)
    with pytest.raises(ExportError, match=r"more than eight bits .* the error is 50, and the limit is 0"):
        work.write(tmp_path / "four.onnx")
    monkeypatch.undo()
    with pytest.raises(ExportError, match="no weight that four bits would make smaller"):
        FourBits(path, data, Baked()).write(tmp_path / "four.onnx")
    assert not (tmp_path / "four.onnx").exists()


def test_what_is_slower_is_told():
    assert (
        slower({"batch_1": 2.0, "batch_128": 1.0}, {"batch_1": 1.0, "batch_128": 2.0})
        == "at batch 1 it takes 2.00 times as long"
    )
    assert slower({"batch_1": 1.0}, {"batch_1": 2.0}) == ""


def test_a_recipe_names_the_forms():
    assert load_recipe("digits", ["export.precision=auto"]).export.precision == "auto"
    with pytest.raises(Exception, match=r"export\.precision"):
        load_recipe("digits", ["export.precision=int3"])
