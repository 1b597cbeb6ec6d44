"""Checkpoints of models with tensors of rarer types: written only if they can be read again."""

import pytest
import torch
from torch import nn

import svdcompress as svdc
from svdcompress.errors import CheckpointError


class Turned(nn.Module):
    """Features times a buffer of a given type."""

    def __init__(self, kind: torch.dtype, value: float = 0.5) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)
        self.register_buffer("turn", torch.full((8,), value).to(kind))

    def forward(self, x):
        turn = self.turn.real if self.turn.is_complex() else self.turn
        return self.last((self.first(x) * turn.float()).relu())


@pytest.mark.parametrize("kind", [torch.complex64, torch.float8_e4m3fn, torch.uint16, torch.float64])
def test_types_that_a_file_holds_are_read_again(tmp_path, kind):
    model = svdc.convert(Turned(kind)).eval()
    svdc.save(model, tmp_path / "model.safetensors")
    again = svdc.load(tmp_path / "model.safetensors", Turned(kind, 0.25)).eval()
    assert again.turn.dtype == kind and torch.equal(again.turn.view(torch.uint8), model.turn.view(torch.uint8))
    x = torch.randn(3, 4)
    assert torch.equal(again(x), model(x))


@pytest.mark.parametrize("kind", [torch.complex64, torch.float8_e4m3fn])
def test_numbers_that_are_not_finite_are_found_in_them(tmp_path, kind):
    svdc.save(svdc.convert(Turned(kind, float("nan"))), tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="turn: holds values that are not finite"):
        svdc.load(tmp_path / "model.safetensors", Turned(kind))


def test_types_of_another_model_are_refused(tmp_path):
    svdc.save(svdc.convert(Turned(torch.complex64)), tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"turn: torch\.complex64"):
        svdc.load(tmp_path / "model.safetensors", Turned(torch.float32))


def test_what_no_file_holds_is_not_written(tmp_path):
    with pytest.raises(CheckpointError, match=r"turn: torch\.complex128, which a safetensors file cannot hold"):
        svdc.save(svdc.convert(Turned(torch.complex128)), tmp_path / "model.safetensors")
    assert list(tmp_path.iterdir()) == []
    x = torch.randn(40, 4)
    for trained in (True, False):
        with pytest.raises(CheckpointError, match=r"turn: torch\.complex128, which a safetensors file cannot hold"):
            svdc.sparsify(Turned(torch.complex128), (x, (x[:, 0] > 0).long()), trained=trained, out=tmp_path / "run")
    assert not list(tmp_path.rglob("*.safetensors")) and not list(tmp_path.rglob("dense.pt"))
