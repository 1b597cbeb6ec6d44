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


class Columns(nn.Module):
    """A category in each of two columns."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.last = nn.Embedding(7, 4), nn.Embedding(5, 4), nn.Linear(8, 3)

    def forward(self, x):
        return self.last(torch.cat([self.a(x[:, 0]), self.b(x[:, 1])], 1).tanh())


class Mixed(nn.Module):
    """A category in a table of numbers, whose embedding also gives the outputs: its weights are drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.line, self.last = nn.Embedding(7, 4), nn.Linear(3, 4), nn.Linear(4, 7, bias=False)
        self.last.weight = self.a.weight

    def forward(self, x):
        return self.last((self.a(x[:, 0].long().clamp(max=6)) + self.line(x[:, 1:])).tanh())


@pytest.mark.parametrize("make", [Columns, Mixed])
def test_categories_cut_out_of_a_table(tmp_path, make):
    torch.manual_seed(0)
    model = svdc.convert(make(), log_sigma2=-5.0).eval()
    x = torch.randint(5, (4, 2)) if make is Columns else torch.cat([torch.randint(7, (4, 1)), torch.randn(4, 3) - 2], 1)
    path = export_onnx(model, tmp_path / "t.onnx", x, monte_carlo=True).path
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    feeds = {"samples": np.array(3), "seed": np.array(1)}
    assert np.isfinite(session.run(["mean"], {"input": x.numpy(), **feeds})[0]).all()  # other numbers may be below 0
    for column in range(2 if make is Columns else 1):
        bad = x.clone()
        bad[2, column] = -1
        with pytest.raises(IndexError):
            model(bad)
        with pytest.raises(Exception, match="input_must_be_0_or_more"):
            session.run(["mean"], {"input": bad.numpy(), **feeds})
