"""The posterior's bits and step sizes reach the weights of files whose names the wrappers of a run have changed."""

import json

import numpy as np
import onnx
import pandas
import pytest
import torch
from onnx import numpy_helper
from torch import nn
from typer.testing import CliRunner

import svdcompress as svdc
from svdcompress.cli._app import app
from svdcompress.export import importance, pack, unpack
from svdcompress.pipeline import WeightNames, open_run
from svdcompress.pipeline._baked import Baked
from svdcompress.pipeline._select import Select, widened


def small():
    torch.manual_seed(0)
    return svdc.convert(nn.Sequential(nn.Linear(3, 20), nn.ReLU(), nn.Linear(20, 4))).eval()


@pytest.mark.parametrize("columns", [False, True], ids=["plain", "columns in their units"])
@pytest.mark.parametrize("form", ["all inputs", "selected", "widened"])
def test_names_and_shapes_of_each_form(tmp_path, form, columns):
    model, path, size = small(), tmp_path / "a.onnx", 3 if form == "all inputs" else 7
    with torch.no_grad():
        model[0].log_sigma2[:, 1] = -3.0
    units = Baked({"mean": [1.0] * size, "std": [2.0] * size}) if columns else Baked()
    run = model if form == "all inputs" else Select(model, [0, 4, 5], 1)
    written = widened(run, torch.randn(4, 7)) if form == "widened" else run
    svdc.export_onnx(units.model(written), path, torch.randn(2, size))
    shapes = {tensor.name: tuple(tensor.dims) for tensor in onnx.load(path).graph.initializer}
    names = WeightNames(path, run)
    own, found = importance(model), names.importance()
    assert set(found) == {names.weight("0"), names.weight("2")} <= set(shapes)
    assert all(each.shape == shapes[name] for name, each in found.items())
    kept = [0, 4, 5] if form == "widened" else [0, 1, 2]
    np.testing.assert_array_equal(found[names.weight("0")][:, kept], own["0.weight"])
    assert names.layers({names.weight("2").removesuffix(".weight"): "int4"}) == {"2": "int4"}


@pytest.fixture(scope="module")
def table_run(tmp_path_factory):
    """A run on a table, whose columns its files standardize."""
    folder = tmp_path_factory.mktemp("table")
    draw = np.random.default_rng(0)
    x = draw.normal(size=(500, 5)) * [1, 5, 10, 1, 1] + 3
    label = np.where((x[:, 0] - 3) * (x[:, 1] - 3) + x[:, 2] - 3 > 0, "p", "q")
    pandas.DataFrame(x, columns=list("abcde")).assign(label=label).to_csv(folder / "t.csv", index=False)
    given = ["sparsify", "--model", "mlp", "--model-arg", "sizes=[5,24,24,2]", "--data", f"csv:{folder / 't.csv'}"]
    given += ["--target", "label", "--out", str(folder / "run"), "--dense-epochs", "6", "--epochs", "2", "--precision", "int4"]
    given += ["--set", "train.lr_log_sigma2=0.2"]  # so that variances differ
    given += ["--set", "recover.epochs=0", "--set", "uncertainty.samples=0", "--set", "report.latency=false"]
    found = CliRunner().invoke(app, given)
    assert found.exit_code == 0, found.output
    return folder / "run"


def test_the_report_says_which_bits_were_used(table_run):
    told = json.loads((table_run / "report.json").read_text())
    kinds = told["int4"]["layers"]
    few = [row for row in told["bits"] if row["used"] < 32]  # the last weight is too small to store in fewer bits
    assert {row["name"]: f"int{row['used']}" for row in few} == kinds and "int4" in kinds.values()
    assert len(few) == 2 and all(row["added"] > 0 for row in few)


@pytest.mark.parametrize("precision", ["posterior", "auto"])
def test_an_archive_has_the_bits_that_it_says(table_run, tmp_path, precision):
    given = ["pack", str(table_run), "--precision", precision, "--out", str(tmp_path / "a"), "--json"]
    told = json.loads(CliRunner().invoke(app, given).stdout)
    assert told["missing"] == [] and len(told["bits"]) == 3
    unpack(tmp_path / "a", tmp_path / "a.onnx")
    weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(tmp_path / "a.onnx").graph.initializer}
    for name, bits in told["bits"].items():
        for row in weights[name]:  # whole multiples of a step, no more than the bits have
            values = np.unique(np.abs(row[row != 0]))
            assert len(values) <= 2 ** (bits - 1) - 1


def test_four_bits_have_the_posteriors_steps(table_run, tmp_path):
    opened = open_run(table_run)
    names = WeightNames(table_run / "model.onnx", opened.model)
    pack(table_run / "model.onnx", tmp_path / "posterior", "int4", importance=names.importance())
    pack(table_run / "model.onnx", tmp_path / "errors", "int4")
    given = ["pack", str(table_run), "--precision", "int4", "--out", str(tmp_path / "cli")]
    assert CliRunner().invoke(app, given).exit_code == 0

    def weights(name):
        unpack(tmp_path / name, tmp_path / f"{name}.onnx")
        return [tensor.raw_data for tensor in onnx.load(tmp_path / f"{name}.onnx").graph.initializer]

    assert weights("cli") == weights("posterior") != weights("errors")


def test_a_run_that_dropped_inputs_is_stored_in_four_bits(tmp_path):
    draw = np.random.default_rng(0)
    x = draw.normal(size=(1500, 30)).astype(np.float32)
    wanted = x[:, 0] * x[:, 1] + x[:, 2] + 0.5 * draw.normal(size=1500) > 0
    np.savez(tmp_path / "t.npz", x=x, y=wanted.astype(np.int64))
    given = ["sparsify", "--model", "mlp", "--model-arg", "sizes=[30,64,2]", "--data", f"npz:{tmp_path / 't.npz'}"]
    given += ["--dense-epochs", "15", "--epochs", "30", "--threshold", "1", "--precision", "int4"]
    given += ["--out", str(tmp_path / "run")]
    settings = ["train.lr=0.02", "train.beta.final=3", "recover.epochs=3", "prune.remove_inputs=true", "uncertainty.samples=0"]
    found = CliRunner().invoke(app, given + [part for setting in settings for part in ("--set", setting)])
    assert found.exit_code == 0, found.output
    told = json.loads((tmp_path / "run" / "report.json").read_text())
    assert told["pruning"]["inputs_kept"] is not None and len(told["pruning"]["inputs_kept"]) < 30
    assert {row["name"]: f"int{row['used']}" for row in told["bits"] if row["used"] < 32} == {
        name: kind for name, kind in told["int4"]["layers"].items() if kind != "float32"
    }
