"""Images for runs with data from a user's function, and images whose layout PyTorch does not take."""

import sys
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import svdcompress as svdc
from svdcompress.errors import DataError
from svdcompress.predict import predict_run
from svdcompress.recipe import CalibrateSection, DataSection

_run = sys.modules["svdcompress.predict._run"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A net for color images of 6x5, its files, an image, and arrays of images in both layouts."""
    folder = tmp_path_factory.mktemp("run")
    torch.manual_seed(0)
    model = svdc.convert(nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(24, 4)), log_sigma2=-3.0).eval()
    svdc.export_onnx(model, folder / "model_mc.onnx", torch.randn(2, 3, 6, 5), monte_carlo=True, verify=False)
    (folder / "photos").mkdir()
    Image.fromarray(np.full((6, 5, 3), 200, np.uint8)).save(folder / "photos" / "a.png")
    np.save(folder / "x.npy", np.zeros((2, 3, 6, 5), np.float32))
    np.save(folder / "last.npy", np.zeros((2, 6, 5, 3), np.float32))
    return folder, model


@pytest.fixture
def predicted(folder, monkeypatch, tmp_path):
    """A function that predicts a file of inputs for a run of such data and returns the messages."""
    place, model = folder

    def work(name, inputs, transform=(), onnx=False):
        recipe = SimpleNamespace(task="classification", calibrate=CalibrateSection(), data=DataSection(name=name))
        preprocessing = {"input_shape": [3, 6, 5], "transform": list(transform)}
        facts = {"recipe": recipe, "preprocessing": preprocessing, "classes": None, "tau": None, "dim": 1}
        run = SimpleNamespace(folder=place, file=place.joinpath, model=model, results={}, **facts)
        monkeypatch.setattr(_run, "open_run", lambda folder: run)
        told = {}
        predict_run("run", place / inputs, tmp_path / "p.csv", samples=2, told=told, onnx=onnx)
        return told

    return work


@pytest.mark.parametrize("inputs", ["photos", "photos/a.png"])
def test_images_for_data_of_the_users_own_function_are_warned_of(predicted, inputs):
    with pytest.warns(
        UserWarning, match=r"the run's data come from \./data\.py:make, and it is not known how that function prepares an image"
    ) as seen:
        told = predicted("./data.py:make", inputs)
    assert told["warnings"] == [str(seen[0].message)]
    assert "values in [0, 1], without further changes (the run has no data.transform)" in told["warnings"][0]
    assert "anything else, such as normalizing" in told["warnings"][0] and told["warnings"][0].endswith("(.npy)")


def test_what_the_run_knows_of_the_preparation_is_said(predicted):
    steps = [{"normalize": {"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]}}]
    with pytest.warns(UserWarning, match=r"and then through the run's data\.transform \(normalize\)\. If .* more than that"):
        predicted("package.data:make", "photos", steps)


@pytest.mark.parametrize(("name", "inputs"), [("./data.py:make", "x.npy"), ("imagefolder:photos", "photos")])
def test_arrays_and_images_of_known_sources_are_not_warned_of(predicted, name, inputs):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "warnings" not in predicted(name, inputs)


@pytest.mark.parametrize("onnx", [False, True])
def test_images_with_their_channels_last_are_guessed(predicted, onnx):
    with pytest.raises(
        DataError, match=r"(?s)last\.npy: .*[^.]\. \(N, H, W, C\)\? PyTorch takes \(N, C, H, W\): x\.transpose\(0, 3"
    ):
        predicted("./data.py:make", "last.npy", onnx=onnx)
