"""Rows of real networks that start from the dense network of another row."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import test_real_nets
import torch
from safetensors.torch import load_file

from svdcompress.recipe import load_recipe

module = test_real_nets.module  # the fixture


def test_a_dense_network_of_other_data_is_not_begun_with(module, tmp_path, monkeypatch):
    """Its training data may be among the test data of another split."""
    real_nets, starts = module("real_nets"), module("real_nets_start")
    args = {"vocabulary": str(Path("r", "vocab.txt")), "folder": "f", "split": 0}
    begun = SimpleNamespace(recipe=load_recipe(None, ["weights.trained=false", "dense.epochs=8"]))
    begun.recipe.data.args = args
    monkeypatch.setattr(starts, "open_run", lambda folder, trust_code: begun)
    (tmp_path / "other").mkdir()
    own = load_recipe(None, ["weights.trained=true"])
    own.weights.file, own.data.args = str(tmp_path / "other" / "dense.safetensors"), dict(args)
    assert starts.epochs_of_start(own) == (8, "other") and starts.epochs_of_start(begun.recipe) == (8, None)
    own.data.args["split"] = 1
    with pytest.raises(SystemExit, match="other has other data"):
        starts.epochs_of_start(own)
    files = {
        "goal": None,
        "dense": tmp_path / "other",
        "rxnfp": Path("r"),
        "yields": Path("f"),
        "crepe": None,
        "speech": None,
        "dncnn": None,
    }
    assert "weights.trained=true" in real_nets.cases(SimpleNamespace(**files), ["suzuki-0"])["suzuki-0"]
    with pytest.raises(SystemExit, match="suzuki-1: some may be test data"):
        real_nets.cases(SimpleNamespace(**files), ["suzuki-1"])


def test_a_row_begins_with_the_dense_network_that_was_trained_on_beside_another(module, tmp_path, monkeypatch):
    starts = module("real_nets_start")
    begun = SimpleNamespace(recipe=load_recipe(None, ["weights.trained=false", "dense.epochs=8"]))
    begun.recipe.data.args = {"split": 0}
    monkeypatch.setattr(starts, "open_run", lambda folder, trust_code: begun)
    torch.manual_seed(0)
    net, file = torch.nn.Linear(3, 2), tmp_path / "other-dense-trained-as-long.pt"
    torch.save({"model": net, "epochs": 12}, file)
    weights = starts.dense_weights(file, "suzuki-0", ["split=0"])
    assert weights == file.with_suffix(".safetensors")
    assert {key: tensor.tolist() for key, tensor in load_file(weights).items()} == {
        key: tensor.tolist() for key, tensor in net.state_dict().items()
    }
    own = load_recipe(None, ["weights.trained=true"])
    own.weights.file, own.data.args = str(weights), {"split": 0}
    assert starts.epochs_of_start(own) == (20, "other-dense-trained-as-long")
    own.data.args = {"split": 1}
    with pytest.raises(SystemExit, match="other has other data"):
        starts.epochs_of_start(own)
    with pytest.raises(SystemExit, match="suzuki-1: some may be test data"):
        starts.dense_weights(file, "suzuki-1", ["split=1"])
    own.weights.file = "public.pth"  # weights trained by others
    assert starts.epochs_of_start(own) == (0, None)
