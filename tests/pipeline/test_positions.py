"""Targets for each pixel or token: whole runs through the commands, and metrics against plain loops over positions."""

import csv
import json

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from svdcompress.cli import app
from svdcompress.pipeline import open_run
from svdcompress.sources import class_dim, like

FILE = """
import torch
from torch import nn

OUTPUTS = {"pixels": 3, "ignored": 3, "mask": 1, "flat mask": 1, "heights": 1, "gaussian": 2, "pair": 2}

class Pair(nn.Sequential):
    def forward(self, x):
        return super().forward(x).chunk(2, 1)

class Tagger(nn.Module):
    def __init__(self, first):
        super().__init__()
        self.embed, self.a, self.b, self.first = nn.Embedding(20, 12), nn.Linear(12, 16), nn.Linear(16, 4), first

    def forward(self, x):
        out = self.b(torch.relu(self.a(self.embed(x))))
        return out.transpose(1, 2) if self.first else out

def make(kind):
    if "tokens" in kind:
        return Tagger(kind == "tokens, classes first")
    kind_of = Pair if kind == "pair" else nn.Sequential
    return kind_of(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, OUTPUTS[kind], 3, padding=1))

def data(kind, held=True, n=60):
    g = torch.Generator().manual_seed(0)
    if "tokens" in kind:
        x = torch.randint(0, 20, (n, 9), generator=g)
        y = x % 4
        y[:, -2:] = -100
    else:
        x = torch.randn(n, 1, 6, 5, generator=g)
        level = (x[:, 0] > 0.5).long() + (x[:, 0] > -0.5).long()
        y = {"pixels": level, "ignored": torch.where(x[:, 0].abs() > 1.5, -100, level), "mask": (x > 0).float(),
             "flat mask": (x[:, 0] > 0).float()}.get(kind, 3 * x + 1)
    k = 2 * n // 3
    return ((x[:k], y[:k]), (x[k:], y[k:])) if held else (list(zip(x[:k], y[:k])), list(zip(x[k:], y[k:])))
"""

QUICK = [
    *["dense.epochs=8", "dense.lr=0.02", "dense.batch_size=10", "train.epochs=2", "train.batch_size=10", "recover.epochs=1"],
    *["uncertainty.samples=3", "report.html=false", "report.latency=false", "train.beta.final=1e-4", "device=cpu"],
]
LOSSES = {
    "pixels": "cross-entropy",
    "ignored": "cross-entropy",
    "tokens, classes first": "cross-entropy",
    "tokens, classes last": "cross-entropy",
    "mask": "binary",
    "flat mask": "binary",
    "heights": "mse",
    "gaussian": "gaussian-nll",
    "pair": "gaussian-nll",
}


def svdc(*words):
    """The output of a command that must succeed."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    return result.output


def sparsify(kind, *more):
    options = [part for setting in [*QUICK, *more] for part in ("--set", setting)]
    given = [
        "--model",
        "./maps.py:make",
        "--model-arg",
        f"kind={kind}",
        "--data",
        "./maps.py:data",
        "--data-arg",
        f"kind={kind}",
    ]
    svdc("sparsify", *given, "--loss", LOSSES[kind], *options, "--out", "out")


def by_hand(kind, model, x, y):
    """A model's error in percent, or its RMSE, position by position."""
    with torch.no_grad():
        out = model(x)
    if LOSSES[kind] == "cross-entropy":
        places = [(n, *place) for n, *place in np.ndindex(*y.shape) if y[(n, *place)] != -100]
        last = kind == "tokens, classes last"
        guesses = [int((out[place] if last else out[(place[0], slice(None), *place[1:])]).argmax()) for place in places]
        return 100 * float(np.mean([guess != int(y[place]) for guess, place in zip(guesses, places, strict=True)]))
    if LOSSES[kind] == "binary":
        return 100 * float(((out[:, 0] > 0) != (y.reshape(len(y), *out.shape[2:]) > 0.5)).double().mean())
    mean = out[0] if kind == "pair" else out[:, :1]
    return float((mean - y).square().mean().sqrt())


@pytest.mark.slow
@pytest.mark.parametrize("kind", LOSSES)
def test_every_kind_of_positions_comes_to_its_end(tmp_path, monkeypatch, kind):
    onnxruntime = pytest.importorskip("onnxruntime")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "maps.py").write_text(FILE)
    sparsify(kind, "data.args.held=true")
    results = json.loads((tmp_path / "out" / "report.json").read_text())
    assert not results.get("failed")
    assert set(results["parity"]) == {"dense.onnx", "model.onnx", "model_compact.onnx", "model_mc.onnx"}
    opened = open_run("out", trust_code=True)
    (x, y) = next(opened.data.test.batches(100))
    figure = "error" if LOSSES[kind] in ("cross-entropy", "binary") else "rmse"
    for name, model in (("dense", opened.dense), ("sparse", opened.model)):
        expected = by_hand(kind, model, x, y)
        assert results[name]["metrics"][figure] == pytest.approx(expected, rel=1e-4)
        row = "dense" if name == "dense" else "sparse, mean"
        assert results["uncertainty"][row][figure] == pytest.approx(expected, rel=1e-4)
    assert results["dense"]["metrics"][figure] < (40 if figure == "error" else 2.5)  # it learns, so targets are in place
    out = onnxruntime.InferenceSession("out/model.onnx").run(None, {"input": x.numpy()})
    with torch.no_grad():
        plain = opened.model(x)
    assert np.abs(out[0] - (plain[0] if kind == "pair" else plain).numpy()).max() < 1e-4

    svdc("evaluate", "out", "--samples", 3, "--json", "--trust-code")
    compared = {
        row["name"]: row["metrics"]
        for row in json.loads((tmp_path / "out/evaluation/evaluation.json").read_text())["contenders"]
    }
    assert compared["sparse, mean"][figure] == pytest.approx(results["sparse"]["metrics"][figure], rel=1e-4)
    np.save("in.npy", x.numpy())
    for more in ((), ("--onnx",)):
        svdc("predict", "out", "--input", "in.npy", "--samples", 200, "--out", "p.csv", "--trust-code", *more)
        with open("p.csv") as file:
            rows = list(csv.DictReader(file))
        assert len(rows) == len(x) * (9 if "tokens" in kind else 30)
        assert rows[6]["name"] == "0" and rows[6]["position"] == ("6" if "tokens" in kind else "1,1")
        if LOSSES[kind] == "cross-entropy":
            guess = plain.movedim(1, -1).argmax(-1) if kind != "tokens, classes last" else plain.argmax(-1)
            same = np.mean([int(row["label"]) == int(g) for row, g in zip(rows, guess.flatten(), strict=True)])
            assert same > 0.9
        svdc("predict", "out", "--input", "in.npy", "--samples", 3, "--out", "p.npz", "--trust-code", *more)


@pytest.mark.slow
def test_positions_that_are_read_as_needed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "maps.py").write_text(FILE)
    sparsify("ignored", "data.args.held=false", "loss.class_weights=balanced", "train.distill.weight=0.5")
    results = json.loads((tmp_path / "out" / "report.json").read_text())
    assert not results.get("failed") and results["dense"]["metrics"]["error"] < 40


@pytest.mark.parametrize(
    ("output", "targets", "task", "dim"),
    [
        ((2, 5), (2,), "classification", 1),
        ((2, 5, 8, 6), (2, 8, 6), "classification", 1),
        ((2, 9, 5), (2, 9), "classification", -1),
        ((2, 5, 9), (2, 9), "classification", 1),
        ((2, 9, 9), (2, 9), "classification", 1),
        ((2, 2, 8, 6), (2, 1, 8, 6), "gaussian", 1),
        ((2, 2, 8, 6), (2, 8, 6), "gaussian", 1),
        ((2, 9, 4), (2, 9, 2), "gaussian", -1),
        ((2, 9, 2), (2, 9), "gaussian", -1),
    ],
)
def test_the_dimension_of_the_classes(output, targets, task, dim):
    assert class_dim(output, targets, task) == dim


def test_both_fit_and_the_model_is_one_of_transformers():
    assert class_dim((2, 9, 9), (2, 9), "classification", last_if_both=True) == -1
    assert class_dim((2, 9, 5, 5), (2, 5, 5), "classification", last_if_both=True) == 1


def test_targets_in_another_order_are_refused():
    values = torch.arange(24.0).view(2, 3, 4)
    assert like(values, values[:, None]).shape == (2, 1, 3, 4)
    assert torch.equal(like(values.flatten(1), values), values)
    assert torch.equal(like(values[:, :1, 0], torch.zeros(2, 1)), values[:, :1, 0])
    for wrong in (values.transpose(1, 2), values[:, :2], torch.zeros(4, 3, 2)):
        with pytest.raises(ValueError, match="for targets of shape"):
            like(wrong, torch.zeros(2, 3, 4))


def test_a_batch_of_ignored_positions_alone_has_no_loss():
    from svdcompress.likelihoods import make_loss
    from svdcompress.recipe import LossSection

    logits = torch.randn(2, 3, 4, requires_grad=True)
    loss = make_loss(LossSection())(logits, torch.full((2, 4), -100))
    loss.backward()
    assert loss.item() == 0 and not logits.grad.any()
    target = torch.tensor([[0, 1, -100, 2], [-100, 2, 2, 0]])
    expected = -torch.stack(
        [logits[n].log_softmax(0)[c, t] for n, t, c in [(n, t, int(target[n, t])) for n in (0, 1) for t in range(4)] if c >= 0]
    ).mean()
    assert make_loss(LossSection())(logits, target).item() == pytest.approx(expected.item(), rel=1e-5)
    assert make_loss(LossSection(), dim=-1)(logits.transpose(1, 2), target).item() == pytest.approx(expected.item(), rel=1e-5)


def test_a_teacher_of_positions_counts_each_once():
    """The distillation loss is the mean over positions, whichever dimension holds the classes."""
    from svdcompress.likelihoods import Classification
    from svdcompress.recipe import Distillation
    from svdcompress.train._distill import Teacher

    torch.manual_seed(0)
    x, soft = torch.randn(2, 5, 3), nn.Linear(3, 4)
    own = torch.randn(2, 5, 4)
    p = soft(x).div(2).softmax(-1)
    expected = 4 * (p * (p.log() - own.div(2).log_softmax(-1))).sum(-1).mean()
    found = Teacher(soft, Distillation(weight=1.0), Classification(-1), None).mix(torch.tensor(9.0), own, x)
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
