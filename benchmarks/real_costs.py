"""How long the rows of real.py and real_nets.py take on this machine, estimated from a few steps of each.

    python benchmarks/real_costs.py --cifar FOLDER --resnet FOLDER --rxnfp FOLDER --yields FOLDER --crepe FOLDER --speech FILE
                                    --dncnn FOLDER [--only resnet56-macs4x ...] [--runs FOLDER]

The folders are those of real.py and real_nets.py; cases whose folders are not given are left out, with a message. Hours are
those of `svdc sparsify --dry-run` with the recipe as it is: they assume all trials and the full size of the network, which
shrinks during a run, so they are upper bounds. Peers take about one of our trainings each in addition. Results:
benchmarks/results/real_costs.json and real_costs.md, which also say for which cases there are results.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import real
import real_nets
import torch
from mnist import machine, read, write

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "real_costs.json"
FOLDERS = ("cifar", "resnet", "rxnfp", "yields", "crepe", "speech", "dncnn")


def commands(options: argparse.Namespace) -> dict[str, list[str]]:
    """The arguments of `svdc sparsify` for each case."""
    found = real_nets.cases(options)
    if options.cifar and options.resnet:
        found |= {name: real.arguments(name, options) for name in real.CASES}
    return found


def estimated(arguments: list[str]) -> dict[str, Any]:
    """What --dry-run says; {"problem": ...} if it fails."""
    command = [sys.executable, "-m", "svdcompress", "sparsify", *arguments, "--dry-run", "--json", "--trust-code"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=HERE.parent)
    if done.returncode:
        return {"problem": (done.stderr.strip().splitlines() or ["no reason given"])[-1]}
    found = json.loads(done.stdout)
    return {key: found[key] for key in ("seconds", "parameters", "memory", "examples", "device")}


def table(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    there = {name for file in ("real", "real_nets") for name in read(HERE / "results" / f"{file}.json")}
    lines = ["# What the real networks cost here", "", "Written by `benchmarks/real_costs.py`, which says how.", ""]
    lines += [
        "| case | parameters | training examples | dense training | search | measured in full |",
        "|---|---|---|---|---|---|",
    ]
    for name, one in results["cases"].items():
        if "problem" in one:
            lines.append(f"| {name} | {one['problem']} | | | | |")
            continue
        seconds = one["seconds"]
        dense = f"{seconds['dense'] / 3600:.1f} h" if "dense" in seconds else "its weights are public"
        run = any(row == name or row.startswith(f"{name}-") for row in there)  # with a label, or without
        done = "with fewer epochs" if run else "no: it waits for a GPU"
        size = f"{one['parameters'] / 1e6:.2f} M"
        cells = [name, size, f"{one['examples']['train']:,}", dense, f"{seconds['search'] / 3600:.1f} h", done]
        lines.append(f"| {' | '.join(cells)} |")
    told = results["machine"]
    return "\n".join([*lines, "", f"{told.get('cpu')}, one thread, beside other work; torch {results['torch']}.", ""])


def main() -> None:
    """Estimate all cases, one after another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in FOLDERS:
        parser.add_argument(f"--{name}", type=lambda text: Path(text).resolve())
    parser.add_argument("--only", nargs="+", choices=[*real.CASES, *real_nets.NAMES])
    parser.add_argument("--runs", type=Path, default=HERE.parent / "runs" / "benchmarks" / "real")
    options = parser.parse_args()
    options.runs, options.epochs, options.set, options.label = options.runs.resolve(), None, [], ""
    options.dense = options.goal = None
    found = commands(options)
    wanted = options.only or [*real.CASES, *real_nets.NAMES]
    if left := [name for name in wanted if name not in found]:
        print(f"left out, as their folders are not named: {', '.join(left)}")
    for name in (name for name in wanted if name in found):
        results = read(RESULTS)
        results.setdefault("cases", {})[name] = estimated(found[name])
        results |= {"machine": machine(), "torch": torch.__version__}
        write(RESULTS, results)
        RESULTS.with_suffix(".md").write_text(table(results), encoding="utf-8")
        print(name, results["cases"][name].get("seconds", results["cases"][name]), flush=True)


if __name__ == "__main__":
    main()
