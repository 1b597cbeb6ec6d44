"""Models that use the batch's size: `torch.export` may take it from any argument that has it, the sums of draws among them."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

import svdcompress as svdc
from svdcompress.errors import ExportError
from svdcompress.export import _loop


class WithToken(nn.Module):
    """A token in front of each example's rows, as in a vision transformer."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.first, self.token = nn.Linear(6, 8), nn.Parameter(torch.randn(1, 1, 8))
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))
        self.last = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.last(x[:, 0])


@pytest.mark.parametrize("layers", [13, 14])
def test_the_size_of_the_batch_is_read_from_the_input(tmp_path, layers):
    """With 14 layers, the graph of one draw has 20 inputs, for which torch reads it from a sum."""
    torch.manual_seed(0)
    model = svdc.convert(WithToken(layers), log_sigma2=-9.0).eval()
    file = svdc.export_onnx(model, tmp_path / "mc.onnx", torch.randn(2, 5, 6), monte_carlo=True)
    x = torch.randn(4, 5, 6)
    session = onnxruntime.InferenceSession(file.path)
    (mean,) = session.run(["mean"], {"input": x.numpy(), "samples": np.array(400)})
    torch.manual_seed(1)
    with torch.no_grad(), svdc.sampling(model):
        wanted = torch.stack([model(x).softmax(-1) for _ in range(400)]).mean(0)
    assert np.allclose(mean, wanted.numpy(), atol=0.03), (mean, wanted)


def test_a_cycle_is_an_error_of_the_export(monkeypatch, tmp_path):
    monkeypatch.setattr(_loop, "_batch_of_inputs", lambda *given: None)
    model = svdc.convert(WithToken(14)).eval()
    with pytest.raises(ExportError, match="monte_carlo: the draws depend on their own sums"):
        svdc.export_onnx(model, tmp_path / "mc.onnx", torch.randn(2, 5, 6), monte_carlo=True)
