"""Monte-Carlo files that draw their noise: statistics, independence, and use with onnxruntime alone."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import export_zoo as zoo
import numpy as np
import pytest
import torch
from export_run import run, session
from torch import nn

import svdcompress as svdc
from svdcompress.export import export_onnx
from svdcompress.uncertainty import mc_predict

BATCHES = (1, 2, 7)  # none of them is the traced size


@pytest.fixture(scope="module")
def drawing(tmp_path_factory) -> Path:
    """The MLP, drawing its noise itself."""
    path = tmp_path_factory.mktemp("drawing") / "mc.onnx"
    model = zoo.mlp().train()
    with svdc.sampling(model):
        exported = export_onnx(model, path, torch.zeros(2, 6), monte_carlo=True, parts=True, metadata={"note": "x"})
    assert model.training and exported.inputs == ["input", "samples", "seed"] and exported.parity < 1e-5
    assert [file.name for file in path.parent.iterdir()] == ["mc.onnx"]
    assert b".py" not in path.read_bytes() and exported.metadata["note"] == "x"
    return path


def test_statistics_are_those_of_pytorch(drawing):
    torch.manual_seed(1)
    x, samples = torch.randn(7, 6), 20_000
    got = run(session(drawing), samples, input=x.numpy())
    expected = mc_predict(zoo.mlp(), x, samples)
    error = np.sqrt(2 * expected.epistemic.numpy() / samples)  # of the difference of two means
    z = (got["mean"] - expected.mean.numpy()) / error
    assert np.abs(z).max() < 4.5 and 0.5 < np.sqrt((z**2).mean()) < 1.7
    for ours, theirs in (("epistemic", "epistemic"), ("aleatoric", "aleatoric"), ("mutual_information", "mutual_information")):
        assert np.abs(got[ours] / getattr(expected, theirs).numpy() - 1).max() < 0.1
    assert np.allclose(got["variance"], got["aleatoric"] + got["epistemic"], atol=1e-6)
    assert np.allclose(got["predictive_entropy"] - got["expected_entropy"], got["mutual_information"], atol=1e-6)


def test_one_sample_and_any_batch(drawing):
    at = session(drawing)
    for batch in BATCHES:
        got = run(at, 1, input=np.ones((batch, 6), np.float32))
        assert got["mean"].shape == (batch, 3) and got["predictive_entropy"].shape == (batch,)
        assert not got["epistemic"].any() and np.abs(got["mutual_information"]).max() < 1e-12
        assert np.allclose(got["mean"].sum(1), 1)


@pytest.mark.parametrize(
    ("samples", "rows", "text"),
    [
        (np.array(0), 2, "samples_must_be_1_or_more"),
        (np.array(-5), 2, "samples_must_be_1_or_more"),
        (np.array(-(2**63)), 2, "samples_must_be_1_or_more"),
        (np.array(2**31), 2, "samples_must_be_below_2_to_the_31"),
        (np.array(2**63 - 1), 2, "samples_must_be_below_2_to_the_31"),
        (np.array([3, 4]), 2, "samples_must_be_one_number"),
        (np.array([], np.int64), 2, "samples_must_be_one_number"),
        (np.array(3.5), 2, "expected: .tensor.int64"),
        (np.array(3), 0, "batch_must_be_1_or_more"),
    ],
)
def test_bad_inputs_say_so(drawing, samples, rows, text):
    with pytest.raises(Exception, match=text):
        session(drawing).run(None, {"input": np.zeros((rows, 6), np.float32), "samples": samples})


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_inputs_that_are_not_finite_say_so(drawing, bad):
    x = np.ones((3, 6), np.float32)
    x[1, 2] = bad
    with pytest.raises(Exception, match="input_must_be_finite"):
        run(session(drawing), 5, input=x)
    x[1, 2] = 3e18
    assert all(np.isfinite(value).all() for value in run(session(drawing), 5, input=x).values())


@pytest.mark.parametrize("large", [1e30, -3e38])
@pytest.mark.parametrize("samples", [1, 5, 2000])
def test_outputs_that_are_not_finite_say_so(drawing, large, samples):
    x = np.ones((3, 6), np.float32)
    x[1, 2] = large  # finite, but the variance uses its square, which is not
    seed = np.array(1)  # a single draw may be below 0 in every hidden unit; the outputs are then finite
    with pytest.raises(Exception, match="outputs_must_be_finite"):
        run(session(drawing), samples, input=x, seed=seed)
    with pytest.raises(Exception, match="outputs_must_be_finite"):  # whichever outputs are requested
        session(drawing).run(["expected_entropy"], {"input": x, "samples": np.array(samples), "seed": seed})


def test_one_number_in_an_array_will_do(drawing):
    x = np.ones((3, 6), np.float32)
    scalar = run(session(drawing), 5, input=x, seed=np.array(1))
    array = session(drawing).run(["mean"], {"input": x, "samples": np.array([5]), "seed": np.array([1])})[0]
    assert np.array_equal(array, scalar["mean"])


def test_each_floating_input_has_to_be_finite(tmp_path):
    path = tmp_path / "mc.onnx"
    export_onnx(
        zoo.varied(Pooled()), path, (torch.ones(2, 6), torch.ones(2, 6), torch.ones(2, dtype=torch.long)), monte_carlo=True
    )
    feeds = {"x": np.ones((2, 6), np.float32), "y": np.ones((2, 6), np.float32), "k": np.ones(2, np.int64)}
    run(session(path), 5, **feeds)
    feeds["y"][1, 4] = np.nan
    with pytest.raises(Exception, match="y_must_be_finite"):
        run(session(path), 5, **feeds)


class Pooled(nn.Module):
    """Several inputs, and a maximum that could hide a NaN."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head, self.table = nn.Linear(3, 3), nn.Embedding(4, 3)

    def forward(self, x, y, k):
        return self.head(nn.functional.max_pool1d((x + y)[:, None], 2)[:, 0]) + self.table(k)


class Noise(nn.Module):
    """Two layers whose outputs are their noise."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(1, 4), nn.Linear(1, 4)

    def forward(self, x):
        return torch.cat([self.one(x), self.two(x)], 1)


def test_noise_of_layers_rows_and_runs_is_independent(tmp_path):
    model = svdc.convert(Noise(), log_sigma2=0.0)
    for layer in (model.one, model.two):
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
        layer.mask = torch.ones(4, 1, dtype=torch.bool)
    path = export_onnx(model, tmp_path / "mc.onnx", torch.ones(2, 1), monte_carlo=True, task="regression").path
    at, runs = session(path), 4000
    x = np.ones((2, 1), np.float32)
    noise = np.stack([run(at, 1, input=x)["mean"].ravel() for _ in range(runs)])  # (runs, rows * layers * units)
    assert np.abs(noise.mean(0)).max() * np.sqrt(runs) < 4.5
    assert np.abs(noise.var(0) - 1).max() * np.sqrt(runs / 2) < 4.5
    assert abs((noise**4).mean() - 3) < 0.15
    for values in (noise, noise**2):
        between = np.corrcoef(values.T)[np.triu_indices(16, 1)]
        assert np.abs(between).max() * np.sqrt(runs) < 5
        later = np.corrcoef(values[1:].T, values[:-1].T)[:16, 16:]
        assert np.abs(later).max() * np.sqrt(runs) < 5
    first = np.stack([run(session(path), 1, input=x)["mean"].ravel() for _ in range(3)])
    assert len(np.unique(first)) == 48  # sessions in one process differ too
    draws = run(at, 20_000, input=x)
    assert np.abs(draws["mean"]).max() * np.sqrt(20_000) < 4.5 and np.abs(draws["variance"] - 1).max() * 100 < 4.5


ALONE = """
    import sys
    import numpy as np, onnxruntime
    path, samples, batch = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    at = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    x = np.ones((batch, 6), np.float32)
    for _ in range(2):
        mean = at.run(["mean"], {"input": x, "samples": np.array(samples)})[0]
        print(mean[0, 0])
    assert not [name for name in sys.modules if name.split(".")[0] in ("torch", "svdcompress", "onnx")]
    status = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
    print(status["VmHWM"].split()[0])  # getrusage would count the parent that this process was forked from
"""


def alone(path: Path, samples: int, batch: int) -> tuple[list[float], int]:
    """The means of two runs in a process with onnxruntime alone, and its peak memory in KiB."""
    command = [sys.executable, "-c", textwrap.dedent(ALONE), str(path), str(samples), str(batch)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    *means, memory = result.stdout.split()
    return [float(mean) for mean in means], int(memory)


def test_onnxruntime_alone_is_enough_and_memory_does_not_grow_with_samples(drawing):
    few, little = alone(drawing, 10, 256)
    many, much = alone(drawing, 2000, 256)
    assert len({*few, *many}) == 4  # runs and processes differ
    assert much - little < 8 * 1024
