"""Numbers in files: read with any type, written in full, and reported with their file if they are invalid."""

import csv
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import svdcompress as svdc
from svdcompress.errors import DataError, ModelError
from svdcompress.export import export_onnx
from svdcompress.predict import predict_run
from svdcompress.predict._write import write_predictions
from svdcompress.recipe import CalibrateSection

_run = sys.modules["svdcompress.predict._run"]


def test_a_table_has_as_many_digits_as_its_numbers(tmp_path):
    wide = 1.7e9 + np.linspace(0, 450, 1500)
    narrow = np.linspace(0.1, 1, 1500, dtype=np.float32)
    path = write_predictions(tmp_path / "p.csv", {"mean": wide, "variance": narrow}, list(map(str, range(1500))), "regression")
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["mean"]) for row in rows] == wide.tolist()
    assert max(len(row["variance"]) for row in rows) <= 11
    assert np.array_equal(np.float32([row["variance"] for row in rows]), narrow)
    path = write_predictions(tmp_path / "q.csv", {"mean": np.full((2, 3), 1 / 3)}, ["a", "b"], "classification")
    assert "0.333333333," in path.read_text()


@pytest.fixture(scope="module")
def numbers(tmp_path_factory):
    """A run on three columns, with its ONNX files."""
    folder = tmp_path_factory.mktemp("run")
    torch.manual_seed(0)
    model = svdc.convert(nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)), log_sigma2=-3.0).eval()
    export_onnx(model, folder / "model.onnx", torch.randn(2, 3))
    export_onnx(model, folder / "model_mc.onnx", torch.randn(2, 3), monte_carlo=True)
    recipe = SimpleNamespace(task="classification", calibrate=CalibrateSection())
    facts = {"recipe": recipe, "preprocessing": {}, "classes": None, "tau": None, "dim": 1}
    return SimpleNamespace(folder=folder, file=folder.joinpath, model=model, **facts)


@pytest.fixture(autouse=True)
def run(numbers, monkeypatch):
    monkeypatch.setattr(_run, "open_run", lambda folder: numbers)


@pytest.mark.parametrize("onnx", [False, True])
def test_whole_numbers_are_numbers(tmp_path, onnx):
    x = np.arange(12).reshape(4, 3)
    for name, array in (("whole", x), ("float", x.astype(np.float32))):
        np.save(tmp_path / f"{name}.npy", array)
        predict_run("run", tmp_path / f"{name}.npy", tmp_path / f"{name}.npz", samples=5, seed=1, onnx=onnx)
    whole, floating = (np.load(tmp_path / f"{name}.npz")["mean"] for name in ("whole", "float"))
    assert np.array_equal(whole, floating)


@pytest.mark.parametrize("onnx", [False, True])
def test_bytes_in_an_array_of_columns_are_numbers(tmp_path, numbers, monkeypatch, onnx):
    """A table has no images, whose bytes are divided by 255."""
    table = {"columns": ["a", "b", "c"], "categories": {}, "transform": [{"normalize": {"mean": [1.0], "std": [9.0]}}]}
    run = SimpleNamespace(**{**vars(numbers), "preprocessing": table})
    monkeypatch.setattr(_run, "open_run", lambda folder: run)
    x = np.arange(12).reshape(4, 3) * 20
    found = []
    for kind in (np.float32, np.uint8, np.int64, np.bool_):
        np.save(tmp_path / "x.npy", x.astype(kind))
        predict_run("run", tmp_path / "x.npy", tmp_path / "p.npz", samples=5, seed=1, onnx=onnx)
        found.append(np.load(tmp_path / "p.npz")["mean"])
    assert np.array_equal(found[0], found[1]) and np.array_equal(found[0], found[2])
    np.save(tmp_path / "x.npy", (x > 0).astype(np.float32))
    predict_run("run", tmp_path / "x.npy", tmp_path / "p.npz", samples=5, seed=1, onnx=onnx)
    assert np.array_equal(found[3], np.load(tmp_path / "p.npz")["mean"])


def test_bytes_that_are_no_images_are_doubted(tmp_path):
    """Whether the run was trained on bytes is not known."""
    np.save(tmp_path / "x.npy", np.arange(12, dtype=np.uint8).reshape(4, 3))
    told = {}
    with pytest.warns(UserWarning, match=r"x\.npy: byte inputs \(uint8\) are divided by 255 like images"):
        predict_run("run", tmp_path / "x.npy", tmp_path / "p.npz", samples=5, told=told)
    assert len(told["warnings"]) == 1


def test_tokens_stay_whole(tmp_path, numbers, monkeypatch):
    torch.manual_seed(0)
    model = svdc.convert(nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(12, 2)), log_sigma2=-3.0).eval()
    export_onnx(model, tmp_path / "model.onnx", torch.ones(2, 3, dtype=torch.int64))
    facts = {**vars(numbers), "folder": tmp_path, "file": tmp_path.joinpath, "model": model}
    monkeypatch.setattr(_run, "open_run", lambda folder: SimpleNamespace(**facts))
    np.save(tmp_path / "x.npy", np.arange(6).reshape(2, 3))
    assert predict_run("run", tmp_path / "x.npy", tmp_path / "p.npz", samples=2)[1] == 2


@pytest.mark.parametrize("onnx", [False, True])
def test_inputs_that_do_not_fit_are_named(tmp_path, onnx):
    np.save(tmp_path / "x.npy", np.ones((2, 4), np.float32))
    with pytest.raises(DataError, match=r"x\.npy: .*fit"):
        predict_run("run", tmp_path / "x.npy", tmp_path / "p.npz", samples=2, onnx=onnx)


def test_pytorch_says_which_predictions_are_not_finite(tmp_path, monkeypatch):
    monkeypatch.setattr(_run, "BATCH", 4)
    x = np.ones((7, 3), np.float32)
    x[2], x[6, 1] = 1e38, -2e38
    np.save(tmp_path / "x.npy", x)
    with pytest.raises(DataError, match=r"x\.npy: the predictions are not finite .* for 1 of the inputs: 2; "):
        predict_run("run", tmp_path / "x.npy", tmp_path / "p.csv", samples=20)
    np.save(tmp_path / "x.npy", x[3:])
    with pytest.raises(DataError, match=r"for 1 of the inputs: 3; "):
        predict_run("run", tmp_path / "x.npy", tmp_path / "p.csv", samples=20)
    assert not (tmp_path / "p.csv").exists()


class InPairs(nn.Sequential):
    def forward(self, x):
        return super().forward(x.view(-1, 2, 3)).flatten(0, 1)


def test_of_a_model_that_refuses_single_inputs_the_whole_batch_is_named(tmp_path, numbers, monkeypatch):
    pairs = SimpleNamespace(**{**vars(numbers), "model": InPairs(*numbers.model)})
    monkeypatch.setattr(_run, "open_run", lambda folder: pairs)
    x = np.ones((4, 3), np.float32)
    x[1] = 3e38
    np.save(tmp_path / "x.npy", x)
    with pytest.raises(DataError, match=r"for 4 of the inputs: 0, 1, 2, 3; "):
        predict_run("run", tmp_path / "x.npy", tmp_path / "p.csv", samples=20)


def test_other_errors_of_a_model_stay_as_they_are(tmp_path, numbers, monkeypatch):
    plain = SimpleNamespace(**{**vars(numbers), "model": nn.Linear(3, 2)})
    monkeypatch.setattr(_run, "open_run", lambda folder: plain)
    np.save(tmp_path / "x.npy", np.ones((2, 3), np.float32))
    with pytest.raises(ModelError, match="no variational layer"):
        predict_run("run", tmp_path / "x.npy", tmp_path / "p.csv", samples=2)
