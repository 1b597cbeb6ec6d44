"""Names longer than the file system allows count as missing files, wherever they are given."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import svdcompress as svdc
from svdcompress.checkpoint import read_manifest
from svdcompress.errors import CheckpointError, DataError, RecipeError, SvdcError
from svdcompress.predict import read_inputs
from svdcompress.recipe import DataSection, load_recipe
from svdcompress.relevance import Masks
from svdcompress.report import altered
from svdcompress.sources import load_weights, make_model, open_data

LONG = "x" * 300


def test_in_an_index_of_shards(tmp_path):
    index = {"metadata": {}, "weight_map": {"weight": f"{LONG}.safetensors"}}
    (tmp_path / "m.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="which is not in the same folder"):
        load_weights(nn.Linear(2, 2), tmp_path / "m.safetensors.index.json")


def test_in_a_report(tmp_path):
    assert altered(tmp_path, {LONG: {"sha256": "0", "bytes": 1}})[LONG][1] is None


@pytest.mark.parametrize("kind", ["csv", "npz", "npy", "mnist", "cifar10", "imagefolder", "parquet"])
def test_as_data(tmp_path, kind):
    with pytest.raises((DataError, RecipeError)):
        open_data(DataSection(name=f"{kind}:{tmp_path}/{LONG}", target="y"), "classification")


@pytest.mark.parametrize(
    "read",
    [
        lambda path: load_weights(nn.Linear(2, 2), path),
        lambda path: svdc.load(path, nn.Linear(2, 2)),
        read_manifest,
        lambda path: Masks.load(path, svdc.convert(nn.Linear(2, 2))),
        read_inputs,
        load_recipe,
        lambda path: svdc.export_onnx(nn.Linear(2, 2).eval(), path, torch.zeros(1, 2)),
        lambda path: svdc.save(svdc.convert(nn.Linear(2, 2)), path),
        lambda path: make_model(load_recipe("digits", [f"model=./{path.name}.py:f"]).model),
    ],
    ids=["weights", "load", "manifest", "masks", "inputs", "recipe", "export", "save", "model"],
)
@pytest.mark.parametrize("end", [".safetensors", ".npy", ".yaml", ".onnx", ".pt", ""])
def test_as_a_file(tmp_path, read, end):
    with pytest.raises(SvdcError):
        read(tmp_path / f"{LONG}{end}")
    assert not list(tmp_path.iterdir())
