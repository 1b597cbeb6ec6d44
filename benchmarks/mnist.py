"""The MNIST figures: each recipe over several seeds through the command line, as a table beside the published ones.

    python benchmarks/mnist.py --data FOLDER_OF_THE_IDX_FILES [--recipe mnist-lenet300 --recipe ...] [--seeds 0 1 2]

A run that is finished is not repeated, one that was stopped goes on; results are written after each run to
benchmarks/results/mnist.json and mnist.md. Test data are looked at once, at the end of each run, by the run itself.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

HERE = Path(__file__).resolve().parent
RECIPES = ("mnist-lenet300", "mnist-lenet5", "mnist-lenet300-units", "mnist-lenet5-units")
PUBLISHED = {
    "mnist-lenet300": {"method": "Sparse VD", "error": 1.92, "sparsity": [98.9, 97.2, 62.0], "nonzero": 68},
    "mnist-lenet5": {"method": "Sparse VD", "error": 0.75, "sparsity": [67, 98, 99.8, 95], "nonzero": 280},
    "mnist-lenet300-units": {"method": "VIBNet", "error": 1.6, "kept": "97-71-33", "parameters": 27.8},
    "mnist-lenet5-units": {"method": "BC-GHS", "error": 1.0, "kept": "5-10-76-16", "parameters": 156},
}
"""Weight-level: Molchanov et al. 2017; units: Dai et al. 2018, and Louizos et al. 2017 as cited there."""


COLUMNS = (
    "recipe",
    "seed",
    "error %",
    "non-zeros",
    "parameters",
    "units left",
    "sparsity per layer",
    "100 samples: error %, NLL, ECE",
    "latency in ms, batch 1 (dense)",
    "batch 128 (dense)",
    "wall-clock",
)


def run(
    recipe: str, seed: int, data: str, runs: Path, name: str | None = None, options: Sequence[str] = ()
) -> dict[str, Any] | None:
    """The report of one run, from its folder (of a name) if it is there already; None if it failed. options: of the command."""
    out = runs / (name or f"{recipe}-{seed}")
    if not (out / "report.json").is_file():
        command = [sys.executable, "-m", "svdcompress", "sparsify"]
        if (out / "recipe.yaml").is_file():
            command += ["--resume", "--out", str(out)]
        else:
            command += [str(HERE.parent / "recipes" / f"{recipe}.yaml"), "--out", str(out)]
            command += ["--data", f"mnist:{data}", "--seed", str(seed), *options]
        if subprocess.run(command, cwd=HERE.parent).returncode:
            return None
    return json.loads((out / "report.json").read_text(encoding="utf-8"))


def figures(report: dict[str, Any]) -> dict[str, Any]:
    """What the table needs of one run's report; all of the test data."""
    dense, sparse, layers = report["dense"], report["sparse"], report["layers"]
    sampled = next((row for name, row in (report.get("uncertainty") or {}).items() if name.endswith("samples")), {})
    return {
        "seed": report["seed"],
        "error": sparse["metrics"]["error"],
        "nll": sparse["metrics"]["nll"],
        "dense_error": dense["metrics"]["error"],
        "sampled": {name: sampled.get(name) for name in ("error", "nll", "ece")},
        "compression": report["compression"],
        "nonzero": sparse["nonzero"],
        "parameters": sparse["parameters"],
        "weights_nonzero": sum(layer["weights"] for layer in layers),
        "weights_compression": sum(layer["weights_before"] for layer in layers) / sum(layer["weights"] for layer in layers),
        "sparsity": [round(100 * layer["sparsity"], 2) for layer in layers],
        "kept": "-".join(map(str, _units(layers))),
        "shapes": [layer["shape_after"] for layer in layers],
        "latency_ms": {"dense": dense.get("latency_ms"), "sparse": sparse.get("latency_ms")},
        "threads": report.get("threads"),
        "seconds": {name: round(value, 1) for name, value in report["seconds"].items()},
        "total_seconds": round(sum(report["seconds"].values())),
    }


def _units(layers: list[dict[str, Any]]) -> list[int]:
    """Units of each layer but the last, as they are left; before them, for linear layers, the inputs that any weight reads."""
    first = [layers[0]["inputs"]] if len(layers[0]["shape_after"]) == 2 else []
    return first + [layer["shape_after"][0] for layer in layers[:-1]]


def cpu() -> str:
    """The processor's name, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def average(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Means over seeds of what is compared."""
    names = ("nonzero", "parameters", "bytes", "macs", "latency")
    ratios = {name: [row["compression"].get(name) for row in rows] for name in names}
    plain = {name: mean(values) for name, values in ratios.items() if all(isinstance(v, int | float) for v in values)}
    found = {"error": mean(row["error"] for row in rows), "dense_error": mean(row["dense_error"] for row in rows)}
    found |= {f"{name}_compression": value for name, value in plain.items()}
    return found | {"weights_compression": mean(row["weights_compression"] for row in rows)}


def table(found: dict[str, list[dict[str, Any]]], facts: dict[str, Any]) -> str:
    """Markdown: a table of means, a table of runs, and on what they were measured."""
    lines = [
        "# MNIST",
        "",
        "Written by `benchmarks/mnist.py`. Non-zeros count biases; parameters count zeros, after removal of dead units.",
        "",
    ]
    lines += ["| recipe | seeds | error % (mean) | dense error % | non-zeros | weights only | parameters | published |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for recipe, rows in found.items():
        means = average(rows)
        seeds = ", ".join(str(row["seed"]) for row in rows)
        lines.append(
            f"| {recipe} | {seeds} | {means['error']:.2f} | {means['dense_error']:.2f} | {means['nonzero_compression']:.0f}x | "
            f"{means['weights_compression']:.0f}x | {means['parameters_compression']:.1f}x | {published(recipe)} |"
        )
    lines += ["", "## Each run", "", f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    lines += [_row(recipe, row) for recipe, rows in found.items() for row in rows]
    lines += [
        "",
        f"{facts['cpu']}, {facts['cores']} cores, one thread. "
        "Other work ran on the machine meanwhile: take times as upper bounds.",
    ]
    lines += [", ".join(f"{name} {version}" for name, version in facts["versions"].items()) + ".", ""]
    return "\n".join(lines)


def published(recipe: str) -> str:
    """The published figure of a recipe's kind in one cell."""
    row = PUBLISHED.get(recipe)
    if row is None:
        return ""
    if "sparsity" in row:
        return f"{row['method']}: {row['nonzero']}x at {row['error']}, " + "-".join(map(str, row["sparsity"]))
    return f"{row['method']}: {row['parameters']}x at {row['error']}, {row['kept']}"


def _row(recipe: str, row: dict[str, Any]) -> str:
    sampled = [row["sampled"][name] for name in ("error", "nll", "ece")]
    samples = f"{sampled[0]:.2f}, {sampled[1]:.4f}, {sampled[2]:.4f}" if None not in sampled else ""
    times = row["latency_ms"]
    cells = [
        f"{times['sparse'][batch]:.3f} ({times['dense'][batch]:.3f})" if times["sparse"] else ""
        for batch in ("batch_1", "batch_128")
    ]
    compression, minutes = row["compression"], row["total_seconds"] / 60
    entries = [
        recipe,
        row["seed"],
        f"{row['error']:.2f}",
        f"{compression['nonzero']:.0f}x",
        f"{compression['parameters']:.1f}x",
    ]
    entries += [row["kept"], "-".join(f"{value:.1f}" for value in row["sparsity"]), samples, *cells, f"{minutes:.0f} min"]
    return f"| {' | '.join(map(str, entries))} |"


def arguments(description: str | None) -> argparse.Namespace:
    """What the command line asks for; its folders are there."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder of MNIST's four IDX files")
    parser.add_argument("--recipe", action="append", choices=RECIPES, help="may be given several times; all by default")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, default=HERE.parent / "runs" / "benchmarks", help="where the runs' folders go")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="where the tables go, as JSON and Markdown")
    options = parser.parse_args()
    for folder in (options.runs, options.results):
        folder.mkdir(parents=True, exist_ok=True)
    return options


def main() -> None:
    options = arguments(__doc__)
    wanted = set(options.recipe or RECIPES)
    found: dict[str, list[dict[str, Any]]] = {}
    failed = []
    for recipe in RECIPES:
        for seed in options.seeds:
            here = recipe in wanted or (options.runs / f"{recipe}-{seed}" / "report.json").is_file()
            report = run(recipe, seed, options.data, options.runs) if here else None
            if report is None:
                failed += [f"{recipe}, seed {seed}"] * here
                continue
            found.setdefault(recipe, []).append(figures(report))
            facts = {"cpu": cpu(), "cores": os.cpu_count(), "versions": report["versions"]}
            means = {name: average(rows) for name, rows in found.items()}
            content = {"machine": facts, "published": PUBLISHED, "means": means, "runs": found}
            (options.results / "mnist.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            (options.results / "mnist.md").write_text(table(found, facts), encoding="utf-8")
    if failed:
        sys.exit(f"failed: {'; '.join(failed)}")


if __name__ == "__main__":
    main()
