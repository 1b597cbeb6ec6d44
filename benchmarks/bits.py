"""Weights in fewer bits, chosen with the posterior and without it, at the same number of bits, on existing runs.

    python benchmarks/bits.py FOLDER_OF_RUNS [FOLDER_OF_RUNS ...] [--only digits mnist-lenet300 ...]

Runs are folders NAME-SEED. For each run and each size (bits per weight, averaged over the kept weights), the weights are
rounded with one step size for each output channel, in several ways: the same bits for all layers, with the last step at the
channel's largest weight ("same bits"); bits that differ by layer, according to the posterior's variance or only to the size
of the weights ("bits by ..."); and the same bits for all layers, with the step size that minimizes the squared errors, either
all weighted alike ("steps by errors") or over the posterior's variance ("steps by the posterior"), as `svdc pack` and
`--precision int4` do. The last row has the bits that the posterior suggests (`suggested_bits`), with steps by the posterior.

Figures are measured on the test data in PyTorch, with simulated rounding; sizes count the weights alone. Change: the error of
a way minus that of the way it is compared with at the same size, in points, over all seeds, with its paired 95% interval.
Nothing is chosen on test data. Results: benchmarks/results/bits.json and bits.md.
"""

from __future__ import annotations

import argparse
import copy
from collections import defaultdict
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from controls import change
from mnist import machine, read, write
from torch import Tensor

from svdcompress.export._bits import FEWEST, MOST, _axis, _steps, allocate, allocated_bits, round_weights, suggested_bits
from svdcompress.layers import variational_layers
from svdcompress.pipeline import open_run, versions
from svdcompress.uncertainty import mean_predict

RESULTS = Path(__file__).resolve().parent / "results" / "bits.json"
SIZES = (2.5, 3.0, 4.0, 5.0)


def by_size(model: Any, average: float) -> dict[str, int]:
    """Bits for each layer that minimize the sum of squared rounding errors: what a tool without a posterior can do."""
    costs, sizes = {}, {}
    for name, layer in variational_layers(model):
        kept = layer.relevant()
        sizes[name] = int(kept.sum())
        weight = (layer.weight * kept).detach()
        steps = {bits: _steps(weight, bits, _axis(layer)).expand_as(weight)[kept] for bits in range(FEWEST, MOST + 1)}
        costs[name] = {bits: float((step.double() ** 2).mean()) if len(step) else 0.0 for bits, step in steps.items()}
    return allocate(costs, sizes, average)


def same(model: Any, average: float) -> dict[str, int]:
    """The same bits for all layers; for a size between two integers, the lower, plus one bit for layers in order of depth."""
    costs, sizes = {}, {}
    for depth, (name, layer) in enumerate(variational_layers(model)):
        sizes[name] = int(layer.relevant().sum())
        costs[name] = {bits: float(1000 * (MOST - bits) - depth) * (MOST - bits + 1) for bits in range(FEWEST, MOST + 1)}
    return allocate(costs, sizes, average)


WAYS: dict[str, tuple[Any, str, str | None]] = {
    "same bits": (same, "largest", None),
    "bits by the posterior": (allocated_bits, "largest", "same bits"),
    "bits by the size of the weights": (by_size, "largest", "same bits"),
    "steps by errors": (same, "errors", "same bits"),
    "steps by the posterior": (same, "posterior", "steps by errors"),
}
"""For each way: how bits are chosen, how step sizes are chosen, and the way that it is compared with."""


def answers(model: Any, opened: Any) -> tuple[Tensor, float]:
    """Which test examples the mean gets wrong (N,), and the NLL."""
    parts = [(mean_predict(model, x).mean, y) for x, y in opened.data.test.batches(500)]
    p, y = torch.cat([p for p, _ in parts]), torch.cat([y for _, y in parts])
    return p.argmax(1) != y, float(torch.nn.functional.nll_loss(p.double().clamp_min(1e-38).log(), y))


def rows(folder: Path) -> list[dict[str, Any]]:
    """One row for each size and way, and one for float32; `wrong` is not stored in the file."""
    opened = open_run(folder)
    model = opened.model
    wrong, nll = answers(model, opened)
    found: list[dict[str, Any]] = [{"bits": 32, "way": "float32", "used": 32.0, "wrong": wrong, "nll": nll}]
    tried = [(size, way, rule(model, size), by) for size in SIZES for way, (rule, by, _) in WAYS.items()]
    tried.append((0.0, "as suggested", {row.name: row.bits for row in suggested_bits(model)}, "posterior"))
    kept = {name: int(layer.relevant().sum()) for name, layer in variational_layers(model)}
    for size, way, bits, by in tried:
        wrong, nll = answers(round_weights(copy.deepcopy(model), bits, by=by), opened)
        used = sum(kept[name] * bits[name] for name in kept) / max(sum(kept.values()), 1)
        found.append({"bits": size, "way": way, "used": used, "layers": bits, "wrong": wrong, "nll": nll})
    return found


def group(runs: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Means over the seeds of a recipe."""
    found = []
    for place, first in enumerate(next(iter(runs.values()))):
        each = [rows[place] for rows in runs.values()]
        errors = [100 * float(row["wrong"].double().mean()) for row in each]
        entry = {key: first[key] for key in ("bits", "way")} | {"used": mean(row["used"] for row in each)}
        entry |= {"error": mean(errors), "errors": errors, "nll": mean(row["nll"] for row in each)}
        base = WAYS.get(first["way"], (None, "", None))[2]
        if base is not None:
            other = next(
                at for at, row in enumerate(next(iter(runs.values()))) if (row["bits"], row["way"]) == (first["bits"], base)
            )
            before = torch.cat([rows[other]["wrong"] for rows in runs.values()])
            entry["change"] = change(before, torch.cat([row["wrong"] for row in each]))
            entry["against"] = base
        found.append(entry)
    return found


def table(results: dict[str, Any]) -> str:
    """Markdown: a section for each recipe."""
    lines = ["# Bits of the weights", "", "Written by `benchmarks/bits.py`, which says what the ways are.", ""]
    for recipe, one in results["recipes"].items():
        lines += [f"## {recipe}, seeds {', '.join(one['seeds'])}", ""]
        lines += ["| bits a weight | way | test error % | NLL | change | held against |", "|---|---|---|---|---|---|"]
        for row in one["rows"]:
            errors = f"{row['error']:.2f} ({', '.join(f'{error:.2f}' for error in row['errors'])})"
            moved = "{:+.2f} [{:+.2f}, {:+.2f}]".format(*row["change"]) if "change" in row else ""
            cells = [f"{row['used']:.2f}", row["way"], errors, f"{row['nll']:.4f}", moved, row.get("against", "")]
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    names = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    return "\n".join([*lines, f"{results['machine']['cpu']}; {names}.", ""])


def main() -> None:
    """Measure all finished runs in the folders, by recipe."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--only", nargs="+", help="names of recipes, without the seed")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    groups: dict[str, dict[str, Path]] = defaultdict(dict)
    for run in sorted(path for folder in options.folders for path in folder.iterdir() if (path / "report.json").is_file()):
        recipe, _, seed = run.name.rpartition("-")
        if not options.only or recipe in options.only:
            groups[recipe][seed] = run
    for recipe, runs in groups.items():
        results = read(options.results)
        found = group({seed: rows(run) for seed, run in runs.items()})
        results.setdefault("recipes", {})[recipe] = {"seeds": list(runs), "rows": found}
        results |= {"machine": machine(), "versions": versions()}
        write(options.results, results)
        options.results.with_suffix(".md").write_text(table(results), encoding="utf-8")
        print(recipe, flush=True)


if __name__ == "__main__":
    main()
