"""Frozen layers: training can't drop their weights, and plans, commands and runs say so."""

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import svdcompress as svdc
from svdcompress.cli import app
from svdcompress.errors import ModelError

MODEL = """
import torch
from torch import nn

def make(frozen=True):
    net = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 2))
    net[0].requires_grad_(not frozen)
    return net

def data():
    x = torch.randn(400, 10, generator=torch.Generator().manual_seed(0))
    return {"train": (x[:300], (x[:300, 0] > 0).long()), "test": (x[300:], (x[300:, 0] > 0).long())}
"""
QUICK = {"dense.epochs": 2, "train.epochs": 2, "recover.epochs": 1, "export.onnx": False, "report.latency": False}


@pytest.fixture
def file(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    return "./mine.py"


def said(*args):
    done = CliRunner().invoke(app, list(args), env={"COLUMNS": "500"})
    assert done.exit_code == 0, done.output
    return done.output


def test_a_plan_names_them():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.utils.parametrizations.weight_norm(nn.Linear(4, 2)))
    model[0].requires_grad_(False)
    notes = {entry.name: entry.note for entry in svdc.plan(model, derived="fold")}
    assert "frozen (requires_grad=False)" in notes["0"] and notes["1"] == "" and "frozen" not in notes["2"]
    model[2].requires_grad_(False)
    assert all("frozen" in entry.note for entry in svdc.plan(model, derived="fold") if entry.name in ("0", "2"))


@pytest.mark.parametrize("command", [["inspect"], ["sparsify", "--dry-run", "--epochs", "2"]])
def test_commands_name_them_before_anything_is_trained(file, command):
    shown = said(*command, "--model", f"{file}:make", "--data", f"{file}:data")
    assert "converted, but frozen (requires_grad=False)" in shown
    assert "1 layer to be pruned is frozen (requires_grad=False): 0." in shown and "Unfreeze" in shown
    assert "83% are frozen" in shown or command == ["inspect"]  # whose weights are newly drawn
    free = said(*command, "--model", f"{file}:make", "--model-arg", "frozen=false", "--data", f"{file}:data")
    assert "frozen" not in free.replace("frozen=false", "")


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("goal", [None, "macs=2x"])
def test_a_run_says_why_nothing_goes(goal, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 2))
    model[0].requires_grad_(False)
    x = torch.randn(400, 10)
    run = svdc.sparsify(model, (x, (x[:, 0] > 0).long()), goal=goal, trained=False, settings=QUICK, out=tmp_path / "run")
    warnings = run.results["warnings"]
    (told,) = (line for line in warnings if "frozen (requires_grad=False)" in line)
    assert ("A search removes units of theirs all the same" in told) == (goal is not None)
    assert not any("training is too short" in line for line in warnings)
    if goal is None:  # more pressure would be no cure
        (few,) = (line for line in warnings if "To drop more" in line)
        assert "unfreeze the layers with requires_grad=False. They hold 83% of the weights" in few and "beta" not in few


def test_if_all_is_frozen_there_is_nothing_to_train(tmp_path):
    model = nn.Sequential(nn.Linear(10, 2)).requires_grad_(False)
    with pytest.raises(ModelError, match="all its parameters are frozen"):
        svdc.sparsify(model, (torch.randn(300, 10), torch.zeros(300).long()), settings=QUICK, out=tmp_path / "run")
