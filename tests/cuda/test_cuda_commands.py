"""The commands on a run made on a GPU: each on the GPU, on the CPU, and with the files alone."""

import csv
import json

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from svdcompress.cli import app

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SETS = ["model.args={sizes: [64, 24, 10]}", "data.limit=500", "dense.epochs=4", "dense.lr=0.01", "train.epochs=4"]
SETS += ["train.lr=0.01", "recover.epochs=2", "uncertainty.samples=5", "calibrate.coverage=0.8", "report.latency=false"]


def svdc(*args, code=0):
    result = CliRunner().invoke(app, [str(arg) for arg in args], env={"COLUMNS": "200"})
    assert result.exit_code == code, (result.exit_code, result.output, result.exception)
    assert "Traceback" not in result.output
    return result


def sets_of(*more):
    return [part for one in (*SETS, *more) for part in ("--set", one)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run made on the device by the command."""
    folder = tmp_path_factory.mktemp("runs") / "there"
    svdc("sparsify", "digits", "--device", "cuda", *sets_of(), "--out", folder)
    return folder


def test_figures_of_the_device_are_verified_by_the_files_alone(finished):
    found = json.loads((finished / "report.json").read_text())
    assert found["device"].startswith("cuda") and found["verified"]["passed"] is True
    svdc("verify", finished)


def test_a_file_that_was_changed_is_still_found(finished, tmp_path):
    import shutil

    other = shutil.copytree(finished, tmp_path / "run")
    content = bytearray((other / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (other / "model.safetensors").write_bytes(content)
    svdc("verify", other, code=13)


@pytest.mark.parametrize("more", [[], ["--coverage", 0.8]], ids=["plain", "sets"])
def test_inputs_are_predicted_alike_on_both_devices(finished, tmp_path, more):
    np.save(tmp_path / "x.npy", np.random.default_rng(0).random((30, 1, 8, 8), dtype=np.float32))
    rows = {}
    for device in ("cpu", "cuda"):
        out = tmp_path / f"{device}.csv"
        svdc("predict", finished, "--input", tmp_path / "x.npy", "--samples", 1000, "--device", device, "--out", out, *more)
        rows[device] = list(csv.DictReader(out.open()))
    assert len(rows["cuda"]) == 30 and set(rows["cuda"][0]) == set(rows["cpu"][0])
    for name in rows["cpu"][0]:
        here, there = ([row[name] for row in rows[device]] for device in ("cpu", "cuda"))
        try:
            here, there = (np.array(column, float) for column in (here, there))
        except ValueError:  # class names, and sets of them
            assert sum(a == b for a, b in zip(here, there, strict=True)) >= 24, name
        else:
            assert np.median(np.abs(here - there)) < 0.05, name


def test_predictions_repeat_with_their_seed(finished, tmp_path):
    np.save(tmp_path / "x.npy", np.random.default_rng(0).random((5, 1, 8, 8), dtype=np.float32))
    texts = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        where = ["--samples", 7, "--seed", seed, "--device", "cuda", "--out", tmp_path / f"{name}.npz"]
        svdc("predict", finished, "--input", tmp_path / "x.npy", *where)
        texts.append(np.load(tmp_path / f"{name}.npz")["mean"])
    np.testing.assert_allclose(texts[0], texts[1], rtol=1e-5)
    assert not np.allclose(texts[0], texts[2], rtol=1e-4)


def test_contenders_are_compared_on_the_device(finished, tmp_path):
    """With an ensemble, corrupted inputs and magnitude pruning, whose models are also trained there."""
    how = ["--samples", 20, "--shift", "--members", 2, "--magnitude", "--no-laplace"]
    found = {}
    for device in ("cuda", "cpu"):
        svdc("evaluate", finished, *how, "--device", device, "--out", tmp_path / device)
        found[device] = json.loads((tmp_path / device / "evaluation.json").read_text())
    here, there = ({row["name"]: row["metrics"] for row in found[device]["contenders"]} for device in ("cpu", "cuda"))
    assert list(here) == list(there) and "deep ensemble of 2" in there and "magnitude, as many weights" in there
    exact = ("dense", "dense, temperature", "sparse, mean", "deep ensemble of 2", "magnitude, as many weights")
    for name in exact:  # the baselines were trained once and stored
        assert there[name]["nll"] == pytest.approx(here[name]["nll"], rel=1e-3), name
    assert there["sparse, samples"]["nll"] == pytest.approx(here["sparse, samples"]["nll"], rel=0.1, abs=0.05)
    assert set(found["cuda"]["shift"]["curves"]) == set(found["cpu"]["shift"]["curves"])


def test_a_run_is_measured_on_the_device(finished):
    run = ("bench", finished, "--seconds", 0.02, "--batch", 2, "--samples", 3)
    found = json.loads(svdc(*run, "--device", "cuda", "--json").stdout)
    text = json.dumps(found)
    assert "PyTorch" in text or "torch" in text


def test_a_file_is_exported_again_from_what_the_device_made(finished, tmp_path):
    svdc("export", finished, "--out", tmp_path / "again.onnx")
    import onnxruntime

    x = np.random.default_rng(0).random((4, 1, 8, 8), dtype=np.float32)
    outputs = []
    for file in (tmp_path / "again.onnx", finished / "model.onnx"):
        session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
        outputs.append(session.run(None, {session.get_inputs()[0].name: x})[0])
    np.testing.assert_allclose(*outputs, rtol=1e-5, atol=1e-6)


def test_an_estimate_is_made_with_a_loss_that_holds_tensors(tmp_path):
    code = "import torch\nfrom torch import nn\nloss = nn.CrossEntropyLoss(weight=torch.ones(10))\n"
    (tmp_path / "own.py").write_text(code)
    own = ["--set", f"loss.name={tmp_path / 'own.py'}:loss", "--set", "loss.task=classification"]
    found = svdc("sparsify", "digits", "--device", "cuda", *sets_of(), *own, "--dry-run", "--out", tmp_path / "run")
    assert "time on cuda" in found.output.replace("\n", " ")


def test_an_error_budget_is_kept_by_the_command(tmp_path):
    quick = sets_of("search.trials=1", "search.levels=1", "export.monte_carlo=false", "report.html=false")
    svdc("sparsify", "digits", "--device", "cuda", "--max-drop", 30, *quick, "--out", tmp_path / "run")
    found = json.loads((tmp_path / "run" / "report.json").read_text())
    assert found["device"].startswith("cuda") and len(found["search"]["trials"]) == 1


def test_a_device_that_is_not_there_is_named(tmp_path):
    if torch.device("cuda").type == "cpu":
        pytest.skip("there is always one CPU")
    many = f"cuda:{torch.cuda.device_count()}"
    assert f"{many} is not available" in svdc("sparsify", "digits", "--device", many, "--out", tmp_path / "run", code=2).stderr
