"""The history's sparsity is counted with the thresholds and the coupling of the final choice."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from svdcompress import convert, coupled_relevance, relevance
from svdcompress.pipeline import run
from svdcompress.pipeline._convert import while_training
from svdcompress.recipe import load_recipe
from svdcompress.relevance import hold
from svdcompress.selection import _rule
from svdcompress.train import shrink

SMALL = [
    "model.args={sizes: [64, 24, 10]}",
    "data.limit=300",
    "device=cpu",
    "dense.epochs=1",
    "train.epochs=2",
    "train.lr=0.01",
]
BARE = [
    "train.beta={start: 0, stop: 1, final: 0.02}",
    "recover.epochs=1",
    "export.onnx=false",
    "report.latency=false",
    "report.html=false",
    "uncertainty.samples=0",
    "calibrate.temperature=false",
    "calibrate.posterior=variational",
]


@pytest.mark.parametrize(
    ("settings", "threshold"),
    [
        (["relevance.threshold=-2.5"], -2.5),
        (["relevance.coupled=true", "convert.share={weight: 0.5, input: 0.5}", "relevance.threshold=-1.5"], -1.5),
        (["relevance.candidates=[-3.0, -2.0]"], -2.0),
        (["convert.layers=[{match: '*1*', threshold: -2.0}, {match: '*', threshold: -3.0}]"], None),
    ],
    ids=["threshold", "coupled", "candidates", "rules"],
)
def test_the_last_row_of_training_has_the_sparsity_that_is_chosen(tmp_path, settings, threshold):
    recipe = load_recipe("digits", [*SMALL, *BARE, *settings])
    found = run(recipe, tmp_path / "run")
    (last,) = [row for row in found["history"] if (row["stage"], row["epoch"]) == ("train", 2)]
    total = sum(row["weights_before"] for row in found["layers"])
    others = found["dense"]["parameters"] - total
    if threshold is not None:
        (point,) = [point for point in found["threshold_curve"] if point["threshold"] == threshold]
        left = point["nonzero"] - others
    else:
        left = sum(row["weights"] for row in found["layers"])
    assert last["sparsity"] == pytest.approx(1 - left / total, abs=1e-12)
    (plain,) = [point["nonzero"] - others for point in found["threshold_curve"] if point["threshold"] == 3.0]
    assert abs(last["sparsity"] - (1 - plain / total)) > 1e-3  # the default threshold would give another number


class Twice(nn.Module):
    """Two layers read the same units."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right = nn.Linear(5, 8), nn.Linear(8, 6), nn.Linear(8, 6)

    def forward(self, x):
        x = self.first(x).relu()
        return self.left(x) + self.right(x)


def test_a_graph_is_traced_once_and_again_where_units_were_removed(monkeypatch):
    traced = []
    monkeypatch.setattr(_rule, "Coupling", lambda *args: traced.append(args) or coupling(*args))
    torch.manual_seed(0)
    model, x = convert(Twice(), share=["weight", "input"]).eval(), torch.randn(4, 5)
    recipe = load_recipe("digits", ["relevance.threshold=1"])
    masks_of = while_training(recipe, x)
    with torch.no_grad():
        model.left.log_sigma2[:, :2], model.right.log_sigma2[:, 1:3] = 9.0, 9.0
        model.left.weight[:, 0] = 1e-3
        model.right.weight[:, 0] = 100.0
    for _ in range(3):
        found, expected = masks_of(model), coupled_relevance(model, x, threshold=1)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert any(not torch.equal(found[name], mask) for name, mask in relevance(model, 1).items())
        with torch.no_grad():
            model.first.log_sigma2.add_(0.1)
    assert len(traced) == 1
    before = copy.deepcopy(model.state_dict())
    assert shrink(model, x, masks=lambda one: coupled_relevance(one, x, threshold=1)) and hold(model, None)
    assert before["left.weight"].shape != model.left.weight.shape
    found, expected = masks_of(model), coupled_relevance(model, x, threshold=1)
    assert all(torch.equal(found[name], expected[name]) for name in expected) and len(traced) == 2


coupling = _rule.Coupling
