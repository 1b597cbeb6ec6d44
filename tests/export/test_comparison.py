"""What a file is compared with PyTorch on, and by which measure: a file of another model must never pass."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

import svdcompress as svdc
from svdcompress.errors import ExportError
from svdcompress.export import _parity, check_parity, export_onnx


class Root(nn.Module):
    """Returns NaN for values below 0."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(40, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.b(torch.relu(self.a(torch.sqrt(x))))


class Small(nn.Module):
    """Outputs with a small scale."""

    def __init__(self, unit: float) -> None:
        super().__init__()
        self.a, self.b, self.unit = nn.Linear(5, 16), nn.Linear(16, 1), unit

    def forward(self, x):
        return self.b(torch.relu(self.a(x))) * self.unit


class Cancels(nn.Module):
    """Outputs that are small differences of much larger numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(300, 400), nn.Linear(400, 1)

    def forward(self, x):
        y = self.b(torch.relu(self.a(x)) + 30)
        return y - self.b((torch.relu(self.a(x.flip(0).flip(0))) + 30) * (1 - 1e-6))


def root(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return svdc.convert(Root(), log_sigma2=-4.0).eval()


def test_a_model_that_answers_noise_with_nan_is_compared_on_what_it_can_answer(tmp_path):
    model, other = root(0), root(1)
    x = torch.rand(4, 40) * (torch.rand(4, 40) > 0.5)
    file = export_onnx(model, tmp_path / "m.onnx", x)
    assert file.parity is not None and file.parity < 1e-5 and check_parity(file.path, model, x) < 1e-5
    with pytest.raises(ExportError, match="differs from PyTorch"):
        check_parity(file.path, other, x)
    with pytest.raises(ExportError, match="differs from PyTorch"):
        check_parity(file.path, other, -x)  # the values of a table without their signs


@pytest.mark.slow
def test_the_monte_carlo_file_of_such_a_model_is_written(tmp_path):
    x = torch.rand(4, 40)
    file = export_onnx(root(0), tmp_path / "mc.onnx", x, monte_carlo=True)
    assert file.parity is not None and file.parity < 1e-5


def test_where_pytorch_has_no_finite_number_nothing_was_compared(tmp_path):
    class Never(nn.Linear):
        def forward(self, x):
            return super().forward(x) * float("nan")

    with pytest.raises(ExportError, match="no finite number in PyTorch"):
        export_onnx(Never(3, 2), tmp_path / "m.onnx", torch.zeros(2, 3))
    nothing = np.full((2, 2), np.inf, np.float32)
    with pytest.raises(ExportError, match="no finite number"):
        _parity.difference("output", nothing, nothing, "at batch 2")
    some = np.array([[1, np.nan], [np.inf, 2]], np.float32)
    assert _parity.difference("output", some, some, "at batch 2") == 0
    with pytest.raises(ExportError, match="differs"):
        _parity.difference("output", np.array([[1, np.nan], [np.inf, np.nan]], np.float32), some, "at batch 2")


def test_outputs_in_small_units_are_measured_by_their_own_size(tmp_path):
    torch.manual_seed(0)
    one, two = (svdc.convert(Small(2e-9), log_sigma2=-6.0).eval() for _ in range(2))
    x = torch.randn(4, 5)
    file = export_onnx(one, tmp_path / "s.onnx", x, task="regression")
    assert check_parity(file.path, one, x) < 1e-14
    with pytest.raises(ExportError, match="differs from PyTorch"):
        check_parity(file.path, two, x)
    draws = export_onnx(one, tmp_path / "mc.onnx", x, task="regression", monte_carlo=True)
    assert draws.parity is not None and draws.parity < 1e-14


def test_outputs_that_large_numbers_leave_are_as_exact_as_those(tmp_path):
    torch.manual_seed(0)
    model, x = Cancels().eval(), torch.randn(4, 300)
    with torch.no_grad():
        exact = model.double()(x.double())
        off = (model.float()(x) - exact).abs().max() / exact.abs().max()
    assert off > 20 * _parity.TOLERANCE  # PyTorch itself is off by more than the tolerance
    assert export_onnx(model, tmp_path / "m.onnx", x).parity is not None


@pytest.mark.parametrize("monte_carlo", [False, True])
def test_an_output_with_an_inputs_name(tmp_path, monte_carlo):
    class Echo(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(6, 3)

        def forward(self, x, mask):
            hidden = x * mask
            return {"logits": self.a(hidden), "x": hidden, "x_": hidden + 1}

    model = svdc.convert(Echo(), log_sigma2=-4.0).eval()
    inputs = {"x": torch.randn(3, 6), "mask": torch.rand(3, 6)}
    file = export_onnx(model, tmp_path / "m.onnx", inputs, monte_carlo=monte_carlo)
    assert file.inputs[:2] == ["x", "mask"]
    if not monte_carlo:
        assert file.outputs == ["output", "x_", "x__"]
        session = onnxruntime.InferenceSession(str(file.path))
        got = session.run(["x_", "x__"], {name: value.numpy() for name, value in inputs.items()})
        hidden = (inputs["x"] * inputs["mask"]).numpy()
        assert np.array_equal(got[0], hidden) and np.array_equal(got[1], hidden + 1)


def test_an_input_with_the_name_of_a_monte_carlo_files_output(tmp_path):
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(6, 3)

        def forward(self, x, variance):
            return self.a(x * variance)

    model = svdc.convert(Named(), log_sigma2=-4.0).eval()
    inputs = {"x": torch.randn(3, 6), "variance": torch.rand(3, 6)}
    with pytest.raises(ExportError, match="an input named 'variance', a name that the file needs for its own output"):
        export_onnx(model, tmp_path / "m.onnx", inputs, monte_carlo=True)
