"""How to judge a trial best from few validation examples: each estimate of the drop, compared with the drop on test data.

    python benchmarks/judges.py RUN [RUN ...] [--results FOLDER]

RUN: folders of finished searches (`svdc sparsify digits --max-drop 0.5 --seed S --out RUN`), whose `trials/` are read. For
each trial, the points of error above the dense model's are estimated in several ways: counted on the validation examples;
from the rise of the NLL with the best temperature (svdcompress.search.PER_NAT), on validation examples, on training examples,
and on both together; and from the expected error by the validation examples' probabilities, mean 1 - max p. Reported are each
estimate's correlation with the points counted on the test examples, and the root mean square difference from them, over
trials that lose less than 4 points there. The seeds should not be those of benchmarks/search.py, as the test data are read
(the stored runs had `--set search.confidence=0.501`, with which counting alone guides a search). Written to
benchmarks/results/judges.json and judges.md.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import nn

from svdcompress import checkpoint
from svdcompress.calibrate import Draws, draws_of, fit_knob, nll_rows
from svdcompress.likelihoods import likelihood_for
from svdcompress.pipeline import open_run, versions
from svdcompress.pipeline._select import whole
from svdcompress.search import PER_NAT
from svdcompress.sources import Data, make_model

RESULTS = Path(__file__).resolve().parent / "results"
JUDGES = ("counted", "validation NLL", "training NLL", "both", "expected error")
NEAR = 4.0
"""Trials that lose more points of test error than this are not compared, as no budget is in doubt there."""


def figures(model: nn.Module, data: Data) -> dict[str, float]:
    """A model's points of error, as estimated by each judge, and counted on the test data ("test")."""
    likelihood = likelihood_for("classification")
    held, train, test = (draws_of(model, part, likelihood) for part in (data.validation, data.train, data.test))
    knob = fit_knob(likelihood, held)[0]
    p = (held.outputs[0].double() * math.exp(-knob)).softmax(1)
    rows = {"validation NLL": nll_rows(likelihood, held, knob), "training NLL": nll_rows(likelihood, train, knob)}
    rows["both"] = torch.cat(list(rows.values()))
    return {
        "counted": _wrong(held),
        **{name: 100 * PER_NAT * float(each.mean()) for name, each in rows.items()},
        "expected error": 100 * float((1 - p.amax(1)).mean()),
        "test": _wrong(test),
    }


def _wrong(draws: Draws) -> float:
    return 100 * float((draws.outputs[0].argmax(1) != draws.targets).double().mean())


def trials(run: Path) -> list[dict[str, float]]:
    """The drop of each trial by each judge and on the test data, and how many times fewer non-zeros it has."""
    opened = open_run(run)
    search = opened.results["search"]
    dense = figures(opened.dense, opened.data)
    found = []
    for trial in search["trials"]:
        file = run / "trials" / f"{trial['number']:02d}.safetensors"
        extra = checkpoint.read_manifest(file)["extra"]
        one = figures(whole(checkpoint.load(file, make_model(opened.recipe.model)), extra["inputs"]).eval(), opened.data)
        drops = {key: one[key] - dense[key] for key in (*JUDGES, "test")}
        ratio = search["dense"]["costs"]["nonzero"] / trial["costs"]["nonzero"]
        found.append({"ratio": ratio, **drops})
    return found


def table(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    lines = ["# What few validation examples say of a trial", "", "Written by `benchmarks/judges.py`, which says how."]
    every = [row for run in results["runs"].values() for row in run]
    near = [row for row in every if row["test"] < NEAR]
    lines += ["", f"Points of error lost; {len(near)} of {len(every)} trials lose less than {NEAR:g} on the test data:"]
    lines += ["", "| judge | correlation | root mean square difference | mean difference |", "|---|---|---|---|"]
    test = torch.tensor([row["test"] for row in near])
    for judge in JUDGES:
        said = torch.tensor([row[judge] for row in near])
        correlation = float(torch.corrcoef(torch.stack([said, test]))[0, 1])
        off = said - test
        lines.append(
            f"| {judge} | {correlation:.2f} | {math.sqrt(float(off.square().mean())):.2f} | {float(off.mean()):+.2f} |"
        )
    head = ("run", "fewer non-zeros", *JUDGES, "on test data")
    lines += ["", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name, run in results["runs"].items():
        for row in sorted(run, key=lambda one: one["ratio"]):
            cells = [f"{row[key]:+.2f}" for key in (*JUDGES, "test")]
            lines.append(f"| {name} | {row['ratio']:.3g}x | {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"{', '.join(f'{a} {b}' for a, b in results['versions'].items())}.", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = {"runs": {run.name: trials(run) for run in options.runs}, "versions": versions()}
    (options.results / "judges.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (options.results / "judges.md").write_text(table(results), encoding="utf-8")


if __name__ == "__main__":
    main()
