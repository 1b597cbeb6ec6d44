"""Dropout in the recovery of a network that was cut and reconstructed: at its own rates, off, or rising again.

    python benchmarks/dropout_recovery.py [--dense 20 60] [--epochs 5 12 30] [--rate 0.2 0.5] [--seeds 5]

A perceptron of scikit-learn's digits with dropout (models/digits.py), trained by each run for --dense epochs, is cut at once to
a quarter of its multiply-accumulates, reconstructed, and recovers for --epochs epochs with `recover.dropout` on, off, rising
and auto; everything else is the command's default (`svdc sparsify --goal macs=4x --trials 1 --epochs 0`). Reported are the
negative log likelihood and the error of 597 test digits, means over the seeds, whose dense networks differ; less "on": paired
by example, 95%.

Stored results are not computed again; they go to benchmarks/results/dropout_recovery.json and dropout_recovery.md.
"""

from __future__ import annotations

import argparse
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import torch
from mnist import HERE, machine, read, write
from real_peers import dropout_told
from torch import Tensor

from svdcompress.pipeline import open_run, run
from svdcompress.recipe import load_recipe
from svdcompress.train import losses
from svdcompress.uncertainty import paired_means

RESULTS = HERE / "results" / "dropout_recovery.json"
ARMS = ("on", "off", "rising", "auto")
SETTINGS = [
    f"model.name={HERE / 'models' / 'digits.py'}:mlp_with_dropout",
    f"data.name={HERE / 'models' / 'digits.py'}:data",
    "search.goal='macs=4x'",
    "search.trials=1",
    "train.epochs=0",
    "device=cpu",
    "uncertainty.samples=0",
    "export.onnx=false",
    "report.html=false",
    "report.latency=false",
]


def judged(dense: int, rate: float, epochs: int, seed: int, how: str) -> tuple[Tensor, Tensor, str]:
    """Which test digits a recovered network gets wrong, their negative log likelihoods (N,), and what "auto" has chosen."""
    more = [f"model.args.p={rate}", f"dense.epochs={dense}", f"recover.epochs={epochs}", f"seed={seed}"]
    more.append(f"recover.dropout='{how}'")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        results = run(load_recipe(None, [*SETTINGS, *more]), out, quiet=True)
        opened = open_run(out, trust_code=True)
        wrong, nll, _ = losses(opened.model, opened.data.test, "classification")
    return wrong.double(), nll.double(), dropout_told(results["notes"])


def table(results: dict[str, Any]) -> str:
    """Markdown: a row for each length and rate."""
    lines = ["# Dropout in recovery after a reconstruction", ""]
    lines += ["Written by `benchmarks/dropout_recovery.py`, which says how. Negative log likelihood of test digits (error in"]
    lines += ['%), and the former less that with dropout "on", paired, 95%; below 0 is better. What "auto" chose: in how many']
    lines += ["of the seeds.", ""]
    lines += [f"| epochs: dense, recovery | rate | seeds | {' | '.join(ARMS)} | auto chose |", "|" + "---|" * (4 + len(ARMS))]
    for one in sorted(results.values(), key=lambda one: (one["dense"], one["epochs"], one["rate"])):
        cells = [f"{one['dense']} + {one['epochs']}", f"{one['rate']:g}", str(one["seeds"])]
        for arm in ARMS:
            found = one["arms"][arm]
            less = "" if arm == "on" else "; {:+.3f} [{:+.3f}, {:+.3f}]".format(*found["less"])
            cells.append(f"{found['nll']:.3f} ({found['error']:.2f}){less}")
        chose = ", ".join(f"{how} {count}" for how, count in one["chose"].items())
        lines.append(f"| {' | '.join([*cells, chose])} |")
    made = {f"{one['machine']['cpu']}, one thread, torch {one['torch']}." for one in results.values()}
    return "\n".join([*lines, "", *sorted(made), ""])


def main() -> None:
    """Measure the lengths and rates without stored results, one by one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dense", type=int, nargs="+", default=[20, 60])
    parser.add_argument("--epochs", type=int, nargs="+", default=[5, 12, 30])
    parser.add_argument("--rate", type=float, nargs="+", default=[0.2, 0.5])
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for dense, epochs, rate in product(options.dense, options.epochs, options.rate):
        name, setting = f"{dense} + {epochs} epochs, rate {rate:g}", {"seeds": options.seeds, "torch": torch.__version__}
        if read(RESULTS).get(name, {}).items() >= setting.items():
            continue
        found: dict[str, Any] = {"dense": dense, "epochs": epochs, "rate": rate, **setting, "machine": machine()}
        found |= {"arms": {}, "chose": {}}
        means: dict[str, Tensor] = {}
        for arm in ARMS:
            each = [judged(dense, rate, epochs, seed, arm) for seed in range(options.seeds)]
            wrong, means[arm] = (torch.stack([part[index] for part in each]).mean(0) for index in (0, 1))
            found["arms"][arm] = {"nll": float(means[arm].mean()), "error": 100 * float(wrong.mean())}
            less = means[arm] - means["on"]
            found["arms"][arm]["less"] = [float(less.mean()), *paired_means(less)]
        for *_, how in each:  # of "auto", the last arm
            found["chose"][how] = found["chose"].get(how, 0) + 1
        results = read(RESULTS) | {name: found}
        write(RESULTS, results)
        RESULTS.with_suffix(".md").write_text(table(results), encoding="utf-8")
        print(name, found, flush=True)


if __name__ == "__main__":
    main()
