"""What a budget or a goal alone gives: `svdc sparsify RECIPE --max-drop ...` by seed, compared with the hand-set recipe.

    python benchmarks/search.py [--data FOLDER_OF_THE_IDX_FILES] [--row digits-drop ...] [--seeds 0 1 2] [--runs FOLDER]

A finished run is not repeated, and a stopped one is resumed; results are written after each to benchmarks/results/search.json
and search.md, where rows of other seeds are kept. Trials are chosen on validation data; the test data are read once, by the
run, at its end. The seconds are those of the run's own report, whatever else the machine was doing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import mean
from typing import Any

from mnist import machine, read, setting, write

from svdcompress.pipeline._levels import COOLING_EPOCHS, LEVEL_EPOCHS

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"

ROWS: dict[str, tuple[str, list[str]]] = {
    "digits-drop": ("digits", ["--max-drop", "0.5"]),
    "lenet300-drop": ("mnist-lenet300", ["--max-drop", "0.5"]),
    "lenet300-nonzero": ("mnist-lenet300", ["--goal", "nonzero=120x"]),
    "lenet300-nonzero-still": ("mnist-lenet300", ["--goal", "nonzero=120x", "--set", "data.augment=[]"]),
    "lenet300-parameters": ("mnist-lenet300-units", ["--goal", "parameters=40x"]),
    "lenet300-parameters-still": ("mnist-lenet300-units", ["--goal", "parameters=40x", "--set", "data.augment=[]"]),
    "lenet5-nonzero": ("mnist-lenet5", ["--goal", "nonzero=350x"]),
    "lenet5-nonzero-still": ("mnist-lenet5", ["--goal", "nonzero=350x", "--set", "data.augment=[]"]),
    "lenet5-parameters": ("mnist-lenet5-units", ["--goal", "parameters=200x"]),
    "lenet5-parameters-still": ("mnist-lenet5-units", ["--goal", "parameters=200x", "--set", "data.augment=[]"]),
    "lenet5-latency": ("mnist-lenet5-units", ["--goal", "latency=12x"]),
    "lenet5-latency-128": ("mnist-lenet5-units", ["--goal", "latency=12x", "--set", "search.latency_batch=128"]),
}
"""For each row: the recipe, and the command's arguments other than data, seed and folder."""

PUBLISHED = {
    "lenet300-nonzero": "68x at 1.92% (Sparse VD, digits as they are)",
    "lenet300-parameters": "27.8x at 1.6% (VIBNet, digits as they are)",
    "lenet5-nonzero": "280x at 0.75% (Sparse VD, digits as they are)",
    "lenet5-parameters": "156x at 1.0% (BC-GHS, digits as they are)",
    "lenet5-latency-128": "5.4x at 0.86% (SBP, on its authors' CPU, digits as they are)",
}
PUBLISHED |= {f"{row}-still": figure for row, figure in PUBLISHED.items()}
LEVELS = 6
"""The number of levels of a path, for stored rows that do not say."""

COMPRESSIONS = ("nonzero", "parameters", "macs", "bytes")


def run(row: str, seed: int, options: argparse.Namespace) -> dict[str, Any] | None:
    """The report of one run, from its folder if it is there; None if it failed or has no data."""
    recipe, arguments = ROWS[row]
    out = options.runs / f"{row}-{seed}"
    if not (out / "report.json").is_file():
        if recipe.startswith("mnist") and options.data is None:
            return None
        command = [sys.executable, "-m", "svdcompress", "sparsify"]
        if (out / "recipe.yaml").is_file():
            command += ["--resume", "--out", str(out)]
        else:
            command += [str(HERE.parent / "recipes" / f"{recipe}.yaml"), "--out", str(out), "--seed", str(seed), *arguments]
            command += ["--data", f"mnist:{options.data}"] if recipe.startswith("mnist") else []
        if subprocess.run(command, cwd=HERE.parent).returncode:
            return None
        write(out / "machine.json", machine())
    return json.loads((out / "report.json").read_text(encoding="utf-8")) | {"machine": read(out / "machine.json")}


def entry(report: dict[str, Any]) -> dict[str, Any]:
    """What is stored of a run."""
    search = report["search"]
    chosen = next(trial for trial in search["trials"] if trial["number"] == search["chosen"])
    return {
        "test": {side: report[side]["metrics"]["error"] for side in ("dense", "sparse")},
        "change": report.get("changes", {}).get("error"),
        "validation": {"dense": search["dense"]["error"], "sparse": chosen["error"], "upper": chosen["upper"]}
        | {name: chosen.get(name) for name in ("estimate", "at_most")},
        "compression": {name: report["compression"][name] for name in COMPRESSIONS},
        "latency": report["compression"].get("latency"),
        "met": search["met"],
        "reached": search["reached"],
        "trials": sum(trial.get("continues") is None for trial in search["trials"]),
        "epochs": search.get("epochs"),
        "levels": len(search["path"]),
        "seconds": {"dense": report["seconds"].get("dense", 0.0), "search": search["seconds"]},  # over all resumed parts
        "threads": report.get("torch_threads"),
        "setting": setting(report),
        "versions": {name: report["versions"].get(name) for name in ("torch", "svdcompress")},
        "machine": report["machine"],
    }


def epochs(found: dict[str, Any]) -> tuple[int, int]:
    """Epochs after the dense start: of the whole search (path and all trials), and of one run of the recipe without it."""
    if (told := found.get("epochs")) is not None:
        return told["search"], told["one_run"]
    train, recover = (found["setting"]["epochs"][name] for name in ("train", "recover"))
    part = lambda share: max(1, round(share * train))  # noqa: E731
    levels = found.get("levels", LEVELS)
    return levels * part(LEVEL_EPOCHS) + found["trials"] * (part(COOLING_EPOCHS) + recover), train + recover


def table(results: dict[str, dict[str, Any]]) -> str:
    """Markdown: one line for each run."""
    head = (
        "row",
        "seed",
        "test error %, dense",
        "sparse",
        "change (95%)",
        "validation: dense, sparse (lost at most)",
    )
    head += (
        "non-zeros",
        "parameters",
        "MACs",
        "bytes",
        "latency, batch 128",
        "trials",
        "epochs, of one run",
        "search",
        "asked for",
    )
    lines = ["# What a budget or a goal alone gives", "", "Written by `benchmarks/search.py`, which says how.", ""]
    lines += [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for row, (recipe, arguments) in ROWS.items():
        for seed, found in sorted(results.get(row, {}).items()):
            change = found["change"] or {"low": float("nan"), "high": float("nan")}
            validation, sizes = found["validation"], found["compression"]
            latency = (found["latency"] or {}).get("batch_128")
            asked = f"`{recipe}` {' '.join(arguments)}: " + ", ".join(
                text
                for text, value in (
                    (f"budget {'kept' if found['met'] else 'not kept'}", found["met"]),
                    (f"goal {'reached' if found['reached'] else 'not reached'}", found["reached"]),
                )
                if value is not None
            )
            cells = [row, seed, f"{found['test']['dense']:.2f}", f"{found['test']['sparse']:.2f}"]
            cells += [f"{change['low']:+.2f} to {change['high']:+.2f}"]
            by_nll = "" if validation.get("at_most") is None else f"; by the NLL {validation['at_most']:+.2f}"
            cells += [f"{validation['dense']:.2f}, {validation['sparse']:.2f} ({validation['upper']:+.2f}{by_nll})"]
            cells += [f"{sizes[name]:.3g}x" for name in COMPRESSIONS]
            cells += [
                f"{latency:.3g}x" if latency else "",
                str(found["trials"]),
                "{} of {} ({:.1f}x)".format(*epochs(found), epochs(found)[0] / epochs(found)[1]),
            ]
            cells += [f"{found['seconds']['search']:.0f} s", asked]
            lines.append(f"| {' | '.join(cells)} |")
    for row, found in results.items():
        if len(found) > 1:
            runs = list(found.values())
            error = mean(one["test"]["sparse"] for one in runs)
            lines += ["", f"{row}: mean of {len(runs)} seeds {error:.2f}% at {_mean_size(row, runs)}."]
        if row in PUBLISHED and found:
            lines += ["", f"{row}: published {PUBLISHED[row]}."]
    for name, one in next(iter(results.values()), {}).items():
        lines += ["", f"{one['machine'].get('cpu')}, torch {one['versions']['torch']}, seed {name} first."]
        break
    return "\n".join(lines) + "\n"


def _mean_size(row: str, runs: list[dict[str, Any]]) -> str:
    """The mean size in the measure of the row's goal; in non-zeros if it has none."""
    if "latency" in row:
        return f"{mean(one['latency']['batch_128'] for one in runs):.3g}x less latency at batch 128"
    measure, what = ("parameters", "parameters") if "parameters" in row else ("nonzero", "non-zeros")
    return f"{mean(one['compression'][measure] for one in runs):.3g}x fewer {what}"


def main() -> None:
    """Run the rows for all seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=None)
    parser.add_argument("--row", action="append", choices=list(ROWS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, default=Path("runs/benchmarks/search"))
    options = parser.parse_args()
    for seed in options.seeds:
        for row in options.row or ROWS:
            if (report := run(row, seed, options)) is None:
                continue
            results = read(RESULTS / "search.json")  # other rows may have been made meanwhile
            results.setdefault(row, {})[str(seed)] = entry(report)
            write(RESULTS / "search.json", results)
            (RESULTS / "search.md").write_text(table(results), encoding="utf-8")


if __name__ == "__main__":
    main()
