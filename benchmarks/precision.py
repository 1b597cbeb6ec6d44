"""Training with the variance path in bfloat16 and in float32: the MNIST recipes, from the same dense weights and seeds.

    python benchmarks/mnist.py --data FOLDER_OF_THE_IDX_FILES ...       # the runs whose dense weights both start from
    python benchmarks/precision.py --data FOLDER_OF_THE_IDX_FILES [--recipe mnist-lenet300 ...] [--seeds 0 1 2]

Any machine will do: without the instructions for it, bfloat16 is slow but not different. Finished runs are not repeated;
results are written after each pair to benchmarks/results/precision.json and precision.md.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from mnist import RECIPES, arguments, cpu, figures, run

from svdcompress.layers import fast_bfloat16

DTYPES = ("float32", "bfloat16")

Pairs = dict[str, dict[str, list[dict[str, Any]]]]
"""{recipe: {dtype: figures for each seed}}."""

COLUMNS: dict[str, tuple[str, Any]] = {
    "error %": ("{:.2f}", lambda row: row["error"]),
    "non-zeros": ("{:.1f}x", lambda row: row["compression"]["nonzero"]),
    "parameters": ("{:.1f}x", lambda row: row["compression"]["parameters"]),
    "NLL of 100 samples": ("{:.4f}", lambda row: row["sampled"]["nll"]),
    "ECE of 100 samples": ("{:.4f}", lambda row: row["sampled"]["ece"]),
}


def pair(recipe: str, seed: int, data: str, runs: Path) -> dict[str, dict[str, Any]] | None:
    """Figures of a run in each precision, from the dense weights of the run of mnist.py; None if one of these is missing."""
    first = runs / f"{recipe}-{seed}"
    if not (first / "report.json").is_file():
        return None
    found = {}
    for dtype in DTYPES:
        if dtype == "float32" and not (torch.cuda.is_available() or fast_bfloat16(torch.device("cpu"))):
            report = run(recipe, seed, data, runs)  # the recipe's own "auto" was float32
        else:
            options = ["--weights", str(first / "dense.safetensors"), "--set", f"convert.variance_dtype={dtype}"]
            report = run(recipe, seed, data, runs, name=f"{recipe}-{seed}-{dtype}", options=options)
        if report is None:
            return None
        found[dtype] = figures(report)
    return found


def table(found: Pairs, facts: dict[str, Any]) -> str:
    """Markdown: the mean and each seed's value of each column, with both dtypes of a recipe below each other."""
    lines = [
        "# The variance path in bfloat16 beside float32",
        "",
        "Written by `benchmarks/precision.py`: the same recipes, seeds and dense weights; test data. Means over the seeds, "
        "in brackets each seed. Within seed noise: the means differ by less than two standard errors of that difference.",
        "",
        f"| recipe | seeds | variance path | {' | '.join(COLUMNS)} |",
        "|---" * (len(COLUMNS) + 3) + "|",
    ]
    for recipe, rows in found.items():
        for dtype, ones in rows.items():
            cells = []
            for form, value in COLUMNS.values():
                values = [value(one) for one in ones]
                each = f" ({', '.join(form.format(v) for v in values)})" if len(values) > 1 else ""
                cells.append(form.format(mean(values)) + each)
            seeds = ", ".join(str(one["seed"]) for one in ones)
            lines.append(f"| {recipe} | {seeds} | {dtype} | {' | '.join(cells)} |")
    lines += ["", *(f"- {recipe}: {verdict(rows)}" for recipe, rows in found.items())]
    lines += ["", f"{facts['cpu']}. " + ", ".join(f"{name} {number}" for name, number in facts["versions"].items()) + ".", ""]
    return "\n".join(lines)


def verdict(rows: dict[str, list[dict[str, Any]]]) -> str:
    """The differences of the means in standard errors."""
    if len(rows["float32"]) < 2:
        return "one seed: no noise to compare with."
    parts = []
    for name, (_, value) in COLUMNS.items():
        one, other = ([value(row) for row in rows[dtype]] for dtype in ("float32", "bfloat16"))
        spread = ((stdev(one) ** 2 + stdev(other) ** 2) / len(one)) ** 0.5
        parts.append(f"{name} {(mean(other) - mean(one)) / spread:+.1f}" if spread else f"{name} the same")
    return "bfloat16 less float32, in standard errors: " + ", ".join(parts) + "."


def main() -> None:
    options = arguments(__doc__)
    found: Pairs = {}
    missing = []
    for recipe in options.recipe or RECIPES:
        for seed in options.seeds:
            both = pair(recipe, seed, options.data, options.runs)
            if both is None:
                missing.append(f"{recipe}, seed {seed}")
                continue
            for dtype, row in both.items():
                found.setdefault(recipe, {}).setdefault(dtype, []).append(row)
            report = json.loads((options.runs / f"{recipe}-{seed}-bfloat16" / "report.json").read_text(encoding="utf-8"))
            facts = {"cpu": cpu(), "versions": report["versions"]}
            content = {"machine": facts, "runs": found}
            (options.results / "precision.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            (options.results / "precision.md").write_text(table(found, facts), encoding="utf-8")
    if missing:
        sys.exit(f"without a pair of runs (benchmarks/mnist.py makes the first): {'; '.join(missing)}")


if __name__ == "__main__":
    main()
