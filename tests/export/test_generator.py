"""The noise that a Monte-Carlo file generates itself: its seed and its distribution."""

from __future__ import annotations

import math
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from export_run import run, session
from torch import nn

import svdcompress as svdc
from svdcompress.errors import ExportError
from svdcompress.export import export_onnx

UNITS = 20
WORD = np.uint64


def by_hand(seed: int, count: int, rounds: int) -> np.ndarray:
    """The file's generator in NumPy: (rounds, count) normal numbers, as in docs/onnx.md."""
    with np.errstate(over="ignore"):
        half = -(-count // 256)
        z = np.arange(2 * half + 129, dtype=WORD) * WORD(0x9E3779B97F4A7C15)
        z = z + np.array(seed, np.int64).astype(WORD) * WORD(0xD1342543DE82EF95)
        z = (z ^ (z >> WORD(30))) * WORD(0xBF58476D1CE4E5B9)
        z = 2 * (z ^ (z >> WORD(27))) * WORD(0x94D049BB133111EB) + WORD(1)
        down, across, state = z[: 2 * half, None], z[None, 2 * half : -1], z[-1]
        result = np.empty((rounds, 512 * half // 2), np.float32)
        for row in result:
            uniform = (down * state * across).astype(np.int64).astype(np.float32) * np.float32(2.0**-63)
            radius, angle = np.sqrt(-2 * np.log(np.abs(uniform[:half]))), uniform[half:] * np.float32(math.pi)
            row[:] = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)]).ravel()
            state = state * WORD(0xF1357AEA2E62A9C5)
        return result[:, :count]


@pytest.fixture(scope="module")
def noise_file(tmp_path_factory) -> Path:
    """A layer whose outputs are its noise."""
    model = svdc.convert(nn.Sequential(nn.Linear(1, UNITS)), log_sigma2=0.0)
    nn.init.zeros_(model[0].weight)
    nn.init.zeros_(model[0].bias)
    model[0].mask = torch.ones(UNITS, 1, dtype=torch.bool)
    path = tmp_path_factory.mktemp("noise") / "mc.onnx"
    exported = export_onnx(model, path, torch.ones(2, 1), monte_carlo=True, task="regression", verify=False)
    assert exported.inputs == ["input", "samples", "seed"]
    return path


@pytest.fixture(scope="module")
def at(noise_file) -> onnxruntime.InferenceSession:
    return session(noise_file)


def draw(at: onnxruntime.InferenceSession, seed: int | None = None, rows: int = 1, samples: int = 1) -> np.ndarray:
    more = {} if seed is None else {"seed": np.array(seed)}
    return run(at, samples, input=np.ones((rows, 1), np.float32), **more)["mean"]


@pytest.mark.parametrize("seed", [0, 1, 2**62 + 12345, 2**63 - 1])
@pytest.mark.parametrize("rows", [1, 50])
def test_the_same_numbers_elsewhere(at, seed, rows):
    expected = by_hand(seed, UNITS * rows, 1).reshape(rows, UNITS)
    assert np.abs(draw(at, seed, rows) - expected).max() < 2e-6


def test_rounds_go_on(at):
    rows = 2000  # one draw per round: its 40,000 numbers exceed half the capacity of a round
    expected = by_hand(9, UNITS * rows, 5).mean(0).reshape(rows, UNITS)
    assert np.abs(draw(at, 9, rows, samples=5) - expected).max() < 2e-6


def test_the_seed_is_an_optional_input(noise_file, at):
    assert [value.name for value in at.get_inputs()] == ["input", "samples"]
    assert [value.name for value in at.get_overridable_initializers()] == ["seed"]
    assert [value.name for value in onnx.load(noise_file).graph.input] == ["input", "samples", "seed"]
    assert np.array_equal(draw(at, 5), run(at, 1, input=np.ones((1, 1), np.float32), seed=np.array([5]))["mean"])
    with pytest.raises(Exception, match="seed_must_be_one_number"):
        run(at, 1, input=np.ones((1, 1), np.float32), seed=np.array([5, 6]))


def test_a_seed_replays_and_none_differs_in_sessions_and_threads(noise_file):
    sessions = [session(noise_file) for _ in range(4)]
    with ThreadPoolExecutor(8) as pool:
        seeded = list(pool.map(lambda k: draw(sessions[k % 4], 7).tobytes(), range(40)))
        fresh = list(pool.map(lambda k: draw(sessions[k % 4]).tobytes(), range(400)))
        below = list(pool.map(lambda k: draw(sessions[k % 4], -5).tobytes(), range(40)))
    others = [draw(sessions[0], seed).tobytes() for seed in range(100)]
    assert len(set(seeded)) == 1
    assert len({*fresh, *below, *others}) == 540 and others[7] == seeded[0]


ALONE = """
import sys
import numpy as np, onnxruntime
at = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
for more in ({}, {}, {"seed": np.array(7)}):
    print(at.run(["mean"], {"input": np.ones((1, 1), np.float32), "samples": np.array(1), **more})[0].tobytes().hex())
"""


def test_a_seed_replays_and_none_differs_in_processes(noise_file, at):
    command = [sys.executable, "-c", ALONE, str(noise_file)]
    printed = [subprocess.run(command, check=True, capture_output=True, text=True).stdout.split() for _ in range(3)]
    assert {lines[2] for lines in printed} == {draw(at, 7).tobytes().hex()}
    assert len({line for lines in printed for line in lines[:2]}) == 6


@pytest.mark.parametrize("seeded", [True, False])
def test_calls_are_independent(at, seeded):
    """Neighboring seeds, and random ones."""
    calls = 3000
    noise = np.stack([draw(at, seed if seeded else None, rows=2).ravel() for seed in range(calls)])
    look_at(noise)


@pytest.mark.parametrize("seed", [0, 1])
def test_rounds_and_places_are_independent(seed):
    look_at(by_hand(seed, 300, 6000))


def look_at(noise: np.ndarray) -> None:
    """Moments at each place, and correlations between places, with the next row and with distant rows."""
    noise, rows = noise.astype(np.float64), len(noise)
    assert np.abs(noise.mean(0)).max() * np.sqrt(rows) < 4.8
    assert np.abs(noise.var(0) - 1).max() * np.sqrt(rows / 2) < 4.8
    assert abs((noise**3).mean()) * np.sqrt(noise.size / 15) < 4
    assert abs((noise**4).mean() - 3) * np.sqrt(noise.size / 96) < 4
    for total, size in ((noise.sum(1), noise.shape[1]), ((noise**2).sum(1), 2 * noise.shape[1])):
        assert abs(total.var() / size - 1) * np.sqrt(rows / 2) < 5
    order = np.sort(noise.ravel())
    normal = 0.5 * (1 + torch.erf(torch.from_numpy(order) / math.sqrt(2)).numpy())
    assert np.abs(normal - np.arange(order.size) / order.size).max() * np.sqrt(order.size) < 2.2  # Kolmogorov
    for values in (noise, noise**2, np.abs(noise)):
        values = (values - values.mean(0)) / values.std(0)
        between = (values.T @ values / rows)[np.triu_indices(values.shape[1], 1)]
        assert 0.9 < np.sqrt((between**2).mean() * rows) < 1.1 and np.abs(between).max() * np.sqrt(rows) < 5.8
        for lag in (1, 2, 7, 64):
            later = values[lag:].T @ values[:-lag] / (rows - lag)
            assert 0.9 < np.sqrt((later**2).mean() * (rows - lag)) < 1.1
            assert np.abs(later).max() * np.sqrt(rows - lag) < 5.8


def test_corners_of_the_table_are_independent():
    """Numbers are products of a row's, a column's and a round's number: four corners of a rectangle would reveal this."""
    table = by_hand(3, 1024, 3000).astype(np.float64).reshape(3000, 8, 128)
    pick = np.random.default_rng(0)
    z = []
    for _ in range(500):
        (i, k), (j, m) = pick.choice(8, 2, replace=False), pick.choice(128, 2, replace=False)
        corners = table[:, i, j] * table[:, k, m] * table[:, i, m] * table[:, k, j]
        z.append(corners.mean() * np.sqrt(3000))
    assert np.abs(z).max() < 4.8 and 0.9 < np.std(z) < 1.1


def test_another_runtime(tmp_path):
    """onnx's reference evaluator, slow and independent of onnxruntime, draws the same with a seed."""
    from onnx.reference import ReferenceEvaluator

    torch.manual_seed(0)
    model = svdc.convert(nn.Sequential(nn.Conv1d(2, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(9, 2)), log_sigma2=-2.0).eval()
    options = {"monte_carlo": True, "noise": "seed", "verify": False}
    path = export_onnx(model, tmp_path / "mc.onnx", torch.zeros(2, 2, 4), **options).path
    feeds = {"input": np.ones((2, 2, 4), np.float32), "samples": np.array(6), "seed": np.array(3)}
    assert [value.name for value in session(path).get_inputs()] == list(feeds)  # here it is required
    with np.errstate(all="ignore"):
        theirs = ReferenceEvaluator(str(path)).run(None, feeds)
    for ours, other in zip(session(path).run(None, feeds), theirs, strict=True):
        np.testing.assert_allclose(ours, other, atol=1e-6)


def test_an_input_named_seed_is_refused(tmp_path):
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 3)

        def forward(self, seed):
            return self.linear(seed)

    model = svdc.convert(Named())
    with pytest.raises(ExportError, match="input named 'seed'"):
        export_onnx(model, tmp_path / "mc.onnx", {"seed": torch.zeros(2, 6)}, monte_carlo=True)
