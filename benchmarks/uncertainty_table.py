"""A table of the kind of California housing with known noise: are 95% intervals right, and how wide are they?

It is made here (that data set has to be downloaded): 8 columns, 5,000 rows, prices that depend on location, income and age
with nonlinearities and interactions, and normal noise with a standard deviation of 0.3 on values with one of 1.0. So no model
can beat 1.96 * 0.3 each way. The network of 8-64-64-1 is pruned by a run; its 95% intervals (mean and predictive deviation,
calibrated by the run, and split-conformal ones) are compared with those of a deep ensemble of five dense networks, with noise
fitted on the same validation rows.
"""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from svdcompress.calibrate import load_promises
from svdcompress.evaluation._members import ensemble_members
from svdcompress.likelihoods import own_likelihood
from svdcompress.pipeline import KEPT, open_run, run
from svdcompress.recipe import parse_recipe
from svdcompress.uncertainty import ensemble_contender, fit_tau, gather, mean_contender, sampled_contender

ROWS, NOISE, MEMBERS = 5000, 0.3, 5
COLUMNS = ("income", "age", "rooms", "bedrooms", "population", "occupancy", "latitude", "longitude")
Z95 = 1.959964


def make(file: Path) -> None:
    """Write the table as a CSV file; it is always the same."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, len(COLUMNS)))
    x[:, 3] = 0.8 * x[:, 2] + 0.6 * x[:, 3]  # bedrooms go with rooms, as in reality
    income, age, rooms, bedrooms, _, occupancy, north, east = x.T
    coast = np.tanh(2 * (east + 0.7 * north))
    price = 0.8 * income + 0.3 * np.sin(2 * age) + 0.25 * rooms - 0.2 * bedrooms - 0.2 * np.abs(occupancy)
    price = price - 0.5 * coast * (1 + 0.5 * income) + 0.2 * np.cos(2 * north)
    price = price / price.std() + rng.normal(0, NOISE, ROWS)
    with open(file, "w", newline="", encoding="utf-8") as out:
        writer = csv.writer(out)
        writer.writerow([*COLUMNS, "price"])
        writer.writerows([f"{value:.6g}" for value in row] for row in np.column_stack([x, price]))


def recipe_of(file: Path, seed: int) -> dict[str, Any]:
    """The run's recipe: as a user would write it, with the epochs that such a table needs."""
    return {
        "model": {"name": "mlp", "args": {"sizes": [8, 64, 64, 1]}},
        "data": {"name": f"csv:{file}", "target": "price"},
        "loss": "mse",
        "dense": {"epochs": 40},
        "train": {"epochs": 60},
        "recover": {"epochs": 20},
        "uncertainty": {"samples": 0},
        "report": {"latency": False},
        "seed": seed,
    }


def measured(folder: Path, seeds: list[int], samples: int) -> dict[str, Any]:
    """Make the runs that do not exist; returns the figures by seed and contender."""
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "table.csv"
    if not file.is_file():
        make(file)
    found = {}
    for seed in seeds:
        out = folder / f"table-{seed}"
        if not (out / "report.json").is_file():
            run(parse_recipe(recipe_of(file, seed)), out, overwrite=True)
        found[str(seed)] = _of(out, samples)
    return {"seeds": found, "rows": ROWS, "noise": NOISE, "members": MEMBERS, "samples": samples}


def _of(folder: Path, samples: int) -> dict[str, Any]:
    opened = open_run(folder)
    data = opened.data
    own: Any = own_likelihood(opened.model, data.task, data.dim)
    assert data.target_scale is not None  # a table's target is standardized
    scale = data.target_scale[1]
    members = ensemble_members(opened, MEMBERS, device="cpu")
    better = (opened.results.get("calibrate") or {}).get("better", "samples")
    contenders = {
        "dense": (mean_contender("", opened.dense, own.plain()), None),
        f"deep ensemble of {MEMBERS}": (ensemble_contender(members, own.plain()), None),
        "sparse, mean": (mean_contender("", opened.model, own), own.of_mean().tau),
        "sparse, samples": (sampled_contender("", opened.model, own, samples, 0), own.tau),
    }
    rows: dict[str, dict[str, float]] = {}
    for name, (contender, tau) in contenders.items():
        held, test = (
            gather(contender.predict, lambda part=part: part.batches(500), own) for part in (data.validation, data.test)
        )
        noise = 1 / float(fit_tau(held.mean, held.variance, held.targets) if tau is None else tau)
        deviation = (test.variance + noise).sqrt()
        rows[name] = _figures(test.mean, Z95 * deviation, test.targets, scale)
        if tau is not None:
            promise: Any = load_promises(folder / KEPT, name.removeprefix("sparse, ")).coverage(0.95)
            low, high = promise.intervals(test.mean, deviation)
            rows[f"{name}, conformal"] = _figures((low + high) / 2, (high - low) / 2, test.targets, scale)
    return {"better": better, "compression": opened.results["compression"]["nonzero"], "rows": rows}


def _figures(mean: torch.Tensor, half: torch.Tensor, target: torch.Tensor, scale: float) -> dict[str, float]:
    error = (mean - target).double()
    return {
        "rmse": scale * float(error.square().mean().sqrt()),
        "coverage": float((error.abs() <= half).double().mean()),
        "width": 2 * scale * float(half.double().mean()),
    }


def table_lines(found: dict[str, Any]) -> list[str]:
    """The results as lines of Markdown."""
    seeds = found["seeds"]
    runs = list(seeds.values())
    best = 2 * Z95 * found["noise"]
    ratio = sum(one["compression"] for one in runs) / len(runs)
    lines = ["", "## A table with known noise", ""]
    lines += [
        f"{found['rows']:,} rows of `benchmarks/uncertainty_table.py` (20% for the test), {len(runs)} runs (seeds "
        f"{', '.join(seeds)}), {ratio:.3g}x fewer non-zeros. 95% intervals; {best:.3f} is the width of the noise alone, and "
        f"the RMSE of the truth is {found['noise']:g}. Goal: 94 to 96%, at most 1.1 times the ensemble's width. Chosen on "
        f"validation data: {', '.join(one['better'] for one in runs)}."
    ]
    lines += ["", "| | RMSE | coverage (by seed) | width | over the ensemble's |", "|---|---|---|---|---|"]
    names = list(runs[0]["rows"])
    ensemble = next(name for name in names if name.startswith("deep ensemble"))
    mean = {
        name: {key: sum(one["rows"][name][key] for one in runs) / len(runs) for key in runs[0]["rows"][name]} for name in names
    }
    for name in names:
        each = ", ".join(f"{100 * one['rows'][name]['coverage']:.1f}" for one in runs)
        row, over = mean[name], mean[name]["width"] / mean[ensemble]["width"]
        lines.append(
            f"| {name} | {row['rmse']:.3f} | {100 * row['coverage']:.1f}% ({each}) | {row['width']:.3f} | {over:.2f} |"
        )
    count = 0.2 * found["rows"]
    sure = 196 * math.sqrt(0.95 * 0.05 / count)
    return [*lines, "", f"A coverage of {count:,.0f} rows is known to about {sure:.1f} points either way."]
