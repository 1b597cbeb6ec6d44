"""Runs of models and data that were passed as Python objects, opened again after the call."""

import copy
import re
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import svdcompress as svdc
from svdcompress.cli import app
from svdcompress.errors import DataError, ModelError, UsageError
from svdcompress.pipeline import run as run_recipe
from svdcompress.pipeline import verify_run
from svdcompress.pipeline._same_data import _checksum, changed, seen
from svdcompress.predict import predict_run
from svdcompress.recipe import dump_recipe, load_recipe
from svdcompress.sources import Data, InMemory, code_in
from svdcompress.sources.given import given


def net():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The objects that were passed, and the result."""
    torch.manual_seed(0)
    x = torch.randn(300, 6)
    data = (x, (x[:, 0] > 0).long())
    settings = {"dense.epochs": 2, "train.epochs": 1, "recover.epochs": 1, "uncertainty.samples": 10}
    model = net()
    found = svdc.sparsify(model, data, trained=False, settings=settings, out=tmp_path_factory.mktemp("handed") / "run")
    return model, data, found


def test_what_was_handed_over_opens_its_run_again(made):
    model, data, found = made
    before = copy.deepcopy(model.state_dict())
    for again in (model, net):
        run = svdc.load_run(found.folder, model=again, data=data)
        torch.testing.assert_close(run.model(data[0]), found.model(data[0]), rtol=0, atol=0)
        assert len(run.data.test) == 60 and run.dense is not model
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_what_is_missing_is_said(made):
    _, _, found = made
    run = svdc.load_run(found.folder)
    with pytest.raises(ModelError, match=r"^model: passed in Python, .*load_run\(folder, model=\.\.\.\), or .*--model FILE"):
        _ = run.model
    with pytest.raises(DataError, match=r"^data.name: passed in Python, .*load_run\(folder, data=\.\.\.\)"):
        _ = run.data
    with pytest.raises(UsageError, match=r"model: int is neither a torch.nn.Module"):
        svdc.load_run(found.folder, model=3)
    with pytest.raises(
        UsageError, match=r"model: list is neither a torch.nn.Module, nor a function that makes one, nor a name"
    ):
        svdc.load_run(found.folder, model=lambda: [net()])


def test_predictions_and_checks_take_the_model_again(made, tmp_path):
    model, data, found = made
    np.save(tmp_path / "x.npy", data[0][:5].numpy())
    out, count = predict_run(found.folder, tmp_path / "x.npy", tmp_path / "p.npz", model=model, samples=5)
    assert count == 5 and np.isfinite(np.load(out)["mean"]).all()
    checked = verify_run(found.folder, model=model)
    assert not checked.failed and len(checked.skipped) < len(verify_run(found.folder).skipped)


def test_the_command_of_the_report_runs(made, tmp_path):
    _, data, found = made
    page = (found.folder / "report.html").read_text(encoding="utf-8")
    assert f"svdc predict {found.folder} --onnx --input FILE" in page
    assert "as the data object gives them" in page
    np.save(tmp_path / "x.npy", data[0][:5].numpy())
    command = ["predict", str(found.folder), "--onnx", "--input", str(tmp_path / "x.npy"), "--out", str(tmp_path / "p.csv")]
    assert CliRunner().invoke(app, command).exit_code == 0
    assert len((tmp_path / "p.csv").read_text().splitlines()) == 6


def test_only_the_names_of_objects_are_no_code(made):
    recipe = load_recipe(made[2].folder / "recipe.yaml")
    assert code_in(recipe) == {}
    recipe.model.name = "svdcompress.sources.given:copy"
    recipe.data.name = "svdcompress.sources.given2:data"
    assert set(code_in(recipe)) == {"model.name", "data.name"}


def test_two_calls_with_objects_are_told_apart(made):
    model, data, found = made
    run = svdc.load_run(found.folder, model=model, data=data)
    with given(model=net()), pytest.raises(UsageError, match="another call"):
        _ = run.model


def data_of(run):
    """What opening the run's data warns of."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert len(run.data.test) > 0
    return [str(one.message) for one in told if "not those of the run" in str(one.message)]


def test_other_data_than_those_of_the_run_are_told_of(made):
    model, (x, y), found = made
    assert data_of(svdc.load_run(found.folder, model=model, data=(x.clone(), y.clone()))) == []
    (told,) = data_of(svdc.load_run(found.folder, model=model, data=(x + 1, y)))
    assert told.startswith(f"{found.folder}: the data are not those of the run (train: other values; validation: other")
    (told,) = data_of(svdc.load_run(found.folder, model=model, data=(x[:200], y[:200])))
    assert re.search(r"train: \d+ examples, \d+ then; .*test: 40 examples, 60 then\)", told)


def test_a_single_other_target_is_noticed_wherever_it_is():
    """Of more than 256 examples, inputs are looked at here and there only."""
    x, y = torch.randn(1000, 3), torch.arange(1000) % 3

    def data(targets):
        return Data(*[InMemory(x, targets)] * 3, "classification", 3)

    before = seen(data(y))
    assert changed(before, data(y.clone())) == ""
    for place in (0, 1, 2, 500, 999):
        other = y.clone()
        other[place] += 1
        assert "train: other values" in changed(before, data(other))
    older = {name: {key: value for key, value in each.items() if key != "targets"} for name, each in before.items()}
    assert changed(older, data(y)) == "" and "train: other values" in changed(older, data(2 - y))


def test_the_last_of_very_many_examples_are_looked_at():
    """Beyond 2**24, float32 has no number for each index."""
    count = 2**24 + 4
    x, y = torch.zeros(count, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8).expand(count)
    before = _checksum(InMemory(x, y))
    x[-1] = 1
    assert _checksum(InMemory(x, y)) != before


def test_a_data_file_that_has_changed_since_is_told_of(tiny_recipe, tmp_path):
    rng = np.random.default_rng(0)
    arrays = {"x": rng.normal(size=(60, 4)).astype(np.float32), "y": np.arange(60) % 3}
    np.savez(tmp_path / "d.npz", **arrays)
    out, settings = tmp_path / "run", ["data.transform=[flatten]", "model.args={sizes: [4, 12, 3]}", "data.limit=null"]
    (tmp_path / "recipe.yaml").write_text(dump_recipe(tiny_recipe))
    quick = ["export.onnx=false", "report={html: false, latency: false}", "uncertainty.samples=0"]
    run_recipe(load_recipe(tmp_path / "recipe.yaml", [*quick, f"data=npz:{tmp_path}/d.npz", *settings]), out)
    assert data_of(svdc.load_run(out)) == []
    shuffled = rng.permutation(60)
    np.savez(tmp_path / "d.npz", x=arrays["x"][shuffled], y=arrays["y"][shuffled])
    assert len(data_of(svdc.load_run(out))) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        said = CliRunner().invoke(app, ["evaluate", str(out), "--samples", "5", "--no-magnitude", "--no-laplace"])
    assert said.exit_code == 0, said.output
    assert "warning: " in said.output and "training examples may be among the test" in said.output
