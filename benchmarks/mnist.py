"""The MNIST figures: each recipe with several seeds through the command line, in a table with the published figures.

    python benchmarks/mnist.py --data FOLDER_OF_THE_IDX_FILES [--recipe mnist-lenet300 ...] [--seeds 0 1 2] [--finished]

A finished run is not repeated, and a stopped one is resumed. Results are written after each run to
benchmarks/results/mnist.json and mnist.md, where rows of other seeds and recipes are kept. With --finished nothing is run:
the folders of finished runs are read. Test data are used once, at the end of each run, by the run itself.
benchmarks/controls.py shows what the same budget gives without this package.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import yaml

from svdcompress.layers import fast_bfloat16
from svdcompress.uncertainty import wilson

HERE = Path(__file__).resolve().parent
STILL = "-still"
"""The end of the name of a recipe whose digits are not moved, as in the published results."""

RECIPES = (
    "digits",
    "mnist-lenet300",
    "mnist-lenet300-still",
    "mnist-lenet5",
    "mnist-lenet300-units",
    "mnist-lenet5-units",
)
PUBLISHED = {
    "mnist-lenet300": {"method": "Sparse VD", "error": 1.92, "sparsity": [98.9, 97.2, 62.0], "nonzero": 68},
    "mnist-lenet300-still": {"method": "Sparse VD", "error": 1.92, "sparsity": [98.9, 97.2, 62.0], "nonzero": 68},
    "mnist-lenet5": {"method": "Sparse VD", "error": 0.75, "sparsity": [67, 98, 99.8, 95], "nonzero": 280},
    "mnist-lenet300-units": {"method": "VIBNet", "error": 1.6, "kept": "97-71-33", "parameters": 27.8},
    "mnist-lenet5-units": {"method": "BC-GHS", "error": 1.0, "kept": "5-10-76-16", "parameters": 156},
}
"""Weight-level: Molchanov et al. 2017; units: Dai et al. 2018, and Louizos et al. 2017 as cited there; no digits were moved."""

COLUMNS = (
    "recipe",
    "seed",
    "error %, its 95% interval",
    "validation error %",
    "non-zeros",
    "parameters",
    "units left",
    "sparsity per layer",
    "100 samples: error %, NLL, ECE",
    "latency in ms, batch 1 (dense)",
    "batch 128 (dense)",
    "wall-clock",
    "variances",
    "machine",
)


def run(
    recipe: str, seed: int, data: str | None, runs: Path, name: str | None = None, options: Sequence[str] = ()
) -> dict[str, Any] | None:
    """The report of one run, from its folder if it is there already; None if it failed, or if `data` is needed but None.

    name: of the folder. options: of the command.
    """
    out = runs / (name or f"{recipe}-{seed}")
    if not (out / "report.json").is_file():
        if data is None:
            return None
        command = [sys.executable, "-m", "svdcompress", "sparsify"]
        if (out / "recipe.yaml").is_file():
            command += ["--resume", "--out", str(out)]
        else:
            command += [str(HERE.parent / "recipes" / f"{recipe.removesuffix(STILL)}.yaml"), "--out", str(out)]
            command += ["--seed", str(seed), *(["--data", f"mnist:{data}"] if recipe.startswith("mnist") else []), *options]
            command += ["--set", "data.augment=[]"] if recipe.endswith(STILL) else []
        if subprocess.run(command, cwd=HERE.parent).returncode:
            return None
        write(out / "machine.json", machine())
    return json.loads((out / "report.json").read_text(encoding="utf-8")) | {"machine": read(out / "machine.json")}


def machine() -> dict[str, Any]:
    """What a run's times and its variance dtype depend on."""
    return {"cpu": cpu(), "cores": os.cpu_count(), "fast_bfloat16": fast_bfloat16(torch.device("cpu"))}


def read(file: Path) -> dict[str, Any]:
    """A JSON file, or {} where there is none."""
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def write(file: Path, content: Any) -> None:
    """Write a JSON file."""
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def add_row(file: Path, rows: Iterable[str], row: str, seed: int, found: Any, table: Callable[[dict[str, Any]], str]) -> None:
    """Add a row's result for a seed to a JSON file, with the rows in order, and write a table of all results next to it."""
    results = read(file)  # others may have been made meanwhile
    results.setdefault(row, {})[str(seed)] = found
    results = {name: results[name] for name in rows if name in results}
    write(file, results)
    file.with_suffix(".md").write_text(table(results), encoding="utf-8")


def made_on(results: dict[str, Any]) -> list[str]:
    """The last lines of such a table: the machine and versions of its first result."""
    for one in [each for seeds in results.values() for each in seeds.values()][:1]:
        cpu, torch = one["machine"].get("cpu"), one["versions"]["torch"]
        return ["", f"{cpu}, torch {torch}, {one['threads']} thread, beside other work."]
    return []


def setting(report: dict[str, Any]) -> dict[str, Any]:
    """How a run's figures were obtained, by its recipe: start, epochs, augmentation, dtype of the variances."""
    recipe = yaml.safe_load(report["recipe"])
    stages = {name: recipe.get(name) or {} for name in ("dense", "train", "recover")}
    asked = (recipe.get("convert") or {}).get("variance_dtype", "auto")
    auto = "bfloat16 where it pays" if report["machine"].get("fast_bfloat16") else "float32"
    weights = (recipe.get("weights") or {}).get("file")
    return {
        "start": f"weights from {Path(weights).name}" if weights else "dense, trained by the run",
        "epochs": {name: stage.get("epochs") for name, stage in stages.items()},
        "augment": (recipe.get("data") or {}).get("augment") or [],
        "variances": asked if asked != "auto" else auto,
    }


def figures(report: dict[str, Any], evaluation: dict[str, Any] | None = None) -> dict[str, Any]:
    """What the table needs from one run's report; metrics are on test data unless named otherwise.

    evaluation: the run's part of evaluate.json, whose figures for samples are newer than the report's.
    """
    dense, sparse, layers, tests = report["dense"], report["sparse"], report["layers"], report["examples"]["test"]
    sampled = next((row for name, row in (report.get("uncertainty") or {}).items() if name.endswith("samples")), {})
    newer = {row["name"]: row["metrics"] for row in (evaluation or {}).get("contenders", ())}
    if abs(newer.get("sparse, mean", {}).get("error", -1.0) - sparse["metrics"]["error"]) < 1e-6:  # otherwise of an earlier run
        sampled = newer.get("sparse, samples", sampled)
    return {
        "seed": report["seed"],
        **setting(report),
        "machine": report["machine"],
        "versions": report["versions"],
        "error": sparse["metrics"]["error"],
        "interval": [100 * bound for bound in wilson(sparse["metrics"]["error"] / 100 * tests, tests)],
        "validation_error": sparse["validation"]["error"],
        "nll": sparse["metrics"]["nll"],
        "dense_error": dense["metrics"]["error"],
        "dense_validation_error": dense["validation"]["error"],
        "changes": report.get("changes"),
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
    """Units left in each layer but the last; before them, for linear layers, the number of inputs that any weight reads."""
    first = [layers[0]["inputs"]] if len(layers[0]["shape_after"]) == 2 else []
    return first + [layer["shape_after"][0] for layer in layers[:-1]]


def cpu() -> str:
    """The processor's name, as far as the system reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def average(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Means over seeds of the figures that are compared."""
    names = ("nonzero", "parameters", "bytes", "macs", "latency")
    ratios = {name: [row["compression"].get(name) for row in rows] for name in names}
    plain = {name: mean(values) for name, values in ratios.items() if all(isinstance(v, int | float) for v in values)}
    found = {"error": mean(row["error"] for row in rows), "dense_error": mean(row["dense_error"] for row in rows)}
    found |= {f"{name}_compression": value for name, value in plain.items()}
    return found | {"weights_compression": mean(row["weights_compression"] for row in rows)}


def errors(controls: dict[str, Any], recipe: str, kind: str) -> list[float]:
    """Test errors of a recipe's control over the seeds, [] if it has none. controls: the contents of controls.json."""
    runs, name = controls.get("recipes", {}).get(recipe, {}), controls.get("chosen", {}).get(recipe, {}).get(kind)
    return [runs[seed]["nets"][name]["test_error"] for seed in sorted(runs, key=int) if name in runs[seed]["nets"]]


def table(found: dict[str, list[dict[str, Any]]], controls: dict[str, Any]) -> str:
    """Markdown: tables of means, of how they were obtained, and of runs. controls: the contents of controls.json."""
    lines = [
        "# MNIST, and scikit-learn's digits",
        "",
        "Written by `benchmarks/mnist.py`. Non-zeros count biases; parameters count zeros, after removal of dead units. Errors",
        'are those of the test data: means over the seeds, in brackets the least and the largest. "As long": the dense start',
        "trained on for as many epochs as the run's fine-tuning and recovery (`controls.md`).",
        "",
        "| recipe | seeds | error % | dense start | dense, as long | non-zeros | weights only | parameters | published |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for recipe, rows in found.items():
        means = average(rows)
        seeds = ", ".join(str(row["seed"]) for row in rows)
        lines.append(
            f"| {recipe} | {seeds} | {span([row['error'] for row in rows])} | {span([row['dense_error'] for row in rows])} | "
            f"{span(errors(controls, recipe, 'dense'))} | {means['nonzero_compression']:.0f}x | "
            f"{means['weights_compression']:.0f}x | {means['parameters_compression']:.1f}x | {published(recipe)} |"
        )
    lines += ["", "## How they were got", "", "| recipe | start | epochs: dense, fine-tuning, recovery | training digits |"]
    lines.append("|---|---|---|---|")
    for recipe, rows in found.items():
        known = rows[0]
        epochs = ", ".join("?" if count is None else str(count) for count in known["epochs"].values())
        moved = "moved by up to a pixel, in all stages" if known["augment"] else "as they are"
        lines.append(f"| {recipe} | {known['start']} | {epochs} | {moved} |")
    lines += ["", "The published nets had the digits as they are."]
    lines += ["", "## Each run", "", f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    lines += [_row(recipe, row) for recipe, rows in found.items() for row in rows]
    lines += [
        "",
        "The interval is Wilson's, of the test digits alone. One thread; other work ran on the machines meanwhile: take times "
        "as upper bounds.",
    ]
    versions = list(dict.fromkeys(_versions(row) for rows in found.values() for row in rows))
    return "\n".join([*lines, *versions, ""])


def span(values: list[float]) -> str:
    """The mean, with the smallest and the largest value."""
    if not values:
        return ""
    return f"{mean(values):.2f}" + (f" ({min(values):.2f} to {max(values):.2f})" if len(values) > 1 else "")


def _versions(row: dict[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in row["versions"].items()) + "."


def published(recipe: str) -> str:
    """The published result for a recipe of this kind, as one cell."""
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
    low, high = row["interval"]
    known = row["validation_error"]
    entries = [
        recipe,
        row["seed"],
        f"{row['error']:.2f}, {low:.2f} to {high:.2f}",
        "" if known is None else f"{known:.2f}",
        f"{compression['nonzero']:.0f}x",
        f"{compression['parameters']:.1f}x",
        row["kept"],
        "-".join(f"{value:.1f}" for value in row["sparsity"]),
    ]
    machine = f"{row['machine'].get('cpu', '?')}, {row['machine'].get('cores', '?')} cores"
    entries += [samples, *cells, f"{minutes:.0f} min" if minutes > 2 else f"{60 * minutes:.0f} s", row["variances"], machine]
    return f"| {' | '.join(map(str, entries))} |"


def arguments(description: str | None) -> argparse.Namespace:
    """Parse the command line; the folders that it names are created."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder of MNIST's four IDX files")
    parser.add_argument("--recipe", action="append", choices=RECIPES, help="may be given several times; all by default")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--finished", action="store_true", help="run nothing: read the folders of finished runs")
    parser.add_argument("--runs", type=Path, default=HERE.parent / "runs" / "benchmarks", help="where the runs' folders go")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="where the tables go, as JSON and Markdown")
    options = parser.parse_args()
    if options.data is None and not options.finished:
        parser.error("--data is needed, or --finished")
    for folder in (options.runs, options.results):
        folder.mkdir(parents=True, exist_ok=True)
    return options


def store(found: dict[str, list[dict[str, Any]]], results: Path) -> None:
    """Write mnist.json and mnist.md, the latter with the figures of controls.json."""
    ordered = {recipe: sorted(found[recipe], key=lambda row: row["seed"]) for recipe in RECIPES if found.get(recipe)}
    means = {name: average(rows) for name, rows in ordered.items()}
    write(results / "mnist.json", {"published": PUBLISHED, "means": means, "runs": ordered})
    (results / "mnist.md").write_text(table(ordered, read(results / "controls.json")), encoding="utf-8")


def main() -> None:
    options = arguments(__doc__)
    found = read(options.results / "mnist.json").get("runs", {})
    evaluated = read(options.results / "evaluate.json")
    failed = []
    for recipe in options.recipe or RECIPES:
        for seed in options.seeds:
            report = run(recipe, seed, None if options.finished else options.data, options.runs)
            if report is None:
                failed += [f"{recipe}, seed {seed}"]
                continue
            others = [row for row in found.get(recipe, []) if row["seed"] != seed]
            found[recipe] = [*others, figures(report, evaluated.get(f"{recipe}-{seed}"))]
            store(found, options.results)
    if failed:
        sys.exit(f"{'not finished' if options.finished else 'failed'}: {'; '.join(failed)}")


if __name__ == "__main__":
    main()
