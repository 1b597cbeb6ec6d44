"""Runs of models and data that were passed as Python objects, opened again after the call."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import svdcompress as svdc
from svdcompress.cli import app
from svdcompress.errors import DataError, ModelError, UsageError
from svdcompress.pipeline import verify_run
from svdcompress.predict import predict_run
from svdcompress.recipe import load_recipe
from svdcompress.sources import code_in
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
