"""The calibration stage: what reaches the checkpoint, files, report and predictions, recomputed in plain numpy."""

import csv
import json
import math
import re
from dataclasses import replace

import numpy as np
import onnxruntime
import pytest
import torch
from safetensors.torch import load_file

from svdcompress.calibrate import Calibrated, Tempered
from svdcompress.errors import CheckpointError, DataError, RecipeError, UsageError
from svdcompress.export import read_metadata
from svdcompress.likelihoods import Regression, likelihood_of
from svdcompress.pipeline import open_run, run, verify_run
from svdcompress.pipeline._calibrate import _told
from svdcompress.predict import predict_run
from svdcompress.recipe import load_recipe
from svdcompress.report._certainty import certainty

SETTINGS = [
    "model.args={sizes: [64, 24, 10]}",
    "dense.epochs=15",
    "dense.lr=0.01",
    "train.epochs=10",
    "train.beta={start: 0, stop: 2, final: 0.3}",
    "recover.epochs=2",
    "uncertainty.samples=5",
    "report.latency=false",
    "device=cpu",
]
PROMISES = ["calibrate.coverage=0.9", "calibrate.answer_above=0.8", "export.sets=true"]


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "calibrated"
    return folder, run(load_recipe("digits", SETTINGS + PROMISES), folder)


def split(folder, name):
    examples = getattr(open_run(folder).data, name)
    return examples.inputs, examples.targets


def softmax(z):
    e = np.exp(z - z.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def test_a_calibration_that_changes_nothing_is_told_as_such(calibrated):
    opened = open_run(calibrated[0])
    same = Tempered(1.0, 0.5, 0.6, False, 144)
    found = Calibrated(opened.model, likelihood_of(opened.model), "variational", same, same, ())
    assert _told(found) == "no temperature is needed (posterior: variational)"
    assert "mean temperature 2, validation NLL 0.5000 to 0.4000" in _told(
        replace(found, mean=Tempered(2.0, 0.5, 0.4, True, 144))
    )
    noise = Tempered(3.09, 0.8, 1.2, True, 144)  # "before" is the NLL with the noise that fits these examples best
    constant = replace(found, likelihood=Regression(tau=3.09), mean=noise, samples=noise)
    text = "noise precision 3.09, validation NLL 1.2000 (cross-validated)"
    assert _told(constant) == f"mean {text}; samples {text} (posterior: variational)"
    page = certainty({"calibrate": constant.to_dict()}, None)
    assert "0.8000" not in page and "1.2000" in page and "validation NLL, on held-out examples" in page
    assert "validation NLL before" in certainty({"calibrate": found.to_dict()}, None)


def test_both_temperatures_are_in_the_checkpoint_and_the_report(calibrated):
    folder, results = calibrated
    opened = open_run(folder)
    own = likelihood_of(opened.model)
    assert own.temperature == results["calibrate"]["samples"]["value"] != 1
    assert own.mean_temperature == results["calibrate"]["mean"]["value"] != 1
    for who in ("samples", "mean"):
        assert results["calibrate"][who]["after"] < results["calibrate"][who]["before"]
    x, y = split(folder, "validation")
    logits = opened.model(x).detach().double().numpy()
    p = softmax(logits)
    assert results["calibrate"]["mean"]["before"] == pytest.approx(-np.log(p[np.arange(len(y)), y]).mean(), rel=1e-4)


def test_whoever_runs_the_files_gets_calibrated_probabilities(calibrated):
    folder, results = calibrated
    x, _ = split(folder, "test")
    own = likelihood_of(open_run(folder).model)
    plain = open_run(folder).model(x).detach().numpy()
    logits = onnxruntime.InferenceSession(str(folder / "model.onnx")).run(["output"], {"input": x.numpy()})[0]
    assert np.allclose(logits, plain / own.mean_temperature, atol=1e-4)
    assert read_metadata(folder / "model.onnx")["temperature"] == own.mean_temperature
    session = onnxruntime.InferenceSession(str(folder / "model_mc.onnx"))
    mean = session.run(["mean"], {"input": x.numpy(), "samples": np.array(300)})[0]
    by_hand = np.abs(mean - softmax(plain / own.temperature)).mean()
    assert by_hand < 0.5 * np.abs(mean - softmax(plain)).mean()  # the draws are narrow here
    assert results["sparse"]["metrics"]["nll"] == pytest.approx(
        -np.log(softmax(logits)[np.arange(len(x)), split(folder, "test")[1]]).mean(), rel=1e-3
    )


def test_the_run_verifies(calibrated):
    folder, results = calibrated
    assert results["verified"]["failed"] == 0
    assert not verify_run(folder).failed


def test_sets_in_both_files_cover_as_reported(calibrated):
    folder, results = calibrated
    x, y = split(folder, "test")
    for name, who, more in (("model.onnx", "mean", {}), ("model_mc.onnx", "samples", {"samples": np.array(100)})):
        session = onnxruntime.InferenceSession(str(folder / name))
        sets = session.run(["set"], {"input": x.numpy(), **more})[0]
        assert set(np.unique(sets)) <= {0.0, 1.0} and sets.sum(1).min() >= 1
        found = results["promises"]["coverage"][who]
        assert sets[np.arange(len(y)), y].mean() == pytest.approx(found["test"]["coverage"], abs=0.02)
        assert sets.sum(1).mean() == pytest.approx(found["test"]["size"], abs=0.05)
        assert read_metadata(folder / name)["coverage"]["limit"] == found["limit"]
        assert read_metadata(folder / name)["answer_above"]["threshold"] == pytest.approx(
            results["promises"]["answer_above"][who]["threshold"]
        )


def test_what_is_kept_of_the_validation_data(calibrated):
    folder, results = calibrated
    kept = load_file(folder / "validation.safetensors")
    x, y = split(folder, "validation")
    own = likelihood_of(open_run(folder).model)
    p = softmax(open_run(folder).model(x).detach().double().numpy() / own.mean_temperature)
    assert np.allclose(np.sort(kept["mean.confidence"]), np.sort(p.max(1)), atol=1e-5)
    assert int(kept["mean.right"].sum()) == int((p.argmax(1) == y.numpy()).sum())
    scores = np.array([row[row > row[label]].sum() for row, label in zip(p, y, strict=True)])
    rank = math.ceil((len(y) + 1) * 0.9)
    assert results["promises"]["coverage"]["mean"]["limit"] == pytest.approx(np.sort(scores)[rank - 1], abs=1e-5)
    assert "validation.safetensors" in json.loads((folder / "report.json").read_text())["files"]


def test_predictions_are_marked(calibrated, tmp_path):
    folder, _ = calibrated
    x, _ = split(folder, "test")
    np.save(tmp_path / "x.npy", x.numpy())
    told = {}
    predict_run(folder, tmp_path / "x.npy", tmp_path / "p.csv", answer_above=0.85, coverage=0.95, told=told)
    with open(tmp_path / "p.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    threshold = told["answer_above"]["threshold"]
    assert [row["answered"] == "True" for row in rows] == [float(row["confidence"]) >= threshold - 1e-9 for row in rows]
    assert told["answer_above"]["share"] == pytest.approx(np.mean([row["answered"] == "True" for row in rows]))
    sizes = [len(row["set"].split("|")) for row in rows]
    assert all(row["label"] in row["set"].split("|") for row in rows)
    assert told["coverage"]["mean_size"] == pytest.approx(np.mean(sizes)) and told["coverage"]["coverage"] == 0.95
    predict_run(folder, tmp_path / "x.npy", tmp_path / "p.npz")  # the outputs that the recipe requests
    assert {"answered", "set"} <= set(np.load(tmp_path / "p.npz"))
    predict_run(folder, tmp_path / "x.npy", tmp_path / "onnx.csv", onnx=True, seed=0, answer_above=0.85)
    with pytest.raises(DataError, match=r"it takes \d+"):
        predict_run(folder, tmp_path / "x.npy", tmp_path / "p.csv", answer_above=0.999)
    with pytest.raises(UsageError, match="coverage"):
        predict_run(folder, tmp_path / "x.npy", tmp_path / "p.csv", coverage=1.0)


def test_the_page_tells(calibrated):
    page = (calibrated[0] / "report.html").read_text()
    for text in ("How sure it is", "Prediction sets and intervals", "When to answer", "temperature"):
        assert text in page


def test_without_calibration_nothing_is_divided(tmp_path):
    more = ["calibrate.temperature=false", "dense.epochs=2", "train.epochs=2", "recover.epochs=1", "export.onnx=false"]
    results = run(load_recipe("digits", SETTINGS + more), tmp_path / "run")
    own = likelihood_of(open_run(tmp_path / "run").model)
    assert own.settings() == {"dim": 1} and "calibrate" not in results


@pytest.mark.slow
def test_another_posterior_is_baked_where_it_is_better_and_else_left_out(tmp_path):
    results = run(load_recipe("digits", [*SETTINGS, "calibrate.posterior=auto", "calibrate.epochs=2"]), tmp_path / "run")
    tried = {one["name"]: one["nll"] for one in results["calibrate"]["tried"]}
    assert set(tried) == {"variational", "scaled", "refit", "laplace-diagonal"}
    assert tried[results["calibrate"]["posterior"]] <= tried["variational"]
    assert not verify_run(tmp_path / "run").failed


def test_sets_of_no_coverage_are_refused():
    with pytest.raises(RecipeError, match=r"calibrate\.coverage"):
        load_recipe("digits", ["export.sets=true"])


def test_runs_of_before_have_nothing_to_promise_from(tmp_path, calibrated):
    import shutil

    shutil.copytree(calibrated[0], tmp_path / "old")
    (tmp_path / "old" / "validation.safetensors").unlink()
    np.save(tmp_path / "x.npy", split(tmp_path / "old", "test")[0][:3].numpy())
    predict_run(tmp_path / "old", tmp_path / "x.npy", tmp_path / "p.csv")
    with pytest.raises(CheckpointError, match="validation"):
        predict_run(tmp_path / "old", tmp_path / "x.npy", tmp_path / "p.csv", answer_above=0.9)
    (tmp_path / "old" / "validation.safetensors").write_bytes(b"no tensors")
    with pytest.raises(CheckpointError, match=r"validation\.safetensors is not the one that the run wrote"):
        predict_run(tmp_path / "old", tmp_path / "x.npy", tmp_path / "p.csv", answer_above=0.9)


def test_a_regression_has_noise_of_its_own_and_intervals(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(800, 3)).astype(np.float32)
    y = 50 + 10 * x[:, 0] - 5 * x[:, 1] + 4 * rng.normal(size=800)
    lines = ["a,b,c,y", *(",".join(f"{v:.6f}" for v in [*row, target]) for row, target in zip(x, y, strict=True))]
    (tmp_path / "table.csv").write_text("\n".join(lines) + "\n")
    monkeypatch.chdir(tmp_path)
    settings = [
        "model={name: mlp, args: {sizes: [3, 16, 1]}}",
        "data={name: 'csv:table.csv', target: y}",
        "loss=mse",
        "dense.epochs=20",
        "train.epochs=5",
        "recover.epochs=2",
        "report.latency=false",
        "uncertainty.samples=5",
        "device=cpu",
        "calibrate.coverage=0.9",
        "export.sets=true",
    ]
    results = run(load_recipe(None, settings), tmp_path / "run")
    own = likelihood_of(open_run(tmp_path / "run").model)
    assert own.tau == results["calibrate"]["samples"]["value"] and own.mean_tau == results["calibrate"]["mean"]["value"]
    assert results["verified"]["failed"] == 0
    (note,) = (line for line in results["calibrate"]["notes"] if "of the standardized target" in line)
    factor, shift = (float(part) for part in re.findall(r"by (\S+) and add (\S+) to NLLs", note)[0])
    units = open_run(tmp_path / "run")
    held = units.data.validation
    square = float(((units.model(held.inputs).detach() - held.targets.view(-1, 1)).numpy() * y.std()).var())
    assert own.mean_tau * factor == pytest.approx(1 / square, rel=0.15)
    by_hand = 0.5 * math.log(2 * math.pi * math.e * square)
    assert results["calibrate"]["mean"]["after"] + shift == pytest.approx(by_hand, abs=0.08)
    assert "of the standardized target" in (tmp_path / "run" / "report.html").read_text()
    raw = open_run(tmp_path / "run").data
    inside = raw.test.targets.flatten().numpy() * raw.target_scale[1] + raw.target_scale[0]
    columns = raw.preprocessing["transform"][0]["normalize"]
    table = raw.test.inputs.numpy() * np.array(columns["std"]) + np.array(columns["mean"])
    for name, more in (("model.onnx", {}), ("model_mc.onnx", {"samples": np.array(100)})):
        session = onnxruntime.InferenceSession(str(tmp_path / "run" / name))
        low, high = session.run(["lower", "upper"], {"input": table.astype(np.float32), **more})
        covered = ((low[:, 0] <= inside) & (inside <= high[:, 0])).mean()
        who = "mean" if name == "model.onnx" else "samples"
        assert covered == pytest.approx(results["promises"]["coverage"][who]["test"]["coverage"], abs=0.02)
        assert 0.82 <= covered <= 0.97
    assert torch.isfinite(torch.tensor(own.tau))


def test_a_run_whose_network_names_its_noise_is_calibrated_in_the_targets_units(tmp_path):
    """Trained on few examples, the model predicts too little noise: the files hold the factor fitted on validation data."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(300, 4)).astype(np.float32)
    y = 50 + 20 * (x[:, 0] + np.exp(0.5 * x[:, 1]) * generator.normal(size=300))
    np.savez(tmp_path / "data.npz", x=x, y=y.astype(np.float32))
    sets = ["loss=gaussian-nll", f"data=npz:{tmp_path}/data.npz", "data.target_scale=standardize", "data.validation=0.3"]
    sets += ["model={name: mlp, args: {sizes: [4, 64, 2]}}", "dense.epochs=150", "dense.keep=last"]
    sets += ["train.epochs=1", "recover.epochs=1", "train.beta.final=1e-6", "recover.beta=1e-6", *SETTINGS[-3:]]
    results = run(load_recipe(None, [*sets, "calibrate.coverage=0.9", "export.sets=true"]), tmp_path / "run")
    opened = open_run(tmp_path / "run")
    own, data = likelihood_of(opened.model), opened.data
    assert own.mean_temperature == results["calibrate"]["mean"]["value"] > 1.5
    assert results["calibrate"]["mean"]["after"] < results["calibrate"]["mean"]["before"]
    mean, log_variance = opened.model(data.test.inputs).detach().double().chunk(2, 1)
    shift, scale = data.target_scale
    session = onnxruntime.InferenceSession(str(tmp_path / "run" / "model.onnx"))
    found, lower, upper = session.run(["output", "lower", "upper"], {"input": data.test.inputs.numpy()})
    assert np.allclose(found[:, :1], shift + scale * mean.numpy(), rtol=1e-3, atol=1e-2)
    assert np.allclose(np.exp(found[:, 1:]), own.mean_temperature * scale**2 * log_variance.exp().numpy(), rtol=1e-3)
    width = results["promises"]["coverage"]["mean"]["width"]
    assert np.allclose(upper - lower, 2 * width * np.exp(0.5 * found[:, 1:]), rtol=1e-3)
    assert np.allclose(upper + lower, 2 * found[:, :1], rtol=1e-3, atol=1e-2)
    assert not verify_run(tmp_path / "run").failed
