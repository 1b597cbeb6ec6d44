"""Files in fewer bits of a model that gives deviations: its RMSE may stay the same while they are lost."""

import math

import pytest
import torch
from torch import nn

from svdcompress.errors import ExportError
from svdcompress.export import export_onnx
from svdcompress.pipeline import _allowed
from svdcompress.pipeline._baked import Baked
from svdcompress.pipeline._four_bits import FourBits
from svdcompress.pipeline._integers import Integers
from svdcompress.sources import Data, InMemory


@pytest.fixture
def made(tmp_path):
    """made(size): a file of a network that knows means up to a size and their noise, 1% to 7% of it, and its data.

    Three hidden units do all: two hold the mean, up to the size, the third holds an input from 0 to 1, of which the log
    variance is made.
    """

    def make(size):
        model = nn.Sequential(nn.Linear(3, 512), nn.ReLU(), nn.Linear(512, 2)).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
            for sign in (0, 1):
                model[0].weight[sign, 0] = size * (1 - 2 * sign)
                model[2].weight[0, sign] = 1 - 2 * sign
            model[0].weight[2, 1] = 1
            model[2].weight[1, 2] = 4
            model[2].bias[1] = 2 * math.log(0.01 * size)
        x = torch.rand(400, 3, generator=torch.Generator().manual_seed(0)) * 2 - 1
        noise = 0.01 * (2 * x[:, 1].relu()).exp()
        y = size * (x[:, 0] + noise * torch.randn(400, generator=torch.Generator().manual_seed(1)))
        path = export_onnx(model, tmp_path / "model.onnx", x[:2]).path
        examples = InMemory(x, y)
        return path, Data(train=examples, validation=examples, test=examples, task="gaussian", outputs=1)

    return make


def test_integers_that_lose_the_deviations_are_refused(made, tmp_path):
    """One scale holds for all hidden units: steps of 4 or more for means up to 1000, and for the input of the log variance."""
    path, data = made(1000.0)
    work = Integers(path, data, Baked(), max_drop=50.0, dense=30.0)
    with pytest.raises(ExportError, match=r"with integers the NLL .* \(4\.\d+ without\): deviations are off"):
        work.write(tmp_path / "int8.onnx")
    assert not (tmp_path / "int8.onnx").exists()
    path, data = made(10.0)
    Integers(path, data, Baked(), max_drop=50.0, dense=0.3).write(tmp_path / "int8.onnx")
    assert (tmp_path / "int8.onnx").exists()


def test_four_bits_are_asked_too(made, tmp_path, monkeypatch):
    path, data = made(10.0)
    FourBits(path, data, Baked(), max_drop=50.0, dense=0.3).write(tmp_path / "int4.onnx")
    monkeypatch.setattr(_allowed, "NATS", -1.0)
    with pytest.raises(ExportError, match="with fewer bits the NLL"):
        FourBits(path, data, Baked(), max_drop=50.0, dense=0.3).write(tmp_path / "other.onnx")
    assert not (tmp_path / "other.onnx").exists()
    plain = Data(train=data.train, validation=data.validation, test=data.test, task="regression", outputs=1)
    FourBits(path, plain, Baked()).check_deviations(tmp_path / "int4.onnx", "fewer bits")  # has none
