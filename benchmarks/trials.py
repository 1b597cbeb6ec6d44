"""How a trial gets to its size: cut at once or in steps while it cools (`search.cuts`), with or without distillation?

    python benchmarks/trials.py [--data FOLDER_OF_THE_IDX_FILES] [--row digits-parameters20x ...] [--seeds 0 1 2]

Each variant has the same dense start, the same levels and the same trials, one at each of four pressures, whatever a search
itself would try; the run chooses one by its validation data, and the test data are read for that one alone. Everything else
is as in the recipe; the epochs are the same for all variants (distillation also runs the dense model on each batch). Searches
always cut single weights at once: the rows for them show why (`Weights` is given the steps of units here). Results are
written after each row and seed to benchmarks/results/trials.json and trials.md; stored results are not made again.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any
from unittest import mock

import torch
from mnist import add_row, machine, made_on, read

from svdcompress.likelihoods import likelihood_for
from svdcompress.pipeline import _search, open_run, run, versions
from svdcompress.pipeline._search import Search
from svdcompress.pipeline._weight_ways import Weights
from svdcompress.recipe import load_recipe
from svdcompress.search import Strategy, Trial
from svdcompress.train import losses
from svdcompress.uncertainty import paired_shares

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"

ROWS: dict[str, tuple[str, str, list[str]]] = {
    "digits-parameters10x": ("digits", "parameters=10x", []),
    "digits-parameters20x": ("digits", "parameters=20x", []),
    "digits-macs0.1": ("digits", "macs=0.1", []),
    "digits-nonzero64x": ("digits", "nonzero=64x", []),
    "lenet300-parameters40x": ("mnist-lenet300-units", "parameters=40x", ["recover.epochs=30"]),
}
"""For each row: the recipe, the goal, and further settings."""

VARIANTS = {
    "one cut": ["search.cuts=1"],
    "2 cuts": ["search.cuts=2"],
    "8 cuts": ["search.cuts=8"],
    "8 cuts, distilled": ["search.cuts=8", "train.distill.weight=0.5", "recover.distill.weight=0.5"],
}
BESIDE = {"2 cuts": "one cut", "8 cuts": "one cut", "8 cuts, distilled": "8 cuts"}
"""The variant that each one is compared with."""

PRESSURES = (1.0, 2.0, 3.0, 4.0)
SETTINGS = ("uncertainty.samples=0", "report.html=false", "report.latency=false", "search.levels=4", "search.trials=9")


def _next(strategy: Strategy, trials: Sequence[Trial]) -> tuple[float, float] | None:
    assert strategy.goal is not None
    return (PRESSURES[len(trials)], strategy.goal) if len(trials) < len(PRESSURES) else None


def made(row: str, seed: int, data: Path | None) -> dict[str, Any]:
    """All variants, and the paired 95% intervals of the differences between their chosen models."""
    recipe, goal, more = ROWS[row]
    settings = [*SETTINGS, *more, f"seed={seed}", f"search.goal='{goal}'"]
    settings += [f"data.root={data}"] if data is not None and recipe.startswith("mnist") else []
    found: dict[str, Any] = {}
    wrong: dict[str, torch.Tensor] = {}
    for variant, own in VARIANTS.items():
        with (
            tempfile.TemporaryDirectory() as folder,
            mock.patch.object(Strategy, "next", _next),
            mock.patch.object(Search, "cuts", property(lambda search: search.settings.cuts)),
            mock.patch.object(_search, "START", 99.0),
            mock.patch.object(Search, "_small_enough", lambda search, row: False),
            mock.patch.object(Weights, "part", _part),
        ):
            out = Path(folder) / "run"
            results = run(load_recipe(recipe, [*settings, *own]), out)
            opened = open_run(out)
            wrong[variant] = losses(opened.model, opened.data.test, likelihood_for("classification"))[0]
        search = results["search"]
        found[variant] = {
            "trials": [
                {key: trial[key] for key in ("pressure", "natural", "error")} | {"nll": trial["metrics"]["nll"]}
                for trial in search["trials"]
            ],
            "chosen": search["chosen"],
            "test": {key: results["sparse"]["metrics"][key] for key in ("error", "nll")},
            "epochs": search["epochs"],
        }
        if variant in BESIDE:
            found[variant]["change"] = [100 * edge for edge in paired_shares(wrong[BESIDE[variant]], wrong[variant])]
    return {"variants": found, "machine": machine(), "versions": versions(), "threads": torch.get_num_threads()}


def _part(ways: Weights, size: float) -> Any:
    """What the steps would be for single weights."""
    return None if size >= ways.natural else ways._lowered(max(size - ways.others, 1.0))[1]


def table(results: dict[str, Any]) -> str:
    """Markdown: each row and seed, then means."""
    head = ["row", "seed", "variant", *(f"pressure {pressure:g}" for pressure in PRESSURES), "test error %", "change (95%)"]
    lines = ["# A trial's way to its size", "", "Written by `benchmarks/trials.py`, which says how.", ""]
    lines += ["By pressure: validation error % and NLL. In bold: the one that the search takes (on so few digits by its"]
    lines += ["estimate from the NLL). Change: of the test error, from one cut; of the distilled ones, from 8 cuts.", ""]
    lines += [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for row, seeds in results.items():
        for seed, one in sorted(seeds.items()):
            for variant, found in one["variants"].items():
                cells = [row, seed, variant]
                for number, trial in enumerate(found["trials"], 1):
                    text = f"{trial['error']:.2f}, {trial['nll']:.4f}"
                    cells.append(f"**{text}**" if number == found["chosen"] else text)
                cells += [f"{found['test']['error']:.2f}"]
                cells += ["{:+.2f} to {:+.2f}".format(*found["change"]) if "change" in found else ""]
                lines.append(f"| {' | '.join(cells)} |")
    head = ["row", "goal", "seeds", *VARIANTS]
    lines += ["", "Means: test error %, and validation NLL over all pressures.", ""]
    lines += [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for row, seeds in results.items():
        cells = [row, ", ".join([ROWS[row][1], *ROWS[row][2]]), str(len(seeds))]
        for variant in VARIANTS:
            nlls = [trial["nll"] for one in seeds.values() for trial in one["variants"][variant]["trials"]]
            errors = [one["variants"][variant]["test"]["error"] for one in seeds.values()]
            cells.append(f"{mean(errors):.2f}, {mean(nlls):.4f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, *made_on(results)]) + "\n"


def main() -> None:
    """Run the rows and seeds without stored results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--row", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    path = RESULTS / "trials.json"
    for row in options.row:
        for seed in options.seeds:
            if str(seed) in read(path).get(row, {}) or (ROWS[row][0].startswith("mnist") and options.data is None):
                continue
            found = made(row, seed, options.data)
            add_row(path, ROWS, row, seed, found, table)
            print(row, seed, {name: round(one["test"]["error"], 2) for name, one in found["variants"].items()}, flush=True)


if __name__ == "__main__":
    main()
