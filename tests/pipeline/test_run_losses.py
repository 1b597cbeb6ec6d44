"""Each loss in a tiny run, and what is reported before training if a loss or a pattern does not fit the model."""

import numpy as np
import pytest
import torch
from torch import nn

import svdcompress as svdc
from svdcompress import report
from svdcompress.errors import ModelError, RecipeError
from svdcompress.pipeline import check_model, run
from svdcompress.pipeline._label import label
from svdcompress.pipeline._loss import class_weights
from svdcompress.recipe import load_recipe
from svdcompress.sources import Data, FromDataset, InMemory

MINE = """
from torch import nn

def make(outputs):
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, outputs))

def loss(output, target):
    return (output[:, 0] - target).abs().mean()
"""

QUICK = ["dense.epochs=2", "train.epochs=1", "recover.epochs=1", "device=cpu", "uncertainty.samples=2", "train.beta.final=1e-6"]
QUICK += ["export.onnx=false", "report.html=false"]

LOSSES = {
    "smoothed classes": (3, "{name: cross-entropy, label_smoothing: 0.1}"),
    "weighed classes": (3, "{name: cross-entropy, class_weights: [1, 2, 3]}"),
    "balanced classes, more outputs": (5, "{name: cross-entropy, class_weights: balanced}"),
    "binary, balanced": (1, "{name: binary, class_weights: balanced}"),
    "binary, weighed": (1, "{name: binary, class_weights: [2]}"),
    "mse": (1, "{name: mse, tau: 2}"),
    "mse, tau from the data": (1, "mse"),
    "a mean and a variance": (2, "gaussian-nll"),
    "a loss of one's own": (1, "{name: './mine.py:loss', task: regression}"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_run_with_each_loss(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    outputs, loss = LOSSES[name]
    (tmp_path / "mine.py").write_text(MINE)
    x = np.random.default_rng(0).normal(size=(120, 4)).astype(np.float32)
    settings = [f"loss={loss}", f"model={{name: './mine.py:make', args: {{outputs: {outputs}}}}}", "data=npz:data.npz"]
    recipe = load_recipe(None, [*settings, *QUICK])
    np.savez("data.npz", x=x, y={"classification": x[:, :3].argmax(1), "binary": x[:, 0] > 0}.get(recipe.task, x[:, 0]))
    results = run(recipe, tmp_path / "out")
    losses = [row["loss"] for row in results["history"]]
    assert len(losses) == 4 and np.isfinite(losses).all()
    kept = svdc.read_manifest("out/model.safetensors")
    settings = kept["likelihood"]["settings"]
    assert kept["likelihood"]["name"] == recipe.task and settings["dim"] == 1
    if recipe.task == "regression":
        assert settings["mean_tau"] == pytest.approx(kept["extra"]["tau"], rel=1e-4) and settings["tau"] >= settings["mean_tau"]
    else:
        assert set(settings) <= {"dim", "temperature", "mean_temperature"}
    values = recipe.task in ("regression", "gaussian")
    for side in ("dense", "sparse"):
        assert set(results[side]["metrics"]) == ({"rmse", "r2", "nll"} if values else {"error", "nll"})
    assert ("<td>R2</td>" in report.render(results)) == values


def trial(loss, outputs, targets, *settings):
    recipe = load_recipe(None, [f"loss={loss}", "model=mine:make", *settings])
    examples = InMemory(torch.randn(len(targets), 4), targets)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, outputs))
    check_model(model, recipe, Data(examples, examples, examples, recipe.task, outputs), examples.inputs[:2])


VALUES, LABELS = torch.linspace(-1, 1, 8), torch.arange(8) % 2


@pytest.mark.parametrize(
    ("loss", "outputs", "targets", "said"),
    [
        (
            "mse",
            3,
            VALUES,
            r"loss\.name: mse does not fit .* of shape \(2, 3\), and targets of shape \(2,\).* takes one output",
        ),
        ("binary", 2, LABELS.float(), r"loss\.name: binary .* \(2, 2\), and targets of shape \(2,\); binary takes one output"),
        ("gaussian-nll", 1, VALUES, r"loss\.name: gaussian-nll .*\(2, 1\).* takes two outputs for each target"),
        ("{name: 'torch.nn.functional:mse_loss', task: regression}", 3, VALUES, r"loss\.name: .*mse_loss does not fit"),
        ("{name: 'torch:sub', task: regression}", 1, VALUES[:, None], r"returns a tensor of shape \(2, 1\); it must average"),
        ("{name: 'torch.nn:Identity', task: regression}", 1, VALUES, "returns a Identity; it must average"),
    ],
)
def test_a_model_that_does_not_fit_its_loss_is_an_error_before_training(loss, outputs, targets, said):
    with pytest.raises(ModelError, match=said):
        trial(loss, outputs, targets)


class Flat(nn.Module):
    """A model with one number for each example, of shape (N,)."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x):
        return self.layer(x).squeeze(1)


def test_an_output_without_classes_is_an_error_that_names_other_losses():
    examples = InMemory(torch.randn(8, 4), LABELS)
    for loss, taker in (("cross-entropy", "cross-entropy"), ("{name: 'torch:sub', task: classification}", "classification")):
        recipe = load_recipe(None, [f"loss={loss}", "model=mine:make"])
        said = rf"of mine:make: an output of shape \(2,\) has no .*{taker} takes \(N, classes\); .*--loss mse, .*--loss binary"
        with pytest.raises(ModelError, match=said):
            check_model(Flat(), recipe, Data(examples, examples, examples, "classification", 2), examples.inputs[:2])
    with pytest.raises(ModelError, match=r"an output of shape \(8,\) has no .*classification takes \(N, classes\)"):
        label(Data(examples, examples, examples, "classification", 2), Flat(), True, "cpu")
    recipe = load_recipe(None, ["loss=mse", "model=mine:make"])
    values = InMemory(examples.inputs, VALUES)
    check_model(Flat(), recipe, Data(values, values, values, "regression", 1), values.inputs[:2])


def test_class_weights_are_as_many_as_classes():
    trial("{class_weights: [1, 2]}", 2, LABELS)
    with pytest.raises(RecipeError, match=r"loss\.class_weights: 3 weights, but the model has 2 outputs"):
        trial("{class_weights: [1, 2, 3]}", 2, LABELS)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("convert.include=['00']", r"convert\.include: '00' matches no module of Sequential; did you mean 0\?"),
        (
            "convert.layers=[{match: '0'}, {match: fc9}]",
            r"convert\.layers\.1\.match: 'fc9' matches no module .*there are 0, 1, 2",
        ),
        ("convert.layers=[{match: '1'}]", r"convert\.layers\.0\.match: no layer that 1 matches is converted"),
        ("prune.protect=[nothing]", r"prune\.protect: 'nothing' matches no module"),
        ("convert.exclude=['0', '2']", r"convert: nothing to convert in Sequential \(0: excluded; 2: excluded\)"),
    ],
)
def test_patterns_are_checked_before_training(setting, said):
    trial("cross-entropy", 2, LABELS, "prune.protect=['2']", "convert.layers=[{match: '0'}]")
    with pytest.raises(ModelError, match=said):
        trial("cross-entropy", 2, LABELS, setting)


@pytest.mark.parametrize("in_memory", [True, False])
def test_balanced_classes_weigh_alike(in_memory):
    x, y = torch.randn(250, 4), torch.tensor([0] * 150 + [1] * 75 + [3] * 25)
    examples = InMemory(x, y) if in_memory else FromDataset(torch.utils.data.TensorDataset(x, y))
    data = Data(examples, examples, examples, "classification", 0)
    recipe = load_recipe(None, ["loss.class_weights=balanced"])
    weights = class_weights(recipe.loss, data, nn.Linear(4, 5), x[:2])
    assert (weights[[0, 1, 3]] * torch.tensor([150, 75, 25])).tolist() == pytest.approx([250 / 3] * 3)
    assert weights[[2, 4]].tolist() == [1, 1]  # these classes never occur
    assert class_weights(load_recipe(None).loss, data, nn.Linear(4, 5), x[:2]) is None
    binary = load_recipe(None, ["loss={name: binary, class_weights: balanced}"])
    data = Data(examples, examples, examples, "binary", 1)
    data.train = InMemory(x, (y > 0).float()) if in_memory else FromDataset(torch.utils.data.TensorDataset(x, (y > 0).float()))
    assert class_weights(binary.loss, data, nn.Linear(4, 1), x[:2]).tolist() == [1.5]
