"""A dense model that has learned nothing is told of before it is compressed."""

import numpy as np
import pytest
import torch
from torch import nn

from svdcompress.pipeline import _skill, run
from svdcompress.pipeline._skill import no_skill
from svdcompress.recipe import load_recipe
from svdcompress.sources import Data, FromDataset, InMemory
from svdcompress.train import evaluate

LABELS = torch.tensor([0, 0, 0, 1, 1, 2] * 4)
VALUES = torch.randn(24, generator=torch.Generator().manual_seed(0))


class Says(nn.Module):
    """One and the same answer, but where an input says which: then that."""

    def __init__(self, answer):
        super().__init__()
        self.answer = nn.Parameter(torch.tensor(answer))

    def forward(self, x):
        return self.answer + x


CASES = {  # task: targets, the blind answer, what an input that knows the target adds to it
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
    if knows:
        assert warning is None
    elif task in ("classification", "binary"):
        blind = "1.011" if task == "classification" else "0.6931"
        assert "error 50 (one and the same answer to all: 50) and nll" in warning
        assert f"one and the same answer to all: {blind})" in warning
    else:
        figure = f"{(scale or (0, 1))[1] * VALUES.std(correction=0):.4g}"
        assert f"rmse {figure} (one and the same answer to all: {figure})" in warning


def data_of(targets, task, inputs=None):
    examples = InMemory(torch.zeros(len(targets), 2) if inputs is None else inputs, targets)
    return Data(examples, examples, examples, task, 2)


def test_targets_that_are_all_the_same_say_nothing():
    assert no_skill(Says([0.0, 1.0]), data_of(torch.zeros(5, dtype=torch.long), "classification")) is None


def test_a_rare_class_that_is_never_the_likelier_one():
    """Its error is that of the commonest class, but its probabilities tell."""
    targets = torch.tensor([0] * 18 + [1] * 2)
    hint = torch.zeros(20, 2)
    hint[15:, 1] = 2.0
    model = Says([2.5, 0.0])
    assert evaluate(model, InMemory(hint, targets), "classification")["error"] == pytest.approx(10)
    assert no_skill(model, data_of(targets, "classification", hint)) is None
    assert no_skill(model, data_of(targets, "classification")) is not None


def test_targets_of_several_shapes_are_passed_over():
    """Rows that a dataset pads to the longest of a batch."""

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
