"""A Monte-Carlo file refuses tokens below 0 like PyTorch's embedding, and only where an embedding looks them up."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

import svdcompress as svdc
from svdcompress.export import export_onnx


class Tokens(nn.Module):
    """ids: for an embedding; offset: a number that may be below 0; row: an index, which Python counts from the end."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.a, self.b = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.register_buffer("table", torch.randn(5, 8))

    def forward(self, ids, offset, row):
        return self.b(torch.relu(self.a(self.words(ids).mean(1) + offset[:, None] + self.table[row])))


@pytest.mark.slow
def test_tokens_below_zero(tmp_path):
    torch.manual_seed(0)
    model = svdc.convert(Tokens(), log_sigma2=-5.0).eval()
    good = {"ids": torch.randint(0, 20, (4, 6)), "offset": torch.randint(-3, 3, (4,)), "row": torch.randint(0, 5, (4,))}
    path = export_onnx(model, tmp_path / "t.onnx", good, monte_carlo=True).path
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def answer(**change):
        feeds = {**{name: value.numpy() for name, value in good.items()}, **change}
        return session.run(["mean"], {**feeds, "samples": np.array(3), "seed": np.array(1)})[0]

    first = answer()
    assert np.isfinite(first).all()
    bad = good["ids"].numpy().copy()
    bad[2, 3] = -1
    with pytest.raises(IndexError):
        model(torch.from_numpy(bad), good["offset"], good["row"])
    with pytest.raises(Exception, match="ids_must_be_0_or_more"):
        answer(ids=bad)
    with pytest.raises(Exception, match="batch_must_be_1_or_more"):
        answer(**{name: value.numpy()[:0] for name, value in good.items()})
    last = np.full(4, 4)
    assert np.array_equal(answer(row=last), answer(row=last - 5))  # PyTorch returns the same
    assert np.isfinite(answer(offset=np.full(4, -7))).all()
