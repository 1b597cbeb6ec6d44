"""Running out of memory is reported as such, with what to lower, wherever memory is requested."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import svdcompress as svdc
from svdcompress.cli import app
from svdcompress.errors import ModelError, out_of_memory
from svdcompress.evaluation import _evaluate
from svdcompress.sources._transforms import _named

HUGE = 2**48


def command(*args):
    return CliRunner().invoke(app, [str(arg) for arg in args], env={"COLUMNS": "160"})


def test_what_torch_onnxruntime_and_python_say_of_it():
    with pytest.raises(RuntimeError) as by_torch:
        torch.empty(HUGE)
    assert out_of_memory(by_torch.value) and out_of_memory(MemoryError())
    assert out_of_memory(torch.OutOfMemoryError("anything"))
    foreign = type("RuntimeException", (Exception,), {"__module__": "onnxruntime.capi"})
    assert out_of_memory(foreign("bfc_arena.cc: Failed to allocate memory for requested buffer of size 9"))
    assert not out_of_memory(foreign("Got invalid dimensions")) and not out_of_memory(RuntimeError("mat1 and mat2 shapes"))
    assert not out_of_memory(ValueError("out of memory, says a user's own check"))


class Hungry(nn.Module):
    def forward(self, x):
        return x + torch.empty(HUGE)


@pytest.mark.parametrize("method", ["sampling", "moments"])
def test_it_is_not_called_an_input_that_does_not_fit(method):
    model = nn.Sequential(svdc.convert(nn.Linear(3, 2)), Hungry())
    with pytest.raises(RuntimeError, match="memory"):
        svdc.mc_predict(model, torch.zeros(2, 3), 4, method=method)
    with pytest.raises(RuntimeError, match="memory"):
        _named("mine", lambda x: torch.empty(HUGE), "data.transform")(torch.zeros(2, 3))


def test_evaluate_says_what_to_lower(tiny_run, monkeypatch, tmp_path):
    sizes = []

    def hungry(dense, sparse, test, validation, **more):
        sizes.extend(len(x) for x, _ in test())
        torch.empty(HUGE)

    monkeypatch.setattr(_evaluate, "compare", hungry)
    result = command("evaluate", tiny_run[0], "--out", tmp_path / "e", "--batch", 25, "--no-magnitude")
    assert result.exit_code == ModelError.exit_code
    assert "out of memory: lower --batch (here 25), or use another --device" in " ".join(result.output.split())
    assert sizes == [25, 25, 10]


def test_bench_says_what_to_lower(tiny_run, monkeypatch):
    result = command("bench", tiny_run[0], "--batch", 1, "--batch", 10**12)
    assert result.exit_code == ModelError.exit_code
    assert "out of memory: lower --batch (here 1, 1000000000000)" in " ".join(result.output.split())
    from svdcompress import cost

    monkeypatch.setattr(cost, "latencies", lambda *args, **more: torch.empty(HUGE))
    assert "out of memory: lower --batch (here 7)" in " ".join(command("bench", tiny_run[0], "--batch", 7).output.split())


def test_other_commands_say_so_too(tiny_run, monkeypatch):
    from svdcompress import pipeline

    monkeypatch.setattr(pipeline, "verify_run", lambda *args, **more: torch.empty(HUGE))
    result = command("verify", tiny_run[0])
    assert result.exit_code == ModelError.exit_code and "error: out of memory" in result.output
