"""The table of `svdc evaluate` for runs of recipes: error, calibration, and how well each net detects data from elsewhere.

    python benchmarks/evaluate.py RUN [RUN ...] [--cifar FOLDER_OF_CIFAR10] [--outside NAME] [--members N] [--shift]
                                  [--samples N] [--trust-code]

Each RUN is the folder of a finished run (such as those of benchmarks/mnist.py). Its controls are trained once and kept there:
a network pruned by magnitude and, with --members, a deep ensemble. Results are stored by the run's name in
benchmarks/results/evaluate.json and evaluate.md, so that runs can be added later, or evaluated again with a newer version.
With --cifar, its images (grayscale, at the run's size) are used as data from elsewhere, too, as are those of --outside (such
as mnist:FOLDER, for runs of benchmarks/real.py, which need --trust-code); with --shift, the nets are also evaluated on
corrupted test data. benchmarks/mnist.py takes its figures for samples from here, and benchmarks/readme.py takes
the table of README.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from svdcompress.pipeline import versions
from svdcompress.uncertainty import significant

RESULTS = Path(__file__).resolve().parent / "results"
METRICS = {"error": ("error %", ".2f"), "nll": ("NLL", ".4f"), "brier": ("Brier", ".4f"), "ece": ("ECE", ".4f")}


def evaluate(run: Path, more: list[str]) -> dict[str, Any]:
    """The figures of `svdc evaluate --json` for a run; exits with its message if it fails. more: further options."""
    command = [sys.executable, "-m", "svdcompress", "evaluate", str(run), *more, "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{run}: {done.stderr.strip()}")
    found = json.loads(done.stdout)
    report = json.loads((run / "report.json").read_text(encoding="utf-8"))
    found["compression"], found["versions"] = report["compression"], versions()
    for row in found["contenders"]:
        row.pop("reliability", None)
        row.pop("rejection", None)
        row["answered"] = (row.pop("selective", None) or {}).get("answered", [])
    for by_name in (found.get("shift") or {}).get("curves", {}).values():
        for name, points in by_name.items():
            by_name[name] = [{key: round(value, 6) for key, value in point.items()} for point in points]
    return found


def table(results: dict[str, dict[str, Any]]) -> str:
    """The results as Markdown: one row for each run and net."""
    lines = [
        "# `svdc evaluate`",
        "",
        "Written by `benchmarks/evaluate.py`, on test data. AUROC: how well a score tells the test inputs from others (0.5:",
        "not at all). Temperature and dropout rate are fitted on validation data. Better (+) and worse (-) than dense with its",
        "temperature are those whose 95% interval, by bootstrap over the test inputs, leaves out 0.",
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
            cells = [f"{row['metrics'][key]:{form}}{_sign(row, key)}" for key, (_, form) in METRICS.items()]
            for other in others:
                areas = row["ood"].get(other) or {}
                found = [areas.get(score) for score in ("softmax", "entropy", "mutual_information")]
                cells.append(", ".join("-" if area is None else f"{area:.3f}" for area in found))
            lines.append(f"| {row['name'].replace('samples', str(result['samples']) + ' samples')} | {' | '.join(cells)} |")
        lines += _answered(result) + _shifted(result)
    made = dict.fromkeys(", ".join(f"{name} {number}" for name, number in one["versions"].items()) for one in results.values())
    return "\n".join([*lines, "", *(f"{line}." for line in made), ""])


def _sign(row: dict[str, Any], key: str) -> str:
    sign = significant(row["difference"][key]) if row.get("difference") else 0
    return {-1: " +", 1: " -", 0: ""}[sign]


def _answered(result: dict[str, Any]) -> list[str]:
    """The shares of the inputs that are answered, for each accuracy wanted of the answers."""
    rows = [row for row in result["contenders"] if row.get("answered")]
    if not rows:
        return []
    heads = [f"answered at {100 * (1 - entry['loss']):g}%" for entry in rows[0]["answered"]]
    lines = ["", f"| | {' | '.join(heads)} |", "|---" * (1 + len(heads)) + "|"]
    shares = [(row["name"], [f"{100 * entry['share']:.1f}%" for entry in row["answered"]]) for row in rows]
    return [*lines, *(f"| {name} | {' | '.join(cells)} |" for name, cells in shares)]


def _shifted(result: dict[str, Any]) -> list[str]:
    """Means over kinds and levels of corruption."""
    if not result.get("shift"):
        return []
    means, kinds = result["shift"]["mean"], ", ".join(result["shift"]["curves"])
    lines = ["", f"Corrupted ({kinds}; means of levels 1 to 5):", "", f"| | {' | '.join(h for h, _ in METRICS.values())} |"]
    lines.append("|---" * (1 + len(METRICS)) + "|")
    for name, row in means.items():
        lines.append(f"| {name} | {' | '.join(f'{row[key]:{form}}{_sign(row, key)}' for key, (_, form) in METRICS.items())} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--cifar", help="folder of CIFAR-10")
    parser.add_argument("--outside", action="append", default=[], metavar="NAME", help="other images, as mnist:FOLDER")
    parser.add_argument("--samples", type=int, default=100, help="draws of the weights")
    parser.add_argument("--trust-code", action="store_true", help="of runs whose model or data are Python code")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of evaluate.json and evaluate.md")
    parser.add_argument("--members", type=int, default=0, help="networks of a deep ensemble")
    parser.add_argument("--shift", action="store_true", help="corrupted test data, too")
    options = parser.parse_args()
    more = ["--members", str(options.members), "--samples", str(options.samples)]
    more += [f"--{name}" for name in ("shift", "trust-code") if getattr(options, name.replace("-", "_"))]
    outside = [*([f"cifar10:{options.cifar}"] if options.cifar else []), *options.outside]
    more += [part for name in outside for part in ("--outside", name)]
    path = options.results / "evaluate.json"
    results = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    for run in options.runs:
        results[run.name] = evaluate(run, more)
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        path.with_suffix(".md").write_text(table(results), encoding="utf-8")
        print(run.name, flush=True)


if __name__ == "__main__":
    main()
