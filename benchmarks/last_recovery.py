"""Should the epochs left in a search go into further recovery of its best trial, or into more trials?

    python benchmarks/last_recovery.py [--row default-parameters10x ...] [--seeds 0 1 2 3 4 5 6 7]

The digits' recipe is run with a goal in both ways, from the same dense start and with at most three times the epochs of one
run: with as many trials as fit ("trials alone"), or with the default of `search.trials`, where the best trial recovers
further ("recovers on"). If the recovery costs no trial, the second way has more epochs. Each comparison is made with the
recipe's own long recovery, and with the epochs of a model without a recipe (20 and 5).

Each run chooses a trial by its validation data (which are few, so that they are judged by the NLL, together with training
examples), and the test data are read for that one alone. Results are written after each pair of runs to
benchmarks/results/last_recovery.json and last_recovery.md; stored pairs are not run again.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from mnist import add_row, machine, made_on, read
from scipy import stats

from svdcompress.pipeline import levels_and_trials, run, versions
from svdcompress.recipe import load_recipe

RESULTS = Path(__file__).resolve().parent / "results"

SHORT = ["train.epochs=20", "recover.epochs=5"]

ROWS: dict[str, tuple[str, list[str]]] = {
    "default-parameters10x": ("parameters=10x", SHORT),
    "default-nonzero50x": ("nonzero=50x", SHORT),
    "recipe-parameters10x": ("parameters=10x", []),
    "recipe-nonzero50x": ("nonzero=50x", []),
}
"""For each row: the goal, and further settings."""

WAYS = ("trials alone", "recovers on")

SETTINGS = ("uncertainty.samples=0", "report.html=false", "report.latency=false")


def made(row: str, seed: int) -> dict[str, Any]:
    """The figures of both ways."""
    goal, more = ROWS[row]
    settings = [*SETTINGS, *more, f"seed={seed}", f"search.goal='{goal}'"]
    _, fewer = levels_and_trials(load_recipe("digits", settings))
    _, trials = levels_and_trials(load_recipe("digits", [*settings, "search.max_drop=100"]))  # a budget reserves no recovery
    found: dict[str, Any] = {}
    for way, own in zip(WAYS, ([f"search.trials={trials}"], []), strict=True):
        with tempfile.TemporaryDirectory() as folder:
            results = run(load_recipe("digits", [*settings, *own]), Path(folder) / "run")
        search = results["search"]
        chosen = next(trial for trial in search["trials"] if trial["number"] == search["chosen"])
        found[way] = {
            "test": {name: results["sparse"]["metrics"][name] for name in ("error", "nll")},
            "validation": chosen["metrics"],
            "reached": search["reached"],
            "trials": sum(trial["continues"] is None for trial in search["trials"]),
            "continues": chosen["continues"],
            "epochs": search["epochs"],
        }
    return {
        "ways": found,
        "may": [trials, fewer],
        "machine": machine(),
        "versions": versions(),
        "threads": torch.get_num_threads(),
    }


def table(results: dict[str, Any]) -> str:
    """Markdown: means over seeds, and the mean of the paired differences with its t interval."""
    head = ["row", "seeds", "epochs of one run", *(f"{way}: test error %, NLL (epochs)" for way in WAYS)]
    head += ["error: change (95%)", "NLL: change (95%)", "of the models taken, recovered on"]
    lines = ["# What is left of a search's epochs", "", "Written by `benchmarks/last_recovery.py`, which says how.", ""]
    lines += [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for row, seeds in results.items():
        both = [one["ways"] for one in seeds.values()]
        cells = [row, str(len(both)), str(both[0][WAYS[0]]["epochs"]["one_run"])]
        for way in WAYS:
            error, nll = (mean(one[way]["test"][name] for one in both) for name in ("error", "nll"))
            cells.append(f"{error:.2f}, {nll:.4f} ({mean(one[way]['epochs']['search'] for one in both):.0f})")
        for name, digits in (("error", 2), ("nll", 4)):
            changes = [one[WAYS[1]]["test"][name] - one[WAYS[0]]["test"][name] for one in both]
            text = f"{mean(changes):+.{digits}f}"
            if len(changes) > 1 and max(changes) > min(changes):
                low, high = stats.t.interval(0.95, len(changes) - 1, mean(changes), stats.sem(changes))
                text += f" ({low:+.{digits}f} to {high:+.{digits}f})"
            cells.append(text)
        cells.append(f"{sum(one[WAYS[1]]['continues'] is not None for one in both)} of {len(both)}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, *made_on(results)]) + "\n"


def main() -> None:
    """Run the rows and seeds without stored results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(8)))
    options = parser.parse_args()
    path = RESULTS / "last_recovery.json"
    for seed in options.seeds:
        for row in options.row:
            if str(seed) in read(path).get(row, {}):
                continue
            found = made(row, seed)
            add_row(path, ROWS, row, seed, found, table)
            print(row, seed, {way: round(one["test"]["error"], 2) for way, one in found["ways"].items()}, flush=True)


if __name__ == "__main__":
    main()
