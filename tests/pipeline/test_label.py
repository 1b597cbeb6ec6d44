"""Unlabeled data: the dense model's answers are the targets."""

import numpy as np
import pytest
import torch
from torch import nn

import svdcompress as svdc
from svdcompress.errors import DataError, ModelError
from svdcompress.pipeline import estimate, run, verify_run
from svdcompress.pipeline._label import label
from svdcompress.recipe import load_recipe
from svdcompress.sources import Data, InMemory, open_data, save_weights
from svdcompress.train import Bars, fit

QUICK = {"train.epochs": 8, "recover.epochs": 2, "uncertainty.samples": 3, "report.latency": False, "export.monte_carlo": False}


def network(outputs=3):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, outputs))


def test_labelling_is_seen_to_go_on(monkeypatch):
    """With CREPE it took five minutes for 9,000 frames, without any output."""
    shown, working = [], Bars.working
    monkeypatch.setattr(Bars, "working", lambda bars, what, stays=True: shown.append(what) or working(bars, what, stays))
    svdc.sparsify(network(), torch.randn(300, 8), settings={**QUICK, "data.unlabelled": True, "train.epochs": 1})
    assert shown.count("labeling") == 1


@pytest.mark.parametrize(("loss", "outputs"), [("cross-entropy", 3), ("binary", 1)])
def test_errors_are_disagreement_with_the_dense_model(loss, outputs):
    model, x = network(outputs), torch.randn(500, 8)
    found = svdc.sparsify(model, x, loss=loss, settings={**QUICK, "data.unlabelled": True})
    data = open_data_of(x)
    with torch.no_grad():
        dense, small = model(data), found.model(data)
    metrics = found.report.sparse.metrics
    answers = [(each > 0).flatten() if loss == "binary" else each.argmax(1) for each in (dense, small)]
    assert metrics["error"] == pytest.approx(100 * float((answers[0] != answers[1]).float().mean()), abs=1e-4)
    assert found.report.dense.metrics["error"] == 0
    assert any("the dense model's answers are the targets" in line for line in found.results["notes"])


def open_data_of(x):
    """The test examples that a run holds out from such data."""
    from svdcompress.sources.given import given

    with given(data=x) as names:
        recipe = load_recipe(None, fields={"data": names["data"], "data.unlabelled": True})
        return open_data(recipe.data, "classification").test.inputs


def test_without_being_told_inputs_alone_are_an_error_that_says_how():
    with pytest.raises(DataError, match=r"\(inputs alone: --unlabelled\)"):
        svdc.sparsify(network(), torch.randn(50, 8), settings=QUICK)


def test_an_npz_without_targets(tmp_path):
    np.savez(tmp_path / "x.npz", x=np.random.default_rng(0).normal(size=(300, 8)).astype("float32"))
    save_weights(network(), tmp_path / "w.safetensors")
    (tmp_path / "net.py").write_text(
        "from torch import nn\ndef make():\n    return nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 3))\n"
    )
    fields = {"model": f"{tmp_path}/net.py:make", "data": f"npz:{tmp_path / 'x.npz'}", "data.unlabelled": True, **QUICK}
    results = run(load_recipe(None, fields={**fields, "weights": str(tmp_path / "w.safetensors")}), tmp_path / "run")
    assert results["dense"]["metrics"]["error"] == 0 and "error" in results["sparse"]["metrics"]
    with pytest.raises(ModelError, match=r"nothing to learn from but the dense model's answers; name its --weights"):
        run(load_recipe(None, fields=fields), tmp_path / "untrained")
    with pytest.raises(DataError, match="--unlabelled"):
        run(load_recipe(None, fields={**fields, "data.unlabelled": False}), tmp_path / "labelled")


@pytest.mark.parametrize("loss", ["cross-entropy", "binary"])
def test_a_run_that_is_opened_again_has_the_answers(tmp_path, loss):
    model, x = network(3 if loss == "cross-entropy" else 1), torch.randn(400, 8)
    settings = {**QUICK, "data.unlabelled": True}
    found = svdc.sparsify(model, x, loss=loss, settings=settings, out=tmp_path / "run")
    opened = svdc.load_run(tmp_path / "run", model=network(3 if loss == "cross-entropy" else 1), data=x)
    inputs = opened.data.test.inputs
    with torch.no_grad():
        dense, small = model(inputs), found.model(inputs)
    answers = [(each > 0).flatten() if loss == "binary" else each.argmax(1) for each in (dense, small)]
    assert torch.equal(opened.data.test.targets.flatten().long(), answers[0].long()) and len(answers[0].unique()) > 1
    error = 100 * float((answers[0] != answers[1]).float().mean())
    assert found.report.sparse.metrics["error"] == pytest.approx(error, abs=1e-4)
    checks = verify_run(tmp_path / "run", model=network(3 if loss == "cross-entropy" else 1), data=x)
    assert not checks.failed and any("error" in check.name for check in checks.checks)


class Tagger(nn.Module):
    """A class for each token, from it and its neighbors."""

    def __init__(self, by_name=False):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.mix, self.out, self.by_name = (
            nn.Embedding(12, 8),
            nn.Conv1d(8, 8, 3, padding=1),
            nn.Linear(8, 4),
            by_name,
        )

    def forward(self, ids):
        found = self.out(self.mix(self.embed(ids).mT).mT.tanh())
        return {"logits": found} if self.by_name else found


class Pixels(nn.Module):
    """A class for each pixel, or for each square of pixels."""

    def __init__(self, by_name=False, stride=1, last=False):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.by_name, self.last = nn.Conv2d(1, 3, stride if stride > 1 else 1, stride), by_name, last

    def forward(self, x):
        found = self.conv(x)
        found = found.permute(0, 2, 3, 1) if self.last else found
        return {"logits": found} if self.by_name else found


@pytest.mark.parametrize(
    "model, x, dim",
    [
        (Tagger(), torch.randint(12, (6, 9)), 2),
        (Tagger(by_name=True), torch.randint(12, (6, 9)), 2),
        (Tagger(), torch.randint(12, (6, 4)), 2),  # as many tokens as classes
        (nn.Conv1d(2, 4, 1), torch.randn(6, 2, 9), 1),
        (Pixels(), torch.randn(6, 1, 8, 5), 1),
        (Pixels(by_name=True), torch.randn(6, 1, 8, 5), 1),
        (Pixels(stride=4), torch.randn(6, 1, 16, 12), 1),
        (Pixels(last=True), torch.randn(6, 1, 8, 5), 3),
        (network(), torch.randn(6, 8), 1),
    ],
)
def test_answers_are_taken_along_the_classes(model, x, dim):
    data = Data(*(InMemory(x, torch.zeros(len(x), dtype=torch.long)) for _ in range(3)), "classification", 1)
    label(data, model.eval(), True, "cpu")
    with torch.no_grad():
        output = model(x)
    output = output["logits"] if isinstance(output, dict) else output
    assert torch.equal(data.train.targets, output.argmax(dim)) and data.outputs == output.shape[dim] and not data.warnings


def test_a_recorded_dimension_is_kept():
    """A run of an earlier version may have taken another one, which its figures are of."""
    x = torch.randint(12, (6, 9))
    data = Data(*(InMemory(x, torch.zeros(len(x), dtype=torch.long)) for _ in range(3)), "classification", 1)
    label(data, Tagger().eval(), True, "cpu", 1)
    with torch.no_grad():
        assert torch.equal(data.train.targets, Tagger()(x).argmax(1)) and data.dim == 1


def test_a_run_judges_along_the_dimension_of_its_answers(tmp_path):
    """With strides, inputs that are one position shorter have as many outputs."""

    class Strided(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.conv, self.out = nn.Conv1d(3, 8, 2, stride=2), nn.Linear(8, 5)

        def forward(self, x):
            return self.out(self.conv(x.mT).mT.tanh())

    found = svdc.sparsify(Strided(), torch.randn(200, 10, 3), settings={**QUICK, "data.unlabelled": True, "train.epochs": 1})
    assert found.report.dense.metrics["error"] == 0


def test_classes_that_nothing_tells_from_positions_are_told():
    class Fixed(nn.Module):
        def forward(self, x):
            return x.flatten(1)[:, :20].view(-1, 4, 5)  # takes longer inputs only

    x = torch.randn(6, 20)
    data = Data(*(InMemory(x, torch.zeros(len(x), dtype=torch.long)) for _ in range(3)), "classification", 1)
    label(data, Fixed(), True, "cpu")
    assert torch.equal(data.train.targets, x.view(6, 4, 5).argmax(1))
    (said,) = data.warnings
    assert "has the shape (N, 4, 5), and nothing tells which dimension has the classes: dimension 1 is taken" in said


def test_a_regression_says_that_it_cannot():
    with pytest.raises(DataError, match="works for classification and binary, not for regression"):
        svdc.sparsify(network(2), torch.randn(200, 8), loss="mse", settings={**QUICK, "data.unlabelled": True})


def test_the_temperature_of_distillation_counts_without_labels(monkeypatch):
    seen = []

    def noted(model, data, loss, settings, *, distill=None, **more):
        seen.append((more["stage"], distill))
        return fit(model, data, loss, settings, distill=distill, **more)

    monkeypatch.setattr("svdcompress.pipeline._trainer.fit", noted)
    settings = {**QUICK, "data.unlabelled": True, "train.distill.temperature": 5.0, "recover.distill.layers": 2.0}
    svdc.sparsify(network(), torch.randn(200, 8), settings=settings)
    found = {stage: (each.weight, each.temperature, each.layers) for stage, each in seen}
    assert found["train"] == (1.0, 5.0, 0.0) and found["recover"] == (1.0, 2.0, 2.0)


def test_a_plan_refuses_what_the_run_would(tmp_path):
    np.savez(tmp_path / "x.npz", x=np.random.default_rng(0).normal(size=(300, 8)).astype("float32"))
    (tmp_path / "net.py").write_text("from torch import nn\ndef make():\n    return nn.Linear(8, 3)\n")
    fields = {"model": f"{tmp_path}/net.py:make", "data": f"npz:{tmp_path / 'x.npz'}", "data.unlabelled": True, **QUICK}
    with pytest.raises(ModelError, match="name its --weights"):
        estimate(load_recipe(None, fields=fields))
    save_weights(nn.Linear(8, 3), tmp_path / "w.safetensors")
    with pytest.raises(DataError, match="not for regression"):
        estimate(load_recipe(None, fields={**fields, "weights": str(tmp_path / "w.safetensors"), "loss": "mse"}))
