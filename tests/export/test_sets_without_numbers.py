"""Prediction sets for non-finite inputs: they promise nothing, so they contain every class."""

import numpy as np
import torch
from export_run import session
from torch import nn

from svdcompress.calibrate import ConformalSets
from svdcompress.export import export_onnx, write_compact, write_few_bits, write_half
from svdcompress.likelihoods import likelihood_for
from svdcompress.pipeline import sets_of


def test_a_set_holds_every_class_where_the_logits_are_nan(tmp_path):
    torch.manual_seed(0)
    promise = ConformalSets(0.9, limit=0.3, examples=100)
    results = {"promises": {"coverage": {"mean": promise.to_dict()}}}
    further = sets_of(results, "mean", likelihood_for("classification"))
    path = export_onnx(nn.Linear(16, 8).eval(), tmp_path / "model.onnx", torch.randn(2, 16), further=further).path
    x = np.random.default_rng(0).normal(size=(4, 16)).astype(np.float32)
    good = session(path).run(["set"], {"input": x})[0]
    x[1, 3], x[2, 0] = np.nan, np.inf
    files = [path, *(make(path, tmp_path / "small.onnx").path for make in (write_compact, write_half, write_few_bits))]
    for file in files:
        logits, sets = session(file).run(["output", "set"], {"input": x})
        assert not np.isfinite(logits[1:3]).any() and (sets[1:3] == 1).all(), file
    assert np.array_equal(session(path).run(["set"], {"input": x})[0][[0, 3]], good[[0, 3]])
    assert bool(promise.sets(torch.full((1, 8), torch.nan)).all()) and not good.all()
