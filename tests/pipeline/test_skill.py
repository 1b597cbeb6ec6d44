"""A dense model that has learned nothing is told of before it is compressed."""

import numpy as np
import pytest
import torch
from torch import nn

from svdcompress.pipeline import run
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
    warning = no_skill(evaluate(Says(answer), examples, task, scale=scale), data)
    if knows:
        assert warning is None
    else:
        figure = {"classification": "50 %", "binary": "50 %"}.get(
            task, f"{(scale or (0, 1))[1] * VALUES.std(correction=0):.4g}"
        )
        assert f"is {figure}, and that of always answering" in warning and f"{figure}: it has learned nothing" in warning


def test_targets_that_are_all_the_same_say_nothing():
    examples = InMemory(torch.zeros(5, 2), torch.zeros(5, dtype=torch.long))
    assert no_skill({"error": 0.0}, Data(examples, examples, examples, "classification", 2)) is None


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
