"""An npz file with several arrays: which of them are inputs of the model."""

import sys
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import svdcompress as svdc
from svdcompress.errors import DataError
from svdcompress.predict import predict_run, read_inputs
from svdcompress.recipe import CalibrateSection

X, MASK = np.random.default_rng(0).random((3, 4)).astype(np.float32), np.array([[1, 0, 1, 0]] * 3, np.float32)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 3)

    def forward(self, x, mask=None):
        return self.a(x if mask is None else x * mask)


@pytest.mark.parametrize("name", ["x", "input", "inputs", "images", "X", "data", "arr_0"])
def test_a_run_of_several_inputs_gets_all_of_them(tmp_path, name):
    np.savez(tmp_path / "two.npz", **{name: X, "mask": MASK, "y": np.zeros(3)})
    found, rows = read_inputs(tmp_path / "two.npz", {"transform": []})
    assert set(found) == {name, "mask", "y"} and len(rows) == 3
    assert np.array_equal(found["mask"].numpy(), MASK)


def test_the_mask_of_a_run_is_not_dropped(tmp_path, monkeypatch):
    torch.manual_seed(0)
    model = svdc.convert(Masked(), log_sigma2=-30.0).eval()
    recipe = SimpleNamespace(task="classification", calibrate=CalibrateSection())
    facts = {"folder": tmp_path, "file": tmp_path.joinpath, "model": model, "recipe": recipe, "preprocessing": {}}
    run = SimpleNamespace(**facts, classes=None, tau=None, dim=1)
    monkeypatch.setattr(sys.modules["svdcompress.predict._run"], "open_run", lambda folder: run)
    np.savez(tmp_path / "two.npz", x=X, mask=MASK)
    predict_run("run", tmp_path / "two.npz", tmp_path / "p.npz", samples=2)
    weight, bias = model.a.weight.detach().numpy(), model.a.bias.detach().numpy()
    powers = np.exp((X * MASK) @ weight.T + bias)
    with np.load(tmp_path / "p.npz") as stored:
        np.testing.assert_allclose(stored["mean"], powers / powers.sum(1, keepdims=True), atol=1e-4)


def test_a_run_of_one_input_names_what_it_leaves_out_but_for_targets(tmp_path):
    np.savez(tmp_path / "two.npz", x=X, mask=MASK, labels=np.zeros(3), Y=np.zeros(3))
    for how in ({"preprocessing": {"input_shape": [4]}}, {"shape": (4,)}):
        with pytest.warns(UserWarning, match=r"two\.npz: only 'x' is used, without mask"):
            found, _ = read_inputs(tmp_path / "two.npz", **how)
        assert np.array_equal(found.numpy(), X)
    np.savez(tmp_path / "one.npz", inputs=X, labels=np.zeros(3), Y=np.zeros(3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found, _ = read_inputs(tmp_path / "one.npz", {"input_shape": [4]})
    assert np.array_equal(found.numpy(), X)


@pytest.mark.parametrize("name", ["x", "inputs", "images", "X", "data", "spectra"])
def test_files_that_training_reads_are_read(tmp_path, name):
    """And an input of any name that is alone beside its targets."""
    np.savez(tmp_path / "one.npz", **{name: X, "y": np.zeros(3)})
    found, _ = read_inputs(tmp_path / "one.npz", shape=(4,))
    assert np.array_equal(found.numpy(), X)


def test_which_array_is_the_input_is_asked(tmp_path):
    np.savez(tmp_path / "splits.npz", x_train=X, x_test=X[:2], y_train=np.zeros(3))
    with pytest.raises(DataError, match=r"splits\.npz: which of its arrays \(x_train, x_test, y_train\) is the input"):
        read_inputs(tmp_path / "splits.npz", shape=(4,))
