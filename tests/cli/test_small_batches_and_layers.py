"""`inspect` and `sparsify --dry-run` with models that fail for one example, and with layers without weights."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from svdcompress.cli import app
from svdcompress.errors import ModelError

MODELS = """
import torch
from torch import nn

class Squeezed(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x):
        hidden = self.a(x).squeeze()
        return self.b(hidden.reshape(len(x), hidden.shape[1]))

class Empty(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.none = nn.Linear(4, 3), nn.Linear(4, 0)

    def forward(self, x):
        return torch.cat([self.a(x), self.none(x)], 1)
"""


@pytest.fixture
def tried(tmp_path, monkeypatch):
    """Runs a command with one of the models: tried(model, command, ...)."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models.py").write_text(MODELS)
    x = np.random.default_rng(0).normal(size=(80, 4)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=x, y=x[:, :3].argmax(1))
    source = ("--model", "./models.py:{}", "--data", "npz:data.npz")
    return lambda model, *command: CliRunner().invoke(app, [*command, *(each.format(model) for each in source)])


@pytest.mark.parametrize("command", [("inspect",), ("sparsify", "--dry-run"), ("sparsify", "--out", "out")])
def test_a_model_that_fails_for_one_example_is_refused(tried, command):
    found = tried("Squeezed", *command)
    assert found.exit_code == ModelError.exit_code, found.output
    said = " ".join(found.stderr.split())
    assert "model: ./models.py:Squeezed fails for a batch of one example: IndexError: tuple index out of range" in said


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("command", [("inspect",), ("sparsify", "--dry-run")])
def test_a_layer_without_weights_stays_dense(tried, command):
    found = tried("Empty", *command, "--json")
    assert found.exit_code == 0, found.output
    plan = {entry["name"]: entry for entry in json.loads(found.stdout)["plan"]}
    assert plan["a"]["converted"] and not plan["none"]["converted"]
    assert plan["none"]["reason"] == "its weight is empty, of shape (0, 4)"
