"""Files written by version 0.1.0 (tests/fixtures/0.1.0/make.py) load, predict and report with the current code."""

import csv
import importlib.util
import shutil
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import svdcompress as svdc
from svdcompress import report
from svdcompress.cli._app import app
from svdcompress.layers import variational_layers
from svdcompress.pipeline import open_run, verify_run
from svdcompress.predict import predict_run

OLD = Path(__file__).parent / "fixtures" / "0.1.0"


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(OLD / "run", tmp_path / "run")


def factory():
    spec = importlib.util.spec_from_file_location("make", OLD / "make.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.factory()


def test_a_checkpoint_loads_and_computes_as_it_did():
    model = svdc.load(OLD / "model.safetensors", factory()).eval()
    stored = load_file(OLD / "model-outputs.safetensors")
    with torch.no_grad():
        torch.testing.assert_close(model(stored["input"]), stored["output"], rtol=1e-5, atol=1e-6)
    shapes = {name: tuple(layer.weight.shape) for name, layer in variational_layers(model)}
    assert shapes == {"0": (4, 1, 3, 3), "4": (4, 64), "7": (3, 4)}
    assert svdc.mc_predict(model, stored["input"], 20).epistemic.max() > 0
    assert torch.isfinite(svdc.kl_divergence(model))


def test_a_run_predicts_by_both_ways_as_it_did(folder, tmp_path):
    opened = open_run(folder)
    x = next(opened.data.test.batches(5))[0]
    with torch.no_grad():
        expected = opened.model(x)
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"))
    np.testing.assert_allclose(np.asarray(session.run(None, {"input": x.numpy()})[0]), expected, rtol=1e-4, atol=1e-5)
    np.save(tmp_path / "x.npy", (x * 16).numpy())
    for onnx in (False, True):
        out, count = predict_run(folder, tmp_path / "x.npy", tmp_path / f"{onnx}.csv", samples=20, onnx=onnx)
        with open(out, newline="", encoding="utf-8") as file:
            assert count == len(list(csv.DictReader(file))) == 5


def test_a_run_is_reported(folder):
    results = report.load(folder)
    assert "format" not in results and "files" not in results
    done = CliRunner().invoke(app, ["report", str(folder)])
    assert done.exit_code == 0, done.output
    assert (folder / "report.html").stat().st_size > 10_000


def test_a_run_is_what_its_report_says(folder):
    found = verify_run(folder)
    assert {(check.file, check.name) for check in found.failed} == set()
    assert [check.name for check in found.skipped] == ["SHA-256"]
    assert {check.file for check in found.checks} >= {"model.safetensors", "model.onnx", "model_mc.onnx"}
