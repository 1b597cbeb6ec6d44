"""Bits from the posterior beside the same number of bits for every layer, on runs that exist.

    python benchmarks/bits.py runs/digits-0 runs/digits-1 runs/digits-2 --out benchmarks/results/bits.json

For each run and each size (bits a weight, on average over the weights that stay), its weights are rounded in three ways: the
same bits for all layers; bits that the posterior's variance gives; the same rule without a posterior, so that only a weight's
size counts. And once with the bits that the posterior suggests by itself (`suggested_bits`). Each rounding has one scale for
each output channel. Figures are of the test data, by PyTorch, with rounding simulated; sizes are of the weights alone.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
from pathlib import Path
from typing import Any

import torch

from svdcompress.export._bits import FEWEST, MOST, _axis, _steps, allocate, allocated_bits, round_weights, suggested_bits
from svdcompress.layers import variational_layers
from svdcompress.likelihoods import own_likelihood
from svdcompress.pipeline import open_run, versions
from svdcompress.train import evaluate

SIZES = (2.5, 3.0, 4.0, 5.0)


def by_size(model: Any, average: float) -> dict[str, int]:
    """Bits that make the sum of squared rounding errors the smallest: what a tool without a posterior can do."""
    layers = dict(variational_layers(model))
    costs, sizes = {}, {}
    for name, layer in layers.items():
        kept = layer.relevant()
        sizes[name] = int(kept.sum())
        weight = (layer.weight * kept).detach()
        steps = {bits: _steps(weight, bits, _axis(layer)).expand_as(weight)[kept] for bits in range(FEWEST, MOST + 1)}
        costs[name] = {bits: float((step.double() ** 2).mean()) if len(step) else 0.0 for bits, step in steps.items()}
    return allocate(costs, sizes, average)


def uniform(model: Any, average: float) -> dict[str, int]:
    """The same bits for all layers; for a size between two, the lower, and the next more for layers in order of depth."""
    costs, sizes = {}, {}
    for depth, (name, layer) in enumerate(variational_layers(model)):
        sizes[name] = int(layer.relevant().sum())
        costs[name] = {bits: float(1000 * (MOST - bits) - depth) * (MOST - bits + 1) for bits in range(FEWEST, MOST + 1)}
    return allocate(costs, sizes, average)


WAYS = {"uniform": uniform, "posterior": allocated_bits, "size of the weights": by_size}


def figures(folder: Path) -> list[dict[str, Any]]:
    """One row for each size and way, and one for float32."""
    opened = open_run(folder)
    data, model = opened.data, opened.model
    own = own_likelihood(model, data.task, data.dim).of_mean()

    def measured(each: Any) -> dict[str, float]:
        return evaluate(each, data.test, own, tau=opened.tau, scale=data.target_scale, dim=data.dim)

    rows: list[dict[str, Any]] = [{"run": folder.name, "bits": 32, "way": "float32", **measured(model)}]
    tried = [(size, way, rule(model, size)) for size in SIZES for way, rule in WAYS.items()]
    tried.append((0.0, "as suggested", {row.name: row.bits for row in suggested_bits(model)}))
    for size, way, bits in tried:
        small = round_weights(copy.deepcopy(model), bits)
        kept = {name: int(layer.relevant().sum()) for name, layer in variational_layers(model)}
        used = sum(kept[name] * bits[name] for name in kept) / max(sum(kept.values()), 1)
        rows.append({"run": folder.name, "bits": size, "way": way, "used": used, "layers": bits, **measured(small)})
    return rows


def main() -> None:
    """Print a table and write all rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row for folder in arguments.runs for row in figures(folder)]
    figure = "error" if "error" in rows[0] else "rmse"
    table = []
    for size, way in dict.fromkeys((row["bits"], row["way"]) for row in rows):
        some = [row for row in rows if (row["bits"], row["way"]) == (size, way)]
        means = {name: statistics.mean(row[name] for row in some) for name in (figure, "nll")}
        used = statistics.mean(row.get("used", 32.0) for row in some)
        table.append({"bits": size, "way": way, "used": used, **means})
        print(f"{size:>4g} bits  {way:<20} used {used:5.2f}  {figure} {means[figure]:7.3f}  nll {means['nll']:.4f}")
    if arguments.out:
        text = json.dumps({"table": table, "rows": rows, "versions": versions()}, indent=1)
        arguments.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
