"""The tables of README.md that come from stored results: written again between their marks.

    python benchmarks/readme.py [--check]

Reads mnist.json, controls.json and evaluate.json in benchmarks/results; --check writes nothing and fails if README.md differs.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import mean
from typing import Any

from mnist import HERE, RECIPES, STILL, errors, published, read, span

README = HERE.parent / "README.md"
EVALUATED = ("digits-0", "mnist-lenet300-0", "mnist-lenet5-0", "mnist-lenet300-units-0", "mnist-lenet5-units-0")
CONTROLS = {"dense": "control: dense, trained as long", "magnitude": "control: magnitude pruning, as many weights"}


def mnist(results: Path) -> list[str]:
    """One row for each recipe: means over its seeds, the controls of the same budget, and the published figure."""
    found, controls = read(results / "mnist.json").get("runs", {}), read(results / "controls.json")
    heads = ["recipe", "seeds", "error % (least to largest)", "dense start", "dense, trained as long"]
    heads += ["magnitude, as many weights", "fewer non-zeros", "fewer parameters", "published, digits not moved"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for recipe in (name for name in RECIPES if found.get(name)):
        rows = found[recipe]
        name = f"`{recipe.removesuffix(STILL)}.yaml`" + (", digits not moved" if recipe.endswith(STILL) else "")
        ratios = [f"{mean(row['compression'][key] for row in rows):.{digits}f}x" for key, digits in _ratios(rows)]
        cells = [name, ", ".join(str(row["seed"]) for row in rows), f"**{span([row['error'] for row in rows])}**"]
        cells.append(span([row["dense_error"] for row in rows]))
        for kind in CONTROLS:
            known = errors(controls, recipe, kind)
            few = f", of {len(known)} seed{'s' * (len(known) > 1)}" if 0 < len(known) < len(rows) else ""
            cells.append(span(known) + few)
        lines.append(f"| {' | '.join([*cells, *ratios, published(recipe)])} |")
    return lines


def _ratios(rows: list[dict[str, Any]]) -> list[tuple[str, int]]:
    return [(key, 0 if mean(row["compression"][key] for row in rows) > 50 else 1) for key in ("nonzero", "parameters")]


def evaluation(results: Path) -> list[str]:
    """One row for each run of seed 0 and net: scores, and AUROC by 1 - confidence and, for samples, mutual information."""
    found, controls = read(results / "evaluate.json"), read(results / "controls.json")
    lines = ["| run | net | error % | NLL | ECE | uniform | CIFAR-10 |", "|---|---|---|---|---|---|---|"]
    for run in (name for name in EVALUATED if name in found):
        recipe, _, seed = run.rpartition("-")
        rows = [_contender(row, found[run]["samples"]) for row in found[run]["contenders"]]
        nets = controls.get("recipes", {}).get(recipe, {}).get(seed, {}).get("nets", {})
        for kind, label in CONTROLS.items():
            net = nets.get(controls.get("chosen", {}).get(recipe, {}).get(kind) or "")
            if net:
                areas = [f"{net['auroc'][other]:.3f}" if other in net["auroc"] else "" for other in ("uniform", "cifar10")]
                rows.append([label, f"{net['test_error']:.2f}", f"{net['test_nll']:.3f}", "", *areas])
        labels = [f"{recipe}, seed {seed}", *[""] * (len(rows) - 1)]
        lines += [f"| {' | '.join([label, *row])} |" for label, row in zip(labels, rows, strict=True)]
    return lines


def _contender(row: dict[str, Any], samples: int) -> list[str]:
    metrics, areas = row["metrics"], []
    for other in ("uniform", "cifar10"):
        known = row["ood"].get(other) or {}
        areas.append(", ".join(f"{known[score]:.3f}" for score in ("softmax", "mutual_information") if score in known))
    name = row["name"].replace("samples", f"{samples} samples")
    return [name, f"{metrics['error']:.2f}", f"{metrics['nll']:.3f}", f"{metrics['ece']:.4f}", *areas]


BLOCKS = {"mnist": mnist, "evaluation": evaluation}


def filled(text: str, results: Path) -> str:
    """README's text with the lines between `<!-- NAME -->` and `<!-- /NAME -->` made anew."""
    for name, make in BLOCKS.items():
        first, last = f"<!-- {name} -->\n", f"<!-- /{name} -->\n"
        before, found, rest = text.partition(first)
        _, end, after = rest.partition(last)
        if not found or not end:
            sys.exit(f"{README.name}: the marks {first.strip()} and {last.strip()} are missing")
        text = "\n".join([before + first, *make(results), "", last + after])
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    text = README.read_text(encoding="utf-8")
    new = filled(text, HERE / "results")
    if options.check and new != text:
        sys.exit("README.md is not what the stored results say: python benchmarks/readme.py")
    if not options.check:
        README.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
