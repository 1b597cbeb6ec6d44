"""Intervals for several targets hold for each target, in PyTorch, in the files and in predictions."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace

import numpy as np
import onnxruntime
import pandas as pd
import pytest
import torch

from svdcompress.calibrate import conformal_intervals, from_dict, load_promises, promises_of, save_promises
from svdcompress.cli._runs import _promises
from svdcompress.errors import CheckpointError, DataError
from svdcompress.likelihoods import Prediction, likelihood_for
from svdcompress.pipeline import KEPT, baked, open_run, run, verify_run
from svdcompress.pipeline._foreseen import foreseen
from svdcompress.predict import predict_run
from svdcompress.recipe import load_recipe

SIZES = (1.0, 0.1, 5.0)
"""Error scales of the three targets; the predicted scale is 1 for all."""


def errors(n, seed):
    return torch.randn(n, 3, generator=torch.Generator().manual_seed(seed)) * torch.tensor(SIZES)


def test_the_coverage_is_kept_by_each_target_on_average():
    rates = []
    for seed in range(60):
        found = conformal_intervals(torch.zeros(120, 3), torch.ones(120, 3), errors(120, seed), 0.9)
        low, high = found.intervals(torch.zeros(2000, 3), torch.ones(2000, 3))
        fresh = errors(2000, 1000 + seed)
        rates.append(((low <= fresh) & (fresh <= high)).double().mean(0).numpy())
    each = np.mean(rates, 0)
    assert (each >= 0.9 - 0.011).all() and (each <= 0.93).all()  # three standard errors
    assert found.examples == 120 and np.allclose(np.array(found.widths) / SIZES, 1.64, atol=0.4)


def test_widths_are_the_quantiles_of_each_column():
    y = errors(99, 0)
    found = conformal_intervals(torch.zeros(99, 3), torch.full((99, 3), 2.0), y, 0.9)
    assert found.widths == pytest.approx([sorted((y[:, k].abs() / 2).tolist())[89] for k in range(3)])
    again = from_dict(found.to_dict())
    assert again == found and isinstance(found.to_dict()["width"], list)


@pytest.mark.parametrize(("examples", "targets", "coverage", "needed"), [(5, 2, 0.9, 9), (1, 50, 0.9, 9), (2, 3, 0.99, 99)])
def test_an_examples_targets_count_as_one_example(examples, targets, coverage, needed):
    """Two targets of the same error are no further evidence: as independent ones, 5 examples held 83.5% of the truths."""
    zeros, ones = torch.zeros(examples, targets), torch.ones(examples, targets)
    few = "1 validation example" if examples == 1 else f"{examples} validation examples"
    with pytest.raises(DataError, match=f"cannot be promised from {few}; it takes {needed} "):
        conformal_intervals(zeros, ones, zeros + torch.rand(examples, 1), coverage)


def test_what_is_kept_of_many_examples_stays_together(monkeypatch):
    """Of 40 examples with 3 targets, 10 are drawn; an example's targets stay together."""
    monkeypatch.setattr(sys.modules[promises_of.__module__], "MOST", 10)
    y = torch.arange(120.0).view(40, 3)

    def predict(x):
        zeros, ones = torch.zeros_like(x), torch.ones_like(x)
        return Prediction("gaussian", 1, zeros, ones, ones, zeros)

    seen = promises_of(predict, lambda: [(y[:25], y[:25]), (y[25:], y[25:])], likelihood_for("gaussian"))
    assert seen.scores.shape == (10, 3) and torch.equal(seen.scores.diff(dim=1), torch.ones(10, 2).double())
    assert bool((seen.scores[:, 0] % 3 == 0).all())


def test_many_targets_leave_room_for_high_coverages():
    """With 64 targets, 20,000 numbers were those of 312 examples, so that 0.997 was refused however many there were."""
    y = torch.rand(2000, 64, generator=torch.Generator().manual_seed(0))

    def predict(x):
        zeros, ones = torch.zeros_like(x), torch.ones_like(x)
        return Prediction("gaussian", 1, zeros, ones, ones, zeros)

    seen = promises_of(predict, lambda: [(y, y)], likelihood_for("gaussian"))
    assert seen.scores.shape == (2000, 64)
    found = seen.coverage(0.999)
    assert found.examples == 2000 and len(found.widths) == 64
    with pytest.raises(DataError, match=r"it takes 99,999 validation examples, and the results of at most 20,000 are kept"):
        seen.coverage(0.99999)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("several")
    generator = np.random.default_rng(0)
    x = generator.normal(size=(900, 3))
    frame = pd.DataFrame(x, columns=["a", "b", "c"])
    frame["loud"] = x[:, 0] + generator.normal(size=900)
    frame["quiet"] = x[:, 1] + 0.05 * generator.normal(size=900)
    frame.to_csv(folder / "data.csv", index=False)
    sets = ["loss=mse", f"data=csv:{folder}/data.csv", "data.target='loud,quiet'", "model={name: mlp, args: {sizes: [3, 2]}}"]
    sets += ["dense.epochs=15", "dense.lr=0.02", "train.epochs=1", "recover.epochs=1", "train.beta.final=1e-6", "device=cpu"]
    sets += ["calibrate.coverage=0.9", "export.sets=true", "uncertainty.samples=0", "report.latency=false", "recover.beta=1e-6"]
    sets += ["data.validation=0.3"]
    return folder, run(load_recipe(None, sets), folder / "run")


def test_a_run_has_a_width_for_each_target(made):
    folder, results = made
    for who in ("mean", "samples"):
        stored = results["promises"]["coverage"][who]
        assert stored["width"][0] > 5 * stored["width"][1] and len(stored["test"]["each"]) == 2
        assert min(stored["test"]["each"]) > 0.8
    (line,) = [one for one in results["warnings"] if "with several targets, deviations say little about each one" in one]
    assert line.startswith("errors of target 'loud'") and "target 'quiet'" in line
    assert not verify_run(folder / "run").failed
    low, high = sorted(results["promises"]["coverage"]["mean"]["test"]["each"])
    page = (folder / "run" / "report.html").read_text()
    assert f"(targets {100 * low:.4g} % to {100 * high:.4g} %)" in page and low < high


def test_the_coverage_of_each_is_counted_on_the_test_data(made):
    folder, results = made
    opened = open_run(folder / "run")
    x, y = opened.data.test.inputs, opened.data.test.targets.double()
    stored, deviation = results["promises"]["coverage"]["mean"], results["calibrate"]["mean"]["value"] ** -0.5
    away = (opened.model(x).detach().double() - y).abs() / deviation
    each = [float((away[:, k] <= stored["width"][k]).double().mean()) for k in range(2)]
    assert stored["test"]["each"] == pytest.approx(each, abs=1.01 / len(y))
    assert stored["test"]["coverage"] == pytest.approx(np.mean(each), abs=1.01 / len(y))


def test_a_files_size_is_foreseen_with_all_widths(made):
    opened = open_run(made[0] / "run")
    units = baked(opened.preprocessing, opened.recipe.task, opened.dim)
    assert len(foreseen(opened.recipe, opened.data, units)["metadata"]["coverage"]["width"]) == 2


def test_promises_of_another_number_of_targets_are_refused(made, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(made[0] / "run", folder)
    kept = load_promises(folder / KEPT, "mean")
    save_promises(folder / KEPT, {who: replace(kept, scores=kept.scores.repeat(1, 2)) for who in ("mean", "samples")})
    stored = json.loads((folder / "report.json").read_text())
    del stored["files"]  # or it would be refused as another file than the run wrote
    (folder / "report.json").write_text(json.dumps(stored))
    np.save(tmp_path / "x.npy", np.zeros((2, 3), np.float32))
    with pytest.raises(CheckpointError, match="made for 4 targets, but the run has another number"):
        predict_run(folder, tmp_path / "x.npy", tmp_path / "out.npz")


def test_the_command_tells_the_widths_from_the_least_to_the_most():
    told = {"coverage": {"kind": "intervals", "coverage": 0.9, "examples": 50, "width": [3.25, 0.5, 2.0]}}
    assert "0.5 to 3.25 (by target) deviations each way" in _promises(told)[0]
    told["coverage"]["width"] = 1.75
    assert "; 1.75 deviations each way" in _promises(told)[0]


def test_its_files_and_its_predictions_have_them(made):
    folder, results = made
    raw = pd.read_csv(folder / "data.csv")[["a", "b", "c"]].head(40)
    raw.to_csv(folder / "in.csv", index=False)
    for onnx in (False, True):
        told = {}
        out, _ = predict_run(folder / "run", folder / "in.csv", folder / "out.npz", onnx=onnx, told=told)
        with np.load(out) as found:
            spread = (found["upper"] - found["lower"]).mean(0)
        assert spread[0] > 5 * spread[1] and len(told["coverage"]["width"]) == 2
    session = onnxruntime.InferenceSession(str(folder / "run" / "model.onnx"))
    name = session.get_inputs()[0].name
    mean, low, high = session.run(["output", "lower", "upper"], {name: raw.to_numpy(dtype=np.float32)})
    widths = np.array(results["promises"]["coverage"]["mean"]["width"])
    assert np.allclose((high - low) / (high - low)[0, 0] * widths[0], np.broadcast_to(widths, mean.shape), rtol=1e-3)
    assert np.allclose((high + low) / 2, mean, atol=1e-4)
