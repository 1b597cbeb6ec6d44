"""A dense model that has learned nothing is reported before it is compressed."""

import numpy as np
import pytest
import torch
from torch import nn

from svdcompress.pipeline import _finish, _skill, run
from svdcompress.pipeline._linear import linear_fit
from svdcompress.pipeline._skill import lost_skill, no_skill
from svdcompress.recipe import load_recipe
from svdcompress.sources import Data, FromDataset, InMemory
from svdcompress.train import evaluate

LABELS = torch.tensor([0, 0, 0, 1, 1, 2] * 4)
VALUES = torch.randn(24, generator=torch.Generator().manual_seed(0))


class Says(nn.Module):
    """Returns a constant answer plus its inputs."""

    def __init__(self, answer):
        super().__init__()
        self.answer = nn.Parameter(torch.tensor(answer))

    def forward(self, x):
        return self.answer + x


CASES = {  # task: targets, the constant answer, inputs that add the right answer to it
    "classification": (LABELS, [1.0, 0.0, 0.0], 9 * nn.functional.one_hot(LABELS, 3)),
    "binary": ((LABELS > 0).float(), [0.5], 9 * (LABELS > 0).float()[:, None] - 5),
    "regression": (VALUES, [float(VALUES.mean())], (VALUES - VALUES.mean())[:, None]),
    "gaussian": (VALUES, [float(VALUES.mean()), 0.0], torch.stack([VALUES - VALUES.mean(), 0 * VALUES], 1)),
}


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("knows", [0.0, 0.9])
@pytest.mark.parametrize(
    ("task", "scale"), [*((task, None) for task in CASES), ("regression", (3.0, 20.0)), ("gaussian", (3.0, 20.0))]
)
def test_against_one_answer_to_all(task, knows, scale, held):
    targets, answer, known = CASES[task]
    inputs = knows * known
    examples = InMemory(inputs, targets) if held else FromDataset(list(zip(inputs, targets, strict=True)))
    data = Data(examples, examples, examples, task, 3, target_scale=scale)
    warning = no_skill(Says(answer), data)
    assert warning is None or "training (data.transform)?" in warning
    data.preprocessing["bytes"] = "divided by 255"
    assert knows or "training (data.transform; bytes are divided by 255)?" in no_skill(Says(answer), data)
    if knows:
        assert warning is None
    elif task in ("classification", "binary"):
        blind = "1.011" if task == "classification" else "0.6931"
        assert "error 50 (the same answer to all inputs: 50) and nll" in warning
        assert f"the same answer to all inputs: {blind})" in warning
    else:
        figure = f"{(scale or (0, 1))[1] * VALUES.std(correction=0):.4g}"
        assert f"rmse {figure} (the same answer to all inputs: {figure})" in warning


def test_a_small_model_that_has_lost_what_the_dense_one_knows():
    """Three positives in a hundred: always no has 3% errors, and so has a network of which hardly anything is left."""
    targets = (torch.arange(200) % 100 < 3).float()
    examples = InMemory(torch.zeros(200, 1), targets)
    data = Data(examples, examples, examples, "binary", 1)
    dense = {"error": 2.0, "nll": 0.08}
    said = lost_skill(dense, {"error": 3.0, "nll": 0.1341}, data)
    assert "hardly better than one and the same answer to all inputs" in said
    assert "error 3 (dense: 2; one answer: 3) and nll 0.1341 (dense: 0.08; one answer: 0.1347)" in said
    assert lost_skill(dense, {"error": 3.0, "nll": 0.12}, data) is None  # its probabilities still tell something
    assert lost_skill(dense, {"error": 2.5, "nll": 0.5}, data) is None
    assert "--max-drop" in said and "--threshold" in lost_skill(dense, {"error": 3.0, "nll": 0.1341}, data, searched=False)
    assert lost_skill({"error": 3.0, "nll": 0.2}, {"error": 3.0, "nll": 0.2}, data) is None  # the dense one knew nothing
    squares = InMemory(torch.zeros(24, 1), VALUES)
    data = Data(squares, squares, squares, "regression", 1)
    spread = float(VALUES.std(correction=0))
    assert "rmse" in lost_skill({"rmse": 0.1 * spread, "nll": 0.0}, {"rmse": 0.99 * spread, "nll": 1.0}, data)
    assert lost_skill({"rmse": 0.1 * spread, "nll": 0.0}, {"rmse": 0.9 * spread, "nll": 1.0}, data) is None


@pytest.mark.parametrize("weights", [None, "balanced"])
def test_a_run_tells_a_lost_skill(tiny_recipe, tmp_path, monkeypatch, weights):
    seen = []
    monkeypatch.setattr(_finish, "lost_skill", lambda *given: seen.append(given) or "as one answer")
    recipe = tiny_recipe.model_copy(deep=True)
    recipe.loss.class_weights, recipe.uncertainty.samples = weights, 0
    results = run(recipe, tmp_path / "run")
    assert ("as one answer" in results["warnings"]) == (weights is None)
    if weights is None:
        ((dense, small, _, searched),) = seen
        assert (dense, small) == (results["dense"]["validation"], results["sparse"]["validation"]) and searched is False


def data_of(targets, task, inputs=None):
    examples = InMemory(torch.zeros(len(targets), 2) if inputs is None else inputs, targets)
    return Data(examples, examples, examples, task, 2)


def test_targets_that_are_all_the_same_say_nothing():
    assert no_skill(Says([0.0, 1.0]), data_of(torch.zeros(5, dtype=torch.long), "classification")) is None


def test_a_rare_class_that_is_never_the_likelier_one():
    """Its error is that of the most common class, but its probabilities are informative."""
    targets = torch.tensor([0] * 18 + [1] * 2)
    hint = torch.zeros(20, 2)
    hint[15:, 1] = 2.0
    model = Says([2.5, 0.0])
    assert evaluate(model, InMemory(hint, targets), "classification")["error"] == pytest.approx(10)
    assert no_skill(model, data_of(targets, "classification", hint)) is None
    assert no_skill(model, data_of(targets, "classification")) is not None


def test_targets_of_several_shapes_are_passed_over():
    """Rows that a dataset pads to the longest in a batch."""

    class Padded:
        def __len__(self):
            return 4

        def batches(self, *args, **kwargs):
            for length in (3, 5):
                yield torch.zeros(2, 2, length), torch.zeros(2, length, dtype=torch.long)

    data = Data(Padded(), Padded(), Padded(), "classification", 2)
    assert no_skill(Says([0.0, 0.0]), data) is None


def test_at_most_so_many_examples_are_read(monkeypatch):
    monkeypatch.setattr(_skill, "EXAMPLES", 10)
    read = []

    class Rows(list):
        def __getitem__(self, index):
            read.append(index)
            return super().__getitem__(index)

    examples = FromDataset(Rows((torch.zeros(3), label) for label in LABELS))
    assert no_skill(Says([1.0, 0.0, 0.0]), Data(examples, examples, examples, "classification", 3)) is not None
    assert len(set(read)) == 10


def linear_data(task, scale=None, count=400, bent=False):
    """Inputs (N, 5) and targets that a linear model predicts (bent: that none does)."""
    torch.manual_seed(1)
    x = torch.randn(count, 5)
    value = (x[:, 0].abs() - 0.7 + x[:, 1].abs() - 0.7) if bent else x @ torch.tensor([2.0, -1.0, 0.5, 0.0, 1.0])
    value = value + 0.3 * torch.randn(count)
    targets = {"classification": (value > 0).long(), "binary": (value > 0).float()}.get(task, value)
    parts = [InMemory(x[rows], targets[rows]) for rows in (slice(0, 200), slice(200, None))]
    return Data(parts[0], parts[1], parts[1], task, 2 if task == "classification" else 1, target_scale=scale)


def oracle(data):
    """scikit-learn's fit to the training data, judged on the validation data."""
    models = pytest.importorskip("sklearn.linear_model")
    (x, y), (x_held, y_held) = ((part.inputs.numpy(), part.targets.numpy()) for part in (data.train, data.validation))
    if data.task == "regression":
        return {"rmse": float(np.sqrt(np.mean((models.Ridge(1.0).fit(x, y).predict(x_held) - y_held) ** 2)))}
    return {"error": 100 * float(np.mean(models.LogisticRegression(C=1.0).fit(x, y).predict(x_held) != y_held))}


@pytest.mark.parametrize("task", ["classification", "binary", "regression"])
def test_a_linear_fit_is_that_of_others(task):
    data = linear_data(task)
    found, expected = linear_fit(data, data.validation), oracle(data)
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=0.05, abs=2.0 if name == "error" else 0.01)
    if task == "regression":
        assert linear_fit(linear_data(task, scale=(5.0, 10.0)), data.validation)["rmse"] == pytest.approx(10 * found["rmse"])


class Bent(nn.Module):
    """Two layers that compute only the sum of the absolute values of the first two inputs."""

    def __init__(self, outputs):
        super().__init__()
        self.a, self.b, self.outputs = nn.Linear(5, 4), nn.Linear(4, 1), outputs

    def forward(self, x):
        value = 5 * (x[:, :2].abs().sum(1) - 1.4)
        return torch.stack([-value, value], 1) if self.outputs == 2 else value[:, None]


@pytest.mark.parametrize(("task", "outputs"), [("classification", 2), ("binary", 1)])
def test_a_model_hardly_better_than_a_linear_fit_is_told_of(task, outputs):
    assert no_skill(Bent(outputs), linear_data(task, bent=True)) is None
    data = linear_data(task)
    torch.manual_seed(0)
    poor = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, outputs))
    with torch.no_grad():  # uses only the first input: better than a constant answer, worse than a linear fit
        poor[0].weight.zero_()[0, 0], poor[0].weight[1, 0] = 1.0, -1.0
        poor[0].bias.zero_()
        poor[2].weight.zero_()[-1, :2] = torch.tensor([2.0, -2.0])
        poor[2].bias.zero_()
    said = no_skill(poor, data)
    assert said is not None and "hardly better than a linear fit" in said and "dense.epochs" in said
    alone = nn.Linear(5, outputs)  # a linear model itself
    with torch.no_grad():
        alone.weight.zero_()[-1, 0] = 1.0
    assert no_skill(alone, data) is None


def test_a_linear_fit_only_where_it_is_cheap():
    data = linear_data("classification")
    wide = InMemory(torch.randn(50, 3, 224, 224), torch.arange(50) % 2)
    assert linear_fit(Data(wide, wide, wide, "classification", 2), wide) is None
    read = FromDataset(list(zip(data.train.inputs, data.train.targets, strict=True)))
    assert linear_fit(Data(read, data.validation, data.test, "classification", 2), data.validation) is None
    maps = InMemory(torch.randn(50, 1, 4, 4), torch.zeros(50, 4, 4, dtype=torch.long))
    assert linear_fit(Data(maps, maps, maps, "classification", 2), maps) is None


@pytest.mark.parametrize("trained", [False, True])
def test_a_run_warns(tmp_path, monkeypatch, trained):
    monkeypatch.chdir(tmp_path)
    x = np.random.default_rng(0).normal(size=(600, 4)).astype(np.float32)
    np.savez("data.npz", x=x, y=x[:, :3].argmax(1))
    (tmp_path / "mine.py").write_text(
        "import torch\n\ndef make():\n    net = torch.nn.Linear(4, 3)\n    torch.nn.init.zeros_(net.weight)\n    return net\n"
    )
    quick = ["model=./mine.py:make", "data=npz:data.npz", "train.epochs=1", "recover.epochs=0", "device=cpu"]
    quick += ["uncertainty.samples=0", "train.beta.final=1e-6", "export.onnx=false", "report.html=false", "dense.lr=0.01"]
    results = run(load_recipe(None, [*quick, "dense.epochs=20" if trained else "weights.trained=true"]), tmp_path / "out")
    assert any("learned nothing" in line for line in results.get("warnings", [])) is not trained
