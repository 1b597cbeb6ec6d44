"""The cost of the Monte-Carlo file: 100 samples of a compressed LeNet-300-100 in onnxruntime, compared with what it replaces.

    python benchmarks/onnx_mc.py [--rounds 15]

A compressed LeNet-5, whose convolutions have their weights drawn, is measured too. All runs on one thread and in one process,
in turn in each round; figures are medians over the rounds, of wall-clock time and of the process's own CPU time (which other
work on the machine disturbs less). Weights are random: the cost does not depend on them. Memory is the peak of a process that
loads onnxruntime alone (Linux). Results go to benchmarks/results/onnx_mc.json and .md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from torch import Tensor, nn

import svdcompress as svdc

RESULTS = Path(__file__).resolve().parent / "results"
DENSE, SMALL = (784, 300, 100, 10), (784, 40, 20, 10)
SAMPLES, BATCHES = 100, (1, 64)
GOAL_TIMES, GOAL_MEGABYTES = 15, 20

MEMORY = """
import sys
import numpy as np, onnxruntime
path, batch, samples, width = sys.argv[1], *map(int, sys.argv[2:])
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 1
session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
feeds = {"input": np.ones((batch, width), np.float32)}
if samples:
    feeds["samples"] = np.array(samples)
for _ in range(3):
    session.run(None, feeds)
status = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
print(status["VmHWM"].split()[0])  # getrusage would count the parent that this process was forked from
"""


def variational(widths: tuple[int, ...]) -> nn.Module:
    """A fully connected network, all of whose weights are relevant."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return _held(nn.Sequential(*layers[:-1]), 1.0)


def lenet(first: int, second: int, hidden: int, share: float) -> nn.Module:
    """A LeNet-5 of these widths, with a share of its weights relevant."""
    convolutions = [nn.Conv2d(1, first, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(first, second, 5), nn.ReLU(), nn.MaxPool2d(2)]
    head = [nn.Flatten(), nn.Linear(16 * second, hidden), nn.ReLU(), nn.Linear(hidden, 10)]
    return _held(nn.Sequential(*convolutions, *head), share)


def _held(model: nn.Module, share: float) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    for layer in svdc.convert(model, log_sigma2=-8.0).modules():
        if hasattr(layer, "log_sigma2"):
            layer.mask = torch.rand(layer.weight.shape, generator=generator) <= share
    return model.eval()


def passes(model: nn.Module, x: Tensor) -> Callable[[], Any]:
    """SAMPLES separate passes in PyTorch."""

    def run() -> None:
        with torch.no_grad(), svdc.sampling(model):
            for _ in range(SAMPLES):
                model(x)

    return run


def runs_of_one(path: Path, x: Tensor) -> Callable[[], Any]:
    """SAMPLES separate runs of one draw each in onnxruntime; averaging them is left to the caller."""
    one = in_onnxruntime(path, x, 1)

    def run() -> None:
        for _ in range(SAMPLES):
            one()

    return run


def in_onnxruntime(path: Path, x: Tensor, samples: int | None) -> Callable[[], Any]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    feeds = {"input": x.numpy()}
    if samples:
        feeds["samples"] = np.array(samples)
    return lambda: session.run(None, feeds)


def medians(works: dict[str, Callable[[], Any]], rounds: int) -> dict[str, dict[str, float]]:
    """Median milliseconds of each function, wall-clock and CPU; all take turns in each round."""
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in works}
    for index in range(rounds + 1):
        for name, work in works.items():
            wall, cpu = time.perf_counter(), time.process_time()
            work()
            if index:  # the first round warms up
                spent[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    return {
        name: {"wall_ms": 1e3 * statistics.median(wall), "cpu_ms": 1e3 * statistics.median(cpu)}
        for name, (wall, cpu) in ((name, zip(*times, strict=True)) for name, times in spent.items())
    }


def peak(path: Path, batch: int, samples: int) -> float:
    """Peak memory in MB of a process that runs the file; the lowest of three measurements."""
    command = [sys.executable, "-c", MEMORY, str(path), str(batch), str(samples), str(DENSE[0])]
    return min(int(subprocess.run(command, check=True, capture_output=True, text=True).stdout) for _ in range(3)) / 1024


def measure(rounds: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dense, small = variational(DENSE), variational(SMALL)
    with tempfile.TemporaryDirectory() as folder:
        names = ("model.onnx", "model_mc.onnx", "large_mc.onnx", "lenet5_mc.onnx", "lenet5_pruned_mc.onnx")
        plain, mc, large, lenet5, pruned = (Path(folder) / name for name in names)
        example, image = torch.randn(2, DENSE[0]), torch.randn(2, 1, 28, 28)
        svdc.export_onnx(lenet(20, 50, 500, 1.0), lenet5, image, monte_carlo=True)
        svdc.export_onnx(lenet(5, 10, 76, 0.3), pruned, image, monte_carlo=True)
        svdc.export_onnx(small, plain, example)
        svdc.export_onnx(small, mc, example, monte_carlo=True)
        svdc.export_onnx(dense, large, example, monte_carlo=True)
        works = {}
        for batch in BATCHES:
            x = torch.randn(batch, DENSE[0])
            works |= {
                f"uncompressed, PyTorch, {SAMPLES} passes, batch {batch}": passes(dense, x),
                f"uncompressed, onnxruntime, {SAMPLES} runs of one sample, batch {batch}": runs_of_one(large, x),
                f"uncompressed, Monte-Carlo file, batch {batch}": in_onnxruntime(large, x, SAMPLES),
                f"compressed, PyTorch, {SAMPLES} passes, batch {batch}": passes(small, x),
                f"compressed, mc_predict, batch {batch}": lambda x=x: svdc.mc_predict(small, x, SAMPLES),
                f"compressed, Monte-Carlo file, batch {batch}": in_onnxruntime(mc, x, SAMPLES),
                f"compressed, deterministic file, batch {batch}": in_onnxruntime(plain, x, None),
                f"compressed LeNet-5, Monte-Carlo file, batch {batch}": in_onnxruntime(pruned, x.view(-1, 1, 28, 28), SAMPLES),
            }
            if batch == 1:  # at 64 it takes seconds
                dense_run = in_onnxruntime(lenet5, x.view(-1, 1, 28, 28), SAMPLES)
                works[f"uncompressed LeNet-5, Monte-Carlo file, batch {batch}"] = dense_run
        times = medians(works, rounds)
        memory = {"deterministic": peak(plain, 64, 0)}
        memory |= {f"Monte-Carlo, {samples} samples": peak(mc, 64, samples) for samples in (SAMPLES, 10_000)}
        sizes = {path.name: path.stat().st_size for path in (plain, mc, large, lenet5, pruned)}
    return {"milliseconds": times, "peak_megabytes": memory, "bytes": sizes}


def machine() -> dict[str, Any]:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    load = [round(value, 1) for value in os.getloadavg()] if hasattr(os, "getloadavg") else None
    return {"cpu": model, "cores": os.cpu_count(), "load": load}


def table(result: dict[str, Any]) -> str:
    """The figures as Markdown."""
    names = ("svdcompress", "torch", "onnxruntime")
    lines = [
        "# Monte-Carlo file: cost",
        "",
        f"{'-'.join(map(str, DENSE))} compressed to {'-'.join(map(str, SMALL))}, {SAMPLES} samples, one thread of "
        f"{result['machine']['cpu']} ({result['machine']['cores']} cores, load {result['machine']['load']}); "
        + ", ".join(f"{name} {result['versions'][name]}" for name in names)
        + f". Medians of {result['rounds']} rounds, turn by turn.",
        "",
        "| work | wall-clock, ms | CPU, ms |",
        "|---|---|---|",
    ]
    lines += [f"| {name} | {spent['wall_ms']:.2f} | {spent['cpu_ms']:.2f} |" for name, spent in result["milliseconds"].items()]
    lines += ["", "| file | peak memory of onnxruntime alone, MB |", "|---|---|"]
    lines += [f"| {name} | {peak:.1f} |" for name, peak in result["peak_megabytes"].items()]
    ratios = result["times_cheaper"]
    return "\n".join(
        [
            *lines,
            "",
            f"At batch 64 the Monte-Carlo file is {ratios['wall']:.1f} times cheaper than {SAMPLES} passes of the uncompressed "
            f"network in PyTorch (CPU time: {ratios['cpu']:.1f}; goal: {GOAL_TIMES}), and "
            f"{result['times_cheaper_than_runs']['wall']:.1f} times cheaper than {SAMPLES} runs of the uncompressed network, a "
            f"sample each, in onnxruntime (CPU time: {result['times_cheaper_than_runs']['cpu']:.1f}). It takes "
            f"{result['more_megabytes']:.1f} MB more than the deterministic file (goal: at most {GOAL_MEGABYTES}).",
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    result = {"machine": machine(), "rounds": rounds, **measure(rounds)}
    packages = ("svdcompress", "torch", "onnx", "onnxruntime", "onnxscript", "numpy")
    result["versions"] = {name: svdc.__version__ if name == "svdcompress" else version(name) for name in packages}
    after = result["milliseconds"]["compressed, Monte-Carlo file, batch 64"]
    for key, way in (("times_cheaper", "PyTorch"), ("times_cheaper_than_runs", "onnxruntime")):
        start = f"uncompressed, {way}, {SAMPLES} "
        rows = result["milliseconds"].items()
        before = next(row for name, row in rows if name.startswith(start) and name.endswith("batch 64"))
        result[key] = {kind: before[f"{kind}_ms"] / after[f"{kind}_ms"] for kind in ("wall", "cpu")}
    memory = result["peak_megabytes"]
    result["more_megabytes"] = memory[f"Monte-Carlo, {SAMPLES} samples"] - memory["deterministic"]
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "onnx_mc.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    (RESULTS / "onnx_mc.md").write_text(table(result), encoding="utf-8")
    print(table(result))


if __name__ == "__main__":
    main()
