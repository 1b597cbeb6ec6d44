"""Unlabeled data: the dense model's answers are the targets."""

import numpy as np
import pytest
import torch
from torch import nn

import svdcompress as svdc
from svdcompress.errors import DataError, ModelError
from svdcompress.pipeline import estimate, run
from svdcompress.recipe import load_recipe
from svdcompress.sources import open_data, save_weights
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
