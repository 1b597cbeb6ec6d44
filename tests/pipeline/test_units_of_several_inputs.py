"""The ONNX files of a model with several inputs answer in the target's own units and keep its argument names."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest

from svdcompress.export import read_metadata
from svdcompress.pipeline import open_run, run, verify_run
from svdcompress.predict import predict_run
from svdcompress.recipe import load_recipe

CODE = """
import torch
from torch import nn


class Two(nn.Module):
    def __init__(self, outputs=1):
        super().__init__()
        self.kinds, self.hidden, self.head = nn.Embedding(5, 4), nn.Linear(10, 16), nn.Linear(16, outputs)

    def forward(self, num, kind):
        return self.head(torch.relu(self.hidden(torch.cat([num, self.kinds(kind)], 1))))


make = Two


def data():
    g = torch.Generator().manual_seed(5)
    num, kind = torch.randn(400, 6, generator=g), torch.randint(0, 5, (400,), generator=g)
    y = 500 + 100 * num[:, 0] + 20 * torch.randn(400, generator=g)
    both = {"num": num, "kind": kind}
    return ({k: v[:300] for k, v in both.items()}, y[:300, None]), ({k: v[300:] for k, v in both.items()}, y[300:, None])
"""

SETTINGS = ["data.target_scale=standardize", "dense.epochs=10", "dense.lr=0.01", "train.epochs=1", "recover.epochs=1"]
SETTINGS += ["train.beta.final=1e-6", "recover.beta=1e-6", "calibrate.coverage=0.9", "export.sets=true", "device=cpu"]
SETTINGS += ["data.validation=0.3", "uncertainty.samples=0", "report.latency=false", "report.html=false"]


@pytest.mark.parametrize(("loss", "outputs"), [("mse", 1), pytest.param("gaussian-nll", 2, marks=pytest.mark.slow)])
def test_files_of_several_inputs_answer_in_the_targets_units(tmp_path, loss, outputs):
    (tmp_path / "mine.py").write_text(CODE)
    model = f"model={{name: {tmp_path}/mine.py:make, args: {{outputs: {outputs}}}}}"
    run(load_recipe(None, [model, f"data={tmp_path}/mine.py:data", f"loss={loss}", *SETTINGS]), tmp_path / "run")
    inputs = {name: value[:40].numpy() for name, value in open_run(tmp_path / "run", trust_code=True).data.test.inputs.items()}
    np.savez(tmp_path / "in.npz", **inputs)
    out, _ = predict_run(tmp_path / "run", tmp_path / "in.npz", tmp_path / "out.npz", samples=50, trust_code=True)
    session = onnxruntime.InferenceSession(str(tmp_path / "run" / "model.onnx"))
    assert [value.name for value in session.get_inputs()] == ["num", "kind"]
    mean, lower, upper = session.run(["output", "lower", "upper"], inputs)
    drawn = onnxruntime.InferenceSession(str(tmp_path / "run" / "model_mc.onnx"))
    (sampled,) = drawn.run(["mean"], {**inputs, "samples": np.array(50)})
    truth = 500 + 100 * inputs["num"][:, 0]
    with np.load(out) as found:
        for one in (mean[:, 0], sampled[:, 0]):
            assert np.abs(one - found["mean"][:, 0]).max() < 5  # with a spread of 100
    assert ((lower < upper) & (lower[:, :1] < mean[:, :1]))[:, 0].all() and np.corrcoef(mean[:, 0], truth)[0, 1] > 0.9
    assert abs(mean[:, 0].mean() - 500) < 60
    assert read_metadata(tmp_path / "run" / "model.onnx")["preprocessing"]["target_scale"] is None
    again, _ = predict_run(tmp_path / "run", tmp_path / "in.npz", tmp_path / "onnx.npz", samples=50, onnx=True, trust_code=True)
    with np.load(out) as found, np.load(again) as same:
        assert np.abs(found["mean"] - same["mean"]).max() < 5
    assert not verify_run(tmp_path / "run", trust_code=True).failed
