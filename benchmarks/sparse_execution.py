"""Sparse products in PyTorch: when they start to pay off, and what `svdc.to_sparse` makes of finished runs.

    python benchmarks/sparse_execution.py --folder FOLDER_OF_RUNS
    python benchmarks/sparse_execution.py --runs RUN [RUN ...]

One thread, one process. Functions that are compared take turns, call by call; times are lower quartiles of the thread's CPU
time, which other work on the machine disturbs the least, and ratios are quotients of these. `to_sparse` itself decides by
medians of wall-clock time. Single layers have non-zero weights at random places; runs get test examples. Each of a run's
ratios is to the column before. Results: benchmarks/results/sparse_execution.json and .md.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import quantiles
from typing import Any

import torch
from mnist import machine, read, write
from torch import nn

import svdcompress as svdc
from svdcompress.execution import SparseLinear, summary
from svdcompress.pipeline import versions
from svdcompress.prune import dense_copy

RESULTS = Path(__file__).resolve().parent / "results"
LAYERS = ((300, 784), (1024, 1024))
"""Outputs and inputs of each layer."""

DENSITIES = (0.2, 0.1, 0.05, 0.02, 0.01)
LAYER_BATCHES, BATCHES = (1, 64), (1, 64, 512)
SECONDS, ROUNDS, WARM = 0.5, 20, 5
"""CPU seconds for each comparison, the fewest rounds, and rounds of warm-up."""


@torch.no_grad()
def in_turns(works: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
    """The lower quartile of a call's CPU time in milliseconds, for each function; they take turns."""
    times: dict[str, list[float]] = {name: [] for name in works}
    order, begun = list(works), time.thread_time()
    for _ in range(WARM):
        for work in works.values():
            work()
    while time.thread_time() - begun < SECONDS or len(times[order[0]]) < ROUNDS:
        for name in order:
            start = time.thread_time()
            works[name]()
            times[name].append(1e3 * (time.thread_time() - start))
        order.append(order.pop(0))
    return {name: quantiles(values)[0] for name, values in times.items()}


def layer(outputs: int, inputs: int, density: float, batch: int) -> dict[str, Any]:
    """Times of one Linear layer, dense and sparse."""
    torch.manual_seed(0)
    dense, twin = (nn.Linear(inputs, outputs).requires_grad_(False).eval() for _ in range(2))
    dense.weight.mul_(torch.rand(outputs, inputs) < density)
    twin.load_state_dict(dense.state_dict())
    sparse, x = SparseLinear.from_dense(twin), torch.randn(batch, inputs)
    torch.testing.assert_close(sparse(x), dense(x), rtol=1e-4, atol=1e-4)
    times = in_turns({"dense": lambda: dense(x), "sparse": lambda: sparse(x)})
    cell = {"outputs": outputs, "inputs": inputs, "density": density, "batch": batch}
    ends = {f"{name}_ms": value for name, value in times.items()}
    return {**cell, **ends, "times_as_fast": times["dense"] / times["sparse"]}


def network(folder: Path) -> list[dict[str, Any]]:
    """Times of a run's dense network, of its pruned mean, and of the latter after `to_sparse`, at each batch size."""
    opened = svdc.load_run(folder)
    rows = []
    for batch in BATCHES:
        x = next(iter(opened.data.test.batches(batch)))[0]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="to_sparse: ")
            sparse: Any = svdc.to_sparse(opened.model, x)
        pruned = dense_copy(opened.model).eval()
        used = [entry.name for entry in sparse.sparse_execution if entry.used]
        models = {"dense": opened.dense, "pruned": pruned} | ({"to_sparse": sparse} if used else {})
        times = in_turns({name: lambda model=model, x=x: model(x) for name, model in models.items()})
        rows.append(
            {
                "batch": batch,
                "ms": times,
                "pruned_to_dense": times["dense"] / times["pruned"],
                "to_sparse_to_pruned": times["pruned"] / times["to_sparse"] if used else None,
                "layers": {entry.name: entry.density for entry in sparse.sparse_execution},
                "sparse": used,
                "told": summary(sparse.sparse_execution),
            }
        )
    return rows


def markdown(results: dict[str, Any]) -> str:
    """Both tables, as Markdown."""
    lines = [
        "# Sparse products in PyTorch",
        "",
        "Written by `benchmarks/sparse_execution.py`, which says how. One thread, CPU time, lower quartiles.",
        "",
        "## Where they begin to pay",
        "",
        "How many times as fast a Linear layer is by a sparse (CSR) product, by the share of its weights that is not 0;",
        "in brackets milliseconds, dense and sparse.",
        "",
    ]
    lines += [f"| inputs, outputs | batch | {' | '.join(f'{100 * d:g}%' for d in DENSITIES)} |", "|---" * 7 + "|"]
    for outputs, inputs in LAYERS:
        for batch in LAYER_BATCHES:
            row = [c for c in results["layers"] if (c["outputs"], c["inputs"], c["batch"]) == (outputs, inputs, batch)]
            cells = [f"{c['times_as_fast']:.2f}x ({c['dense_ms']:.3g}, {c['sparse_ms']:.3g})" for c in row]
            lines.append(f"| {inputs}, {outputs} | {batch} | {' | '.join(cells)} |")
    lines += ["", "## Finished runs", ""]
    lines += ["Milliseconds of a pass; `to_sparse` where it made a layer sparse. Below, why it made none.", ""]
    lines += ["| run | batch | dense | pruned | `to_sparse` | sparse layers |", "|---" * 6 + "|"]
    for name, rows in results["runs"].items():
        for row in rows:
            ms = row["ms"]
            fast = f"{ms['to_sparse']:.3g} ({row['to_sparse_to_pruned']:.2f}x)" if row["sparse"] else ""
            told = ", ".join(f"{n} ({100 * row['layers'][n]:.2g}%)" for n in row["sparse"]) or "none"
            pruned = f"{ms['pruned']:.3g} ({row['pruned_to_dense']:.2f}x)"
            lines.append(f"| {name} | {row['batch']} | {ms['dense']:.3g} | {pruned} | {fast} | {told} |")
    note = "In brackets: how many times as fast as the column before; share of the layer's weights that is not 0."
    lines += ["", note, ""]
    told = {f"{name}, batch {row['batch']}": row["told"] for name, rows in results["runs"].items() for row in rows}
    lines += [f"- {name}: {why}." for name, why in told.items() if why.startswith("no layer")]
    names = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    return "\n".join([*lines, "", f"{results['machine']['cpu']}; {names}.", ""])


def main() -> None:
    """Measure, and write after each part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, nargs="+", default=[], help="folders of finished runs")
    parser.add_argument("--folder", type=Path, help="a folder of runs, all of which are taken if they are finished")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    path = options.results / "sparse_execution.json"
    found = sorted(options.folder.iterdir()) if options.folder and not options.runs else options.runs
    results = {"runs": {}, **read(path), "machine": machine(), "versions": versions()}
    results["layers"] = [layer(*sizes, density, n) for sizes in LAYERS for n in LAYER_BATCHES for density in DENSITIES]
    for folder in [None, *(one for one in found if (one / "report.json").is_file())]:
        if folder is not None:
            results["runs"][folder.name] = network(folder)
            print(folder.name, flush=True)
        write(path, results)
        path.with_suffix(".md").write_text(markdown(results), encoding="utf-8")


if __name__ == "__main__":
    main()
