"""The cost of a hundred samples in PyTorch: `mc_predict` on a compressed LeNet-300-100, over one pass of the dense one.

    python benchmarks/sampling.py [--rounds 25]

On one thread and in one process, in turns in each round; medians over the rounds, of wall-clock time and of the thread's own
CPU time (which other work on the machine disturbs less). In each turn a function is called once untimed and then for about 20
ms, so that the dense pass, which all others are compared with, is not measured with cold caches. Weights are random: the cost
does not depend on them. Results go to benchmarks/results/sampling.json and sampling.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import svdcompress as svdc
from svdcompress.uncertainty import mc_predict

RESULTS = Path(__file__).resolve().parent / "results"
DENSE = (784, 300, 100, 10)
COMPRESSED = ((784, 40, 20, 10), (200, 40, 30, 10))
BATCH, SAMPLES, GOAL = 64, 100, 15
MANY = 10_000
TURN = 0.02
"""CPU seconds for which a function is repeated in each turn, if one call takes less."""


def network(widths: tuple[int, ...]) -> nn.Sequential:
    """Fully connected layers with ReLU between them, in `eval()`."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1]).eval()


def variational(widths: tuple[int, ...]) -> nn.Module:
    """The same with Gaussian weights, all of them relevant."""
    model = svdc.convert(network(widths), log_sigma2=-8.0)
    for layer in model:
        if isinstance(layer, nn.Linear):
            layer.mask = torch.ones_like(layer.weight, dtype=torch.bool)
    return model


def naive(model: nn.Module, x: Tensor) -> Callable[[], Any]:
    """A loop of separate passes, and the mean of their softmax."""

    def run() -> Tensor:
        with torch.no_grad(), svdc.sampling(model):
            return torch.stack([model(x).softmax(1) for _ in range(SAMPLES)]).mean(0)

    return run


def works() -> dict[str, Callable[[], Any]]:
    """The functions that are measured, by name; "dense" first."""
    torch.manual_seed(0)
    dense, wide = network(DENSE), variational(DENSE)
    inputs = torch.randn(BATCH, DENSE[0])

    def dense_pass() -> Tensor:
        with torch.no_grad():
            return dense(inputs)

    found: dict[str, Callable[[], Any]] = {"dense, one pass": dense_pass}
    found["dense shape, separate passes"] = naive(wide, inputs)
    for widths in COMPRESSED:
        model, x, name = variational(widths), torch.randn(BATCH, widths[0]), "-".join(map(str, widths))
        found[f"{name}, separate passes"] = naive(model, x)
        found[f"{name}, mc_predict"] = lambda m=model, x=x: mc_predict(m, x, SAMPLES)
        found[f"{name}, antithetic"] = lambda m=model, x=x: mc_predict(m, x, SAMPLES, antithetic=True)
        found[f"{name}, members"] = lambda m=model, x=x: mc_predict(m, x, SAMPLES, members=True)
        found[f"{name}, moments"] = lambda m=model, x=x: mc_predict(m, x, SAMPLES, method="moments")
        noise = BATCH * SAMPLES * sum(widths[1:])
        found[f"{name}, its noise alone"] = lambda n=noise: torch.randn(n)
    return found


def measure(rounds: int) -> dict[str, dict[str, float]]:
    """Median milliseconds of each function, wall-clock and CPU, and their ratios to the first one's; all take turns."""
    found = works()
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in found}
    times = dict.fromkeys(found, 1)
    for index in range(rounds + 2):
        for name, work in found.items():
            work()
            wall, cpu = time.perf_counter(), time.thread_time()
            for _ in range(times[name]):
                work()
            wall, cpu = (time.perf_counter() - wall) / times[name], (time.thread_time() - cpu) / times[name]
            if index > 1:
                spent[name].append((wall, cpu))
            else:  # the first rounds warm up
                times[name] = max(1, round(TURN / max(cpu, 1e-6)))
    rows = {}
    for name, pairs in spent.items():
        wall, cpu = (1e3 * statistics.median(part) for part in zip(*pairs, strict=True))
        rows[name] = {"wall_ms": wall, "cpu_ms": cpu}
    first = rows["dense, one pass"]
    for row in rows.values():
        row |= {"wall_ratio": row["wall_ms"] / first["wall_ms"], "cpu_ratio": row["cpu_ms"] / first["cpu_ms"]}
    return rows


def convolutional() -> nn.Module:
    """Convolutions, BatchNorm, pooling and a Linear layer, all weights relevant; for inputs (B, 1, 28, 28)."""
    layers = [
        nn.Conv2d(1, 5, 5),
        nn.BatchNorm2d(5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(5, 10, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
    ]
    model = svdc.convert(nn.Sequential(*layers, nn.Flatten(), nn.Linear(160, 10)).eval(), log_sigma2=-7.0)
    for layer in model:
        if hasattr(layer, "log_sigma2"):
            layer.mask = torch.ones_like(layer.weight, dtype=torch.bool)
    return model


def deviations() -> dict[str, dict[str, float]]:
    """How one pass of moments differs from 10,000 samples: for the logits, the largest difference of a mean, in standard
    deviations, and the ratio of the standard deviations (least, most); for the probabilities, the largest difference; for the
    mutual information, the ratio over all inputs."""
    torch.manual_seed(0)
    models = {"-".join(map(str, widths)): (variational(widths), torch.randn(BATCH, widths[0])) for widths in COMPRESSED}
    models["two convolutions"] = (convolutional(), torch.randn(BATCH, 1, 28, 28))
    found = {}
    for name, (model, x) in models.items():
        ways: Any = ({"method": "moments"}, {"local": True})  # both treat positions separately
        logits, drawn = (mc_predict(model, x, MANY, task="regression", **way) for way in ways)
        p, q = (mc_predict(model, x, MANY, **way) for way in ways)
        ratio = logits.std / drawn.std
        found[name] = {
            "mean_in_std": float(((logits.mean - drawn.mean).abs() / drawn.std).max()),
            "std_ratio_least": float(ratio.min()),
            "std_ratio_most": float(ratio.max()),
            "probability": float((p.mean - q.mean).abs().max()),
            "information_ratio": float(p.mutual_information.sum() / q.mutual_information.sum()),
        }
    return found


def machine() -> dict[str, Any]:
    """CPU model, number of cores and their load."""
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "cpu": names[0].partition(":")[2].strip() if names else platform.processor(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "threads": 1,
    }


def table(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    lines = [
        f"# {SAMPLES} samples at batch {BATCH}, over one pass of the dense {'-'.join(map(str, DENSE))}",
        "",
        f"{results['machine']['cpu']}, {results['machine']['cores']} cores, one thread, load {results['machine']['load']}; "
        f"torch {results['versions']['torch']}; medians of {results['rounds']} rounds. Goal: {GOAL}x or less.",
        "",
        "| work | wall ms | CPU ms | over dense (wall) | over dense (CPU) |",
        "|---|---|---|---|---|",
    ]
    for name, row in results["rows"].items():
        figures = f"{row['wall_ms']:.2f} | {row['cpu_ms']:.2f} | {row['wall_ratio']:.1f}x | {row['cpu_ratio']:.1f}x"
        lines.append(f"| {name} | {figures} |")
    lines += ["", f"Moments against {MANY:,} samples (random weights, {BATCH} inputs):", ""]
    lines += [
        "| network | logits: mean off by, in std | std, over that of the samples | probability off by | mutual information |"
    ]
    lines += ["|---|---|---|---|---|"]
    for name, row in results["moments"].items():
        spread = f"{row['std_ratio_least']:.3f} to {row['std_ratio_most']:.3f}"
        figures = f"{row['mean_in_std']:.3f} | {spread} | {row['probability']:.4f} | {row['information_ratio']:.3f}x |"
        lines.append(f"| {name} | {figures}")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    results = {
        "machine": machine(),
        "versions": {"torch": torch.__version__, "svdcompress": svdc.__version__, "python": platform.python_version()},
        "rounds": rounds,
        "rows": measure(rounds),
        "moments": deviations(),
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "sampling.json").write_text(json.dumps(results, indent=1) + "\n")
    (RESULTS / "sampling.md").write_text(table(results))
    print(table(results))


if __name__ == "__main__":
    main()
