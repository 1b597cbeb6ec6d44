"""Files of a finished run that are not the ones that it wrote: said before they are used."""

import dataclasses
import json
import shutil
import warnings

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from svdcompress import checkpoint
from svdcompress.calibrate import load_promises, save_promises
from svdcompress.cli._app import app
from svdcompress.errors import CheckpointError
from svdcompress.pipeline import load_run, open_run, verify_run
from svdcompress.predict import predict_run

pytestmark = pytest.mark.filterwarnings("ignore:validation data have no example")  # the tiny run's 24 lack a class


@pytest.fixture
def folder(tiny_run, tmp_path):
    """A copy of the tiny run that tests may break, with inputs beside it."""
    np.save(tmp_path / "x.npy", np.zeros((3, 1, 8, 8), np.float32))
    return shutil.copytree(tiny_run[0], tmp_path / "copy")


def flip(path):
    """Change a bit of a file's last weight."""
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def train_on(folder):
    """Replace model.safetensors as a user might who trained the model further."""
    path = folder / "model.safetensors"
    model = open_run(folder).model
    with torch.no_grad():
        next(model.parameters()).add_(0.01)
    checkpoint.save(model, path, extra=checkpoint.read_manifest(path)["extra"])


def of_another_run(path):
    """Promises of twice the examples, as of a run on other data."""
    made = {}
    for by in ("mean", "samples"):
        kept = load_promises(path, by)
        made[by] = dataclasses.replace(kept, **{name: torch.cat([one, one]) for name, one in kept.tensors().items()})
    save_promises(path, made)


def test_weights_that_changed_are_said_once(folder):
    assert open_run(folder).model is not None  # as the run wrote it, so without a word
    train_on(folder)
    flip(folder / "dense.safetensors")
    opened = load_run(folder)
    with pytest.warns(UserWarning, match=r"is not the one that the run wrote \(its SHA-256 differs.*svdc verify") as said:
        assert opened.model is not None and opened.preprocessing is not None and opened.dense is not None
    named = [str(one.message).partition(" is not")[0] for one in said]
    assert named == [str(folder / name) for name in ("model.safetensors", "dense.safetensors")]


def test_a_promise_of_another_run_is_none(folder):
    ask = {"inputs": folder.parent / "x.npy", "out": folder.parent / "p.npz"}
    predict_run(folder, **ask, coverage=0.9)
    of_another_run(folder / "validation.safetensors")
    predict_run(folder, **ask)  # nothing is promised, so the file is not read
    with pytest.raises(CheckpointError, match=r"validation\.safetensors is not the one that the run wrote"):
        predict_run(folder, **ask, coverage=0.9)
    results = json.loads((folder / "report.json").read_text())
    del results["files"]["validation.safetensors"]
    (folder / "report.json").write_text(json.dumps(results))
    with pytest.raises(CheckpointError, match=r"validation\.safetensors is not from this run"):
        predict_run(folder, **ask, coverage=0.9)


def test_the_command_says_it_of_the_file_that_it_reads(folder):
    onnx = pytest.importorskip("onnx")
    model = onnx.load(str(folder / "model_mc.onnx"))
    model.producer_name = "another run"
    onnx.save(model, str(folder / "model_mc.onnx"))

    def said(*more):
        ask = ["predict", str(folder), "--input", str(folder.parent / "x.npy"), "--out", str(folder.parent / "p.csv"), *more]
        with warnings.catch_warnings():
            warnings.filterwarnings("default", ".*is not the one")
            made = CliRunner().invoke(app, ask)
        assert made.exit_code == 0, made.output
        return made.output.count("is not the one that the run wrote")

    assert (said(), said("--onnx")) == (0, 1)


def test_verify_says_it_in_its_table_alone(folder):
    train_on(folder)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*is not")
        found = verify_run(folder)
    assert [check.file for check in found.failed if check.name == "SHA-256"] == ["model.safetensors"]


@pytest.mark.parametrize("report", ["without digests", "missing"])
def test_where_nothing_is_known_nothing_is_said(folder, report):
    train_on(folder)
    results = json.loads((folder / "report.json").read_text())
    del results["files"]
    (folder / "report.json").write_text(json.dumps(results))
    if report == "missing":
        (folder / "report.json").unlink()
    of_another_run(folder / "validation.safetensors")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*is not")
        assert open_run(folder).model is not None
        predict_run(folder, folder.parent / "x.npy", folder.parent / "p.npz", coverage=0.9)
