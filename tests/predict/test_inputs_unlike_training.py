"""Inputs that are not scaled as in training, or of other sizes, are predicted with a warning."""

import json
import sys
import warnings
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import svdcompress as svdc
from svdcompress.cli._runs import _promises
from svdcompress.errors import DataError
from svdcompress.predict import predict_run
from svdcompress.predict._unlike import bytes_as_images, other_sizes, undivided
from svdcompress.recipe import DataSection

_run = sys.modules["svdcompress.predict._run"]

SETTINGS = {
    "dense": {"epochs": 1},
    "train": {"epochs": 1},
    "recover": {"epochs": 0},
    "calibrate": {"coverage": 0.8},
    "report": {"latency": False, "html": False},
    "uncertainty": {"samples": 0},
}


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))


def images(count=8, side=6, seed=1):
    return np.random.default_rng(seed).integers(0, 256, (count, 1, side, side), dtype=np.uint8)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of a net for images of any size, on bytes."""
    out = tmp_path_factory.mktemp("bytes") / "run"
    x = torch.from_numpy(images(150, seed=0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return svdc.sparsify(network(), (x, (x[:, 0, 0, 0] > 127).long()), settings=SETTINGS, out=out)


@pytest.fixture
def predicted(trained, tmp_path):
    """Predicts an array; returns the means, what was told, and the warnings."""

    def work(array, onnx=False, **more):
        np.save(tmp_path / "x.npy", array)
        told = {}
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            more |= {"onnx": True, "samples": 100} if onnx else {"model": network(), "samples": 100}
            predict_run(trained.folder, tmp_path / "x.npy", tmp_path / "p.npz", seed=0, told=told, **more)
        with np.load(tmp_path / "p.npz") as stored:
            return stored["mean"], told, [str(one.message) for one in seen if "x.npy" in str(one.message)]

    return work


def test_a_run_tells_of_the_division(trained):
    (line,) = (note for note in trained.results["notes"] if "uint8" in note)
    assert line.endswith("if the model divides them itself, pass them as float32")
    assert svdc.load_run(trained.folder).preprocessing["bytes"] == "divided by 255"
    for name in ("dense.onnx", "model.onnx", "model_mc.onnx"):
        held = {one.key: one.value for one in onnx.load(str(trained.folder / name)).metadata_props}
        assert json.loads(held["preprocessing"])["bytes"] == "divided by 255"


@pytest.mark.parametrize("onnx", [False, True])
def test_numbers_that_look_like_bytes_are_doubted(predicted, onnx):
    x = images()
    right, _, none = predicted(x, onnx)
    assert np.array_equal(predicted((x / 255).astype(np.float32), onnx)[0], right) and not none
    for array in (x.astype(np.float32), x.astype(np.int64)):
        _, told, seen = predicted(array, onnx)
        assert told["warnings"] == seen and len(seen) == 1
        assert "trained on bytes divided by 255, from 0 to 1: give bytes as uint8, or divide them by 255" in seen[0]


def test_which_numbers_are_doubted():
    divided = {"bytes": "divided by 255"}
    small, large = torch.rand(2, 1, 3, 3), torch.full((2, 1, 3, 3), 200.0)
    assert undivided("x.npy", large, divided) and undivided("x.npy", small - 3, divided)
    assert not undivided("x.npy", small, divided) and not undivided("x.npy", large.byte(), divided)
    for unknown in ({}, {"bytes": None}):  # a run of an earlier version, or one without bytes
        assert not undivided("x.npy", large, unknown)
    # Of several inputs, any may be on a scale of its own.
    several = {"image": small, "depth": large + 0.5, "age": torch.tensor([70.0, 30.0]), "ids": torch.tensor([[900, 7]] * 2)}
    assert not undivided("x.npz", several, divided)
    assert "from 200 to 200" in undivided("x.npz", {**several, "image": large}, divided)


def test_bytes_for_a_run_without_bytes_are_doubted():
    """The note on bytes says to pass them as float32, which `svdc predict` would divide if they were bytes again."""

    def doubt(raw, path="x.npy", source="./data.py:make", **known):
        recipe = SimpleNamespace(data=DataSection(name=source))
        return bytes_as_images(path, raw, SimpleNamespace(recipe=recipe, preprocessing=known))

    pictures, vectors = torch.zeros(2, 1, 3, 3).byte(), torch.zeros(2, 3).byte()
    assert "give them as float32, as in training" in doubt(pictures, bytes=None)
    assert "give them as float32, as in training" in doubt(vectors, source="npz:x.npz", bytes=None)
    assert not doubt(pictures, path="photos/1.png", bytes=None) and not doubt(pictures, source="digits", bytes=None)
    for raw in (pictures, vectors):
        assert not doubt(raw, bytes="divided by 255") and not doubt(raw.float(), bytes=None)
    assert not doubt(pictures) and "unless the run was trained on bytes as well" in doubt(vectors)


def test_other_sizes_are_told_and_promises_are_not_repeated_for_them(predicted):
    assert not predicted(images())[2] and "other_sizes" not in predicted(images())[1]
    _, told, (line,) = predicted(images(side=9), coverage=0.8)
    assert told["warnings"] == [line] and told["other_sizes"] == "(1, 9, 9), not (1, 6, 6)"
    assert "inputs of the shape (1, 9, 9), not (1, 6, 6) as in training" in line and "like the validation data" in line
    (said,) = (text for text in _promises(told) if text.startswith("coverage"))
    assert "inputs like the validation data, which these, of other sizes, are not (" in said
    (said,) = _promises({"coverage": told["coverage"]})
    assert "which these" not in said


def test_files_refuse_other_sizes_themselves(predicted):
    with pytest.raises(DataError, match="do not fit"):
        predicted(images(side=9), onnx=True)


def test_where_sizes_may_differ():
    def told(raw, x, files, axes=None, **known):
        recipe = SimpleNamespace(export=SimpleNamespace(dynamic_axes=axes))
        return other_sizes(raw, x, SimpleNamespace(recipe=recipe), files, known)

    small, large = torch.zeros(2, 1, 6, 6), torch.zeros(2, 1, 6, 9)
    assert told(large, large, {}, {"input": {3: "width"}}, input_shape=[1, 6, 6]) == ""
    assert told(large, large, {}, {"input": {2: "height"}}, input_shape=[1, 6, 6]) == "(1, 6, 9), not (1, any, 6)"
    # What counts is what the model gets, and a transform may make all inputs alike.
    resize = {"input_shape": [1, 6, 6], "transform": [{"resize": [4, 4]}]}
    assert told(large, torch.zeros(2, 1, 4, 4), {}, **resize) == "" == told(small, small, {}, input_shape=[1, 6, 6])
    # Without a known shape, as of data that are read as needed, the run's ONNX file has it.
    assert told(large, large, {"input": [1, 6, 6]}) == "(1, 6, 9), not (1, 6, 6)" and told(large, large, {"x": [1, 6, 0]}) == ""
    assert told(large, large, {}) == "" == told(large, large, {"x": [1, 6, 6], "z": [3]})
    both = {"a": large, "b": torch.zeros(2, 5)}
    assert told(both, both, {"a": [1, 6, 9], "b": [4]}) == "b (5,), not (4,)"
    assert told(small, small, {}, input_shape=[36]) == "(1, 6, 6), not (36,)"


def test_a_dataset_that_is_read_as_needed_has_sizes_too(trained, predicted, monkeypatch):
    kept = _run.open_run

    def forgetful(folder, **more):
        run = kept(folder, **more)
        run.__dict__["preprocessing"] = {key: value for key, value in run.preprocessing.items() if key != "input_shape"}
        return run

    monkeypatch.setattr(_run, "open_run", forgetful)
    assert predicted(images(side=9))[1]["other_sizes"] == "(1, 9, 9), not (1, 6, 6)"
