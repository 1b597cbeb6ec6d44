"""The table of `svdc evaluate` for runs of recipes: error and calibration, and how well each net tells other data from its own.

    python benchmarks/evaluate.py RUN [RUN ...] [--cifar FOLDER_OF_CIFAR10]

Each RUN is the folder of a finished run (those of benchmarks/mnist.py); nothing is trained. Results are kept by the run's name,
so runs may be added later, or evaluated again by a newer version: benchmarks/results/evaluate.json and evaluate.md. With
--cifar, its pictures (grey, of the size of the run) are data from elsewhere too. benchmarks/mnist.py takes its figures of
samples from here, benchmarks/readme.py the table of README.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from svdcompress.pipeline import versions

RESULTS = Path(__file__).resolve().parent / "results"
METRICS = {"error": ("error %", ".2f"), "nll": ("NLL", ".4f"), "brier": ("Brier", ".4f"), "ece": ("ECE", ".4f")}


def evaluate(run: Path, cifar: str | None) -> dict[str, Any]:
    """What `svdc evaluate --json` says of a run; exits with its message if it fails."""
    outside = ["--outside", f"cifar10:{cifar}"] if cifar else []
    command = [sys.executable, "-m", "svdcompress", "evaluate", str(run), *outside, "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{run}: {done.stderr.strip()}")
    found = json.loads(done.stdout)
    report = json.loads((run / "report.json").read_text(encoding="utf-8"))
    found["compression"], found["versions"] = report["compression"], versions()
    for row in found["contenders"]:
        row.pop("reliability", None)
        row.pop("rejection", None)
    return found


def table(results: dict[str, dict[str, Any]]) -> str:
    """The results as Markdown: one row for each run and net."""
    lines = [
        "# `svdc evaluate`",
        "",
        "Written by `benchmarks/evaluate.py`, on test data. AUROC: how well a score tells the test inputs from others (0.5:",
        "not at all). Temperature and dropout rate are fitted on validation data.",
    ]
    for name, result in results.items():
        others = list(dict.fromkeys(key for row in result["contenders"] for key in row["ood"]))
        scores = [f"AUROC {other}: by 1 - confidence, entropy, MI" for other in others]
        ratio = result["compression"]
        lines += [
            "",
            f"## {name}",
            "",
            f"{ratio['nonzero']:.1f}x fewer non-zeros, {ratio['parameters']:.1f}x fewer parameters.",
        ]
        lines += ["", f"| | {' | '.join([heading for heading, _ in METRICS.values()] + scores)} |"]
        lines.append("|---" * (1 + len(METRICS) + len(scores)) + "|")
        for row in result["contenders"]:
            cells = [f"{row['metrics'][key]:{form}}" for key, (_, form) in METRICS.items()]
            for other in others:
                areas = row["ood"].get(other) or {}
                found = [areas.get(score) for score in ("softmax", "entropy", "mutual_information")]
                cells.append(", ".join("-" if area is None else f"{area:.3f}" for area in found))
            lines.append(f"| {row['name'].replace('samples', str(result['samples']) + ' samples')} | {' | '.join(cells)} |")
    made = dict.fromkeys(", ".join(f"{name} {number}" for name, number in one["versions"].items()) for one in results.values())
    return "\n".join([*lines, "", *(f"{line}." for line in made), ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--cifar", help="folder of CIFAR-10")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of evaluate.json and evaluate.md")
    options = parser.parse_args()
    path = options.results / "evaluate.json"
    results = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    for run in options.runs:
        results[run.name] = evaluate(run, options.cifar)
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        path.with_suffix(".md").write_text(table(results), encoding="utf-8")
        print(run.name, flush=True)


if __name__ == "__main__":
    main()
