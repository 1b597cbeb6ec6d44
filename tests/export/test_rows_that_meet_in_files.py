"""Monte-Carlo files of a model whose rows depend on each other draw weights like PyTorch, against the closed-form variance."""

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

import svdcompress as svdc


class Meeting(nn.Module):
    """Combines each row with the mean of all rows."""

    def __init__(self):
        super().__init__()
        self.line = nn.Linear(8, 1)

    def forward(self, x):
        own = self.line(x)
        return own + 3 * own.mean(0, keepdim=True)


class Running(nn.Module):
    """The mean of each row and those before it."""

    def __init__(self):
        super().__init__()
        self.line = nn.Linear(8, 1)

    def forward(self, x):
        count = torch.ones_like(x[:, :1]).cumsum(0)
        return self.line(x).cumsum(0) / count


@pytest.mark.parametrize("rows", [1, 16], ids=["one example", "all"])
@pytest.mark.parametrize("make", [Meeting, Running])
def test_the_variance_is_that_of_one_draw_of_the_weights_for_all_rows(tmp_path, make, rows):
    torch.manual_seed(0)
    model, x = svdc.convert(make(), log_sigma2=-2.0).eval(), 1 + 0.1 * torch.randn(16, 8)
    # y = w (x + 3 mean(x)) + 4 b, or w mean(x up to here) + b, and each kept weight of w has the variance exp(-2)
    read = x + 3 * x.mean(0) if make is Meeting else x.cumsum(0) / torch.arange(1, 17)[:, None]
    kept = model.line.relevant().double().flatten()
    exact = (np.exp(-2.0) * kept * read.double().square()).sum(1).numpy()
    assert kept.sum() >= 4
    svdc.export_onnx(model, tmp_path / "mc.onnx", x[:rows], monte_carlo=True, task="regression")
    session = onnxruntime.InferenceSession(str(tmp_path / "mc.onnx"))
    feeds = {session.get_inputs()[0].name: x.numpy(), "samples": np.array(4000), "seed": np.array(1)}
    names = [value.name for value in session.get_outputs()]
    found = dict(zip(names, session.run(None, feeds), strict=True))["variance"][:, 0]
    np.testing.assert_allclose(found, exact, rtol=0.1)


def test_rows_of_tokens_that_meet_show_with_a_single_example(tmp_path):
    class Text(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.running = nn.Embedding(30, 8), Running()

        def forward(self, ids):
            return self.running(torch.einsum("ntd,t->nd", self.embed(ids), torch.arange(1.0, 6.0)))

    torch.manual_seed(0)
    model, ids = svdc.convert(Text(), include=["running.*"], log_sigma2=-2.0).eval(), torch.randint(30, (12, 5))
    svdc.export_onnx(model, tmp_path / "mc.onnx", ids[:1], monte_carlo=True, task="regression")
    session = onnxruntime.InferenceSession(str(tmp_path / "mc.onnx"))
    feeds = {session.get_inputs()[0].name: ids.numpy(), "samples": np.array(2000), "seed": np.array(1)}
    names = [value.name for value in session.get_outputs()]
    found = dict(zip(names, session.run(None, feeds), strict=True))["variance"][:, 0]
    read = torch.einsum("ntd,t->nd", model.embed(ids), torch.arange(1.0, 6.0)).detach().double()
    read = read.cumsum(0) / torch.arange(1, 13)[:, None]
    line = model.running.line
    exact = (np.exp(-2.0) * line.relevant().double().flatten() * read.square()).sum(1)
    np.testing.assert_allclose(found, exact.detach().numpy(), rtol=0.15)
