"""How a step's time and memory grow with width, depth and batch, and mc_predict's time with samples; ours and dense.

    python benchmarks/growth.py [--only AXIS ...] [--rounds 5] [--again]

On one thread, ours and dense in turns; times are medians of the thread's CPU time. Memory is counted, not sampled: the
parameters, their gradients and Adam's state; what autograd keeps for the backward pass besides the parameters; and the most
that was allocated at once during a step. The exponent of y ~ x^k is fitted in logarithms over the upper half of the points,
where constant costs no longer count. Points are written to benchmarks/results/growth.json, growth.md and growth.png as they
come, and not measured again without --again.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable
from typing import Any

import torch
from speed import RESULTS, Row, keep_freed_memory, machine, mlp, ours, step, timed
from torch import Tensor, nn

import svdcompress as svdc

AXES: dict[str, tuple[int, ...]] = {
    "width": (256, 512, 1024, 2048, 4096, 8192),
    "depth": (1, 2, 4, 8, 16),
    "batch": (16, 64, 256, 1024, 4096),
    "samples": (1, 10, 100, 1000),
}
FIXED = {
    "width": "2 layers, batch 64",
    "depth": "width 512, batch 256",
    "batch": "2 layers of width 512",
    "samples": "mc_predict on LeNet-300-100 over a dense pass, batch 64",
}
QUANTITIES = {
    "ms": "time, ms",
    "state_mb": "parameters, gradients, Adam, MB",
    "kept_mb": "kept for the backward, MB",
    "peak_mb": "most at once in a step, MB",
}


def network(axis: str, size: int) -> tuple[nn.Module, tuple[int, ...]]:
    """The dense network of a point, and the shape of its input."""
    if axis == "width":
        return mlp(size, size, size), (64, size)
    if axis == "depth":
        return mlp(*[512] * (size + 1)), (256, 512)
    if axis == "batch":
        return mlp(512, 512, 512), (size, 512)
    return mlp(784, 300, 100, 10), (64, 784)


def megabytes(tensors: Any) -> float:
    """The size of the storages of tensors in MB, each counted once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values()) / 1e6


def memory(model: nn.Module, x: Tensor, y: Tensor, run: Callable[[], None]) -> dict[str, float]:
    """Megabytes of state, kept for the backward pass, and the most allocated at once beyond what exists between steps."""
    run()
    model.zero_grad()  # so that the measured step frees nothing that is older than it
    parameters = list(model.parameters())
    own = {tensor.untyped_storage().data_ptr() for tensor in (*parameters, x, y)}
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(x)
    activations = megabytes([t for t in kept if t.untyped_storage().data_ptr() not in own] + [x])
    del output
    kept.clear()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    most = level = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        level += event.nbytes()
        most = max(most, level)
    state = megabytes(parameters) * 4  # the gradients and Adam's two moments are of the same size
    return {"state_mb": state, "kept_mb": activations, "peak_mb": most / 1e6}


def training_point(axis: str, size: int, rounds: int) -> dict[str, dict[str, float]]:
    """Time and memory of a step, dense and ours."""
    torch.manual_seed(0)
    dense, shape = network(axis, size)
    row = Row(lambda: dense, shape, 0.0)
    x, y = torch.randn(shape), torch.randint(shape[1], (shape[0],))
    contestants = {"dense": (dense, None), "ours": ours(dense)}
    runs = {name: step(made, x, y, row, compiled=False) for name, made in contestants.items()}
    found = {name: memory(contestants[name][0], x, y, run) for name, run in runs.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(timed(run, "cpu")[0])
    for name, values in times.items():
        found[name]["ms"] = statistics.median(values) * 1e3
    return found


def samples_point(samples: int, rounds: int) -> dict[str, dict[str, float]]:
    """Time of mc_predict, and of one dense pass."""
    torch.manual_seed(0)
    dense, shape = network("samples", samples)
    model, x = svdc.convert(mlp(784, 300, 100, 10)).eval(), torch.randn(shape)

    def one_pass() -> None:
        with torch.no_grad():
            dense(x)

    runs = {"dense": one_pass, "ours": lambda: svdc.mc_predict(model, x, samples=samples)}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds + 1):
        for name, run in runs.items():
            times[name].append(timed(run, "cpu")[0])
    return {name: {"ms": statistics.median(values[1:]) * 1e3} for name, values in times.items()}


def exponent(points: dict[str, Any], who: str, quantity: str) -> float | None:
    """k of y ~ x^k by least squares in logarithms, over the upper half of the points (at least three, if available)."""
    pairs = sorted((int(size), point[who].get(quantity)) for size, point in points.items())
    pairs = [(size, value) for size, value in pairs if value]
    pairs = pairs[-max(3, math.ceil(len(pairs) / 2)) :]
    if len(pairs) < 2:
        return None
    xs, ys = [math.log(size) for size, _ in pairs], [math.log(value) for _, value in pairs]
    x, y = statistics.mean(xs), statistics.mean(ys)
    return sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / sum((a - x) ** 2 for a in xs)


def markdown(results: dict[str, Any]) -> str:
    """The results as Markdown tables."""
    where = results["machine"]
    lines = [
        "# How cost grows",
        "",
        f"{where['cpu']}, {where['cores']} cores, one thread; torch {where['versions']['torch']}. Ours over dense in brackets.",
    ]
    for axis, points in results["axes"].items():
        names = [name for name in QUANTITIES if any(name in point["ours"] for point in points.values())]
        header = " | ".join([axis, *(QUANTITIES[name] for name in names)])
        lines += ["", f"## {axis}: {FIXED[axis]}", "", f"| {header} |", "|---" * (len(names) + 1) + "|"]
        for size, point in sorted(points.items(), key=lambda pair: int(pair[0])):
            cells = [f"{point['ours'][n]:.4g} ({point['ours'][n] / point['dense'][n]:.2f})" for n in names]
            lines.append("| " + " | ".join([size, *cells]) + " |")
        fits = [" / ".join(f"{exponent(points, who, n) or 0:.2f}" for who in ("ours", "dense")) for n in names]
        lines.append("| exponent, ours / dense | " + " | ".join(fits) + " |")
    return "\n".join(lines) + "\n"


def plot(results: dict[str, Any]) -> None:
    """Plot time and memory over each axis, in logarithms."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    axes = results["axes"]
    figure, panels = pyplot.subplots(2, len(axes), figsize=(3.4 * len(axes), 6), squeeze=False)
    for column, (axis, points) in enumerate(axes.items()):
        sizes = sorted(points, key=int)
        for row, (quantity, unit) in enumerate((("ms", "time, ms"), ("peak_mb", "most at once, MB"))):
            panel = panels[row][column]
            for who in ("dense", "ours"):
                known = [size for size in sizes if quantity in points[size][who]]
                panel.loglog([int(size) for size in known], [points[size][who][quantity] for size in known], "o-", label=who)
            panel.set_xlabel(axis, fontsize=8)
            panel.set_title(FIXED[axis], fontsize=7)
            panel.set_ylabel(unit, fontsize=8)
            panel.legend(fontsize=8)
        if not any("peak_mb" in point["ours"] for point in points.values()):
            panels[1][column].set_visible(False)
    figure.tight_layout()
    figure.savefig(RESULTS / "growth.png", dpi=110)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", action="append", choices=list(AXES), help="measure this axis; may be repeated")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--again", action="store_true", help="measure points again that are there already")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    path = RESULTS / "growth.json"
    results = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"axes": {}}
    results["machine"] = machine()
    for axis in options.only or AXES:
        points = results["axes"].setdefault(axis, {})
        for size in AXES[axis]:
            if str(size) in points and not options.again:
                continue
            if axis == "samples":
                points[str(size)] = samples_point(size, options.rounds)
            else:
                points[str(size)] = training_point(axis, size, options.rounds)
            path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
            (RESULTS / "growth.md").write_text(markdown(results), encoding="utf-8")
            print(axis, size, points[str(size)], flush=True)
        plot(results)


if __name__ == "__main__":
    main()
