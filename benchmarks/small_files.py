"""Every form of a finished run's file: its bytes, and the error of the file itself in onnxruntime.

    python benchmarks/small_files.py FOLDER_OF_RUNS [--only mnist-lenet300 ...] [--results FOLDER]

Runs are folders NAME-SEED, as left by benchmarks/mnist.py and benchmarks/search.py. Forms are made by `svdc export` and
`svdc pack`, and archives are unpacked again by `svdc unpack`; ratios are to the dense float32 ONNX file, with all bytes
counted. Forms that lose more are not left out. Nothing is chosen on test data here. Results:
benchmarks/results/small_files.json and small_files.md.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from mnist import machine, read, write

from svdcompress.pipeline import open_run, versions
from svdcompress.uncertainty import paired_shares, wilson

HERE = Path(__file__).resolve().parent
FORMS: dict[str, list[str]] = {
    "ONNX": ["export"],
    "compact ONNX": ["export", "--compact"],
    "compact ONNX, float16": ["export", "--compact", "--precision", "float16"],
    "compact ONNX, int8": ["export", "--compact", "--precision", "int8"],
    "compact ONNX, int4": ["export", "--compact", "--precision", "int4"],
    "archive, float32": ["pack", "--precision", "float32"],
    "archive, float16": ["pack", "--precision", "float16"],
    "archive, int8": ["pack", "--precision", "int8"],
    "archive, bits of the posterior": ["pack", "--precision", "posterior"],
    "archive, int4": ["pack", "--precision", "int4"],
    "archive, fewest bits": ["pack", "--precision", "auto"],
}
"""For each form: the subcommand and its options."""


def svdc(*arguments: str) -> str | None:
    """Run the command; returns None, or why it failed."""
    done = subprocess.run([sys.executable, "-m", "svdcompress", *arguments], capture_output=True, text=True, cwd=HERE.parent)
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no reason given"])[-1]


def wrong(file: Path, examples: Any) -> np.ndarray:
    """Which test examples a file answers wrongly (N,)."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    name, found = session.get_inputs()[0].name, []
    for x, y in examples.batches(500):
        found.append(session.run(None, {name: x.numpy()})[0].argmax(1) != y.numpy())
    return np.concatenate(found)


def forms(folder: Path) -> dict[str, Any]:
    """Bytes, error and the change against the float32 file, for each form of one run."""
    import torch

    opened = open_run(folder)
    test = opened.data.test
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        base = None
        for name, (command, *options) in {"dense": ["dense"], **FORMS}.items():
            file = Path(place) / f"{len(found)}.{'svdc' if command == 'pack' else 'onnx'}"
            problem = None if command == "dense" else svdc(command, str(folder), *options, "--out", str(file))
            if problem is not None:
                found[name] = {"problem": problem}
                continue
            run = folder / "dense.onnx" if command == "dense" else file
            size = run.stat().st_size
            if command == "pack":
                run = Path(place) / f"{len(found)}-unpacked.onnx"
                if (problem := svdc("unpack", str(file), "--out", str(run))) is not None:
                    found[name] = {"problem": problem}
                    continue
            missed = torch.from_numpy(wrong(run, test))
            base = missed if name == "ONNX" else base
            found[name] = {
                "bytes": size,
                "error": 100 * float(missed.double().mean()),
                "interval": [100 * bound for bound in wilson(float(missed.sum()), len(missed))],
            }
            if base is not None:
                low, high = paired_shares(base, missed)
                found[name]["change"] = [found[name]["error"] - 100 * float(base.double().mean()), 100 * low, 100 * high]
    return found


def table(results: dict[str, Any]) -> str:
    """Markdown: a section for each recipe, with means over its seeds."""
    groups: dict[str, dict[str, Any]] = defaultdict(dict)
    for run, one in results["runs"].items():
        recipe, _, seed = run.rpartition("-")
        groups[recipe][seed] = one
    lines = [
        "# Small files",
        "",
        "Written by `benchmarks/small_files.py`, which says how. Error: of the test data, by the file in",
        "",
    ]
    lines[-1:] = [
        "onnxruntime; times smaller: than the dense float32 file, all bytes counted; means over the seeds, in brackets each"
    ]
    lines += ["seed's error. Change: against the float32 file of the same run, in points, paired, 95%, by seed.", ""]
    for recipe, runs in sorted(groups.items()):
        lines += [f"## {recipe}, seeds {', '.join(sorted(runs))}", ""]
        lines += ["| form | bytes | times smaller | error % | change by seed |", "|---|---|---|---|---|"]
        for form in ["dense", *FORMS]:
            ends = [runs[seed]["forms"].get(form, {"problem": "not measured"}) for seed in sorted(runs)]
            made = [
                (one, runs[seed]["forms"]["dense"]["bytes"])
                for seed, one in zip(sorted(runs), ends, strict=True)
                if "bytes" in one
            ]
            if not made:
                lines.append(f"| {form} | | | | {ends[0]['problem']} |")
                continue
            errors = [one["error"] for one, _ in made]
            each = f" ({', '.join(f'{error:.2f}' for error in errors)})" if len(errors) > 1 else ""
            moved = "; ".join("{:+.2f} [{:+.2f}, {:+.2f}]".format(*one["change"]) for one, _ in made if "change" in one)
            smaller = mean(dense / one["bytes"] for one, dense in made)
            cells = [form, f"{mean(one['bytes'] for one, _ in made):,.0f}", f"{smaller:.3g}x", f"{mean(errors):.2f}{each}"]
            lines.append(f"| {' | '.join([*cells, moved if form not in ('dense', 'ONNX') else ''])} |")
        lines.append("")
    names = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    return "\n".join([*lines, f"{results['machine']['cpu']}; {names}.", ""])


def main() -> None:
    """Measure all finished runs of a folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--only", nargs="+", help="names of recipes or rows, without the seed")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args()
    path = options.results / "small_files.json"
    for folder in sorted(options.runs.iterdir()):
        if not (folder / "report.json").is_file() or (options.only and folder.name.rpartition("-")[0] not in options.only):
            continue
        results = read(path) or {"runs": {}}
        results["runs"][folder.name] = {"forms": forms(folder)}
        results |= {"machine": machine(), "versions": versions()}
        write(path, results)
        path.with_suffix(".md").write_text(table(results), encoding="utf-8")
        print(folder.name, flush=True)


if __name__ == "__main__":
    main()
