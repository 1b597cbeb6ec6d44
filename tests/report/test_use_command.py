"""The command for predictions that the report prints, and its text on inputs from a user's own function."""

import re
from html import unescape
from pathlib import Path

import pytest
import torch
from torch import nn

import svdcompress as svdc
from svdcompress.cli._sparsify import next_steps
from svdcompress.recipe import dump_recipe, parse_recipe
from svdcompress.report._use import use


def page(folder, data, model="lenet-5", transform=(), recipe=None, **known):
    """The section's text, and the recipe of its run."""
    folder.mkdir(parents=True, exist_ok=True)
    net = svdc.convert(nn.Sequential(nn.Linear(6, 3)), log_sigma2=-4.0).eval()
    metadata = {"preprocessing": {"transform": list(transform), **known}}
    svdc.export_onnx(net, folder / "model.onnx", torch.randn(2, 6), metadata=metadata, verify=False)
    made = parse_recipe({"model": model, "data": data})
    return unescape(re.sub("<[^>]*>", "", use({"recipe": dump_recipe(made) if recipe is None else recipe}, folder))), made


@pytest.mark.parametrize(
    ("name", "data", "model", "command"),
    [
        ("a b", "./data.py:make", "lenet-5", "svdc predict 'runs/a b' --trust-code --input FILE"),
        ("mine", "digits", "./model.py:make", "svdc predict runs/mine --trust-code --input FILE"),
        ("plain", "digits", "lenet-5", "svdc predict runs/plain --input FILE"),
    ],
)
def test_the_command_runs_as_it_stands(tmp_path, monkeypatch, name, data, model, command):
    monkeypatch.chdir(tmp_path)
    folder = Path("runs") / name
    text, made = page(folder, data, model)
    assert f"From the command line: {command} (" in text
    assert command in next_steps(made, folder)  # the same command in both places


def test_images_are_not_offered_where_a_function_of_the_users_prepares_inputs(tmp_path):
    text, _ = page(tmp_path / "own", "./data.py:make")
    assert "(FILE: npy or npz, with inputs as ./data.py:make gives them)" in text and "an image" not in text
    assert "Pass inputs as ./data.py:make returns them, with all that it does to them; the files" in text
    text, _ = page(tmp_path / "own", "./data.py:make", transform=[{"normalize": {"mean": [0.5], "std": [0.5]}}])
    assert "in this order: what ./data.py:make does to them itself; normalize: {'mean': [0.5], 'std': [0.5]}" in text
    assert "svdc predict does all but the first" in text
    text, _ = page(tmp_path / "files", "imagefolder:photos")
    assert "(FILE: npy, npz, csv, parquet, an image, or a folder)" in text
    assert "Pass inputs as the data source returns them; the files need no other preprocessing." in text


def test_bytes_are_said_to_be_divided(tmp_path):
    steps = {"transform": [{"scale": 2.0}], "bytes": "divided by 255"}
    text, _ = page(tmp_path / "own", "./data.py:make", bytes="divided by 255")
    assert "in this order: what ./data.py:make does to them itself; bytes (uint8) divided by 255, as float32. svdc" in text
    text, _ = page(tmp_path / "files", "imagefolder:photos", **steps)
    assert "in this order: bytes (uint8) divided by 255, as float32; scale: 2.0. svdc predict does so by itself." in text
    assert "the files need no other preprocessing" in page(tmp_path / "none", "imagefolder:photos", bytes=None)[0]


@pytest.mark.parametrize("recipe", ["[", "nonsense: 1", "text", ""])
def test_a_recipe_that_cannot_be_read_is_passed_over(tmp_path, recipe):
    assert "svdc predict" in page(tmp_path / "run", "digits", recipe=recipe)[0]
