"""Rewrites the figures of README.md and docs/benchmarks.md between their marks, from the stored results.

    python benchmarks/readme.py [--check]

Reads mnist.json, controls.json, evaluate.json and peers.json in benchmarks/results; --check writes nothing and fails if a
page differs.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import mean
from typing import Any

from mnist import HERE, RECIPES, STILL, errors, published, read, span

PAGES = (HERE.parent / "README.md", HERE.parent / "docs" / "benchmarks.md")
EVALUATED = ("digits-0", "mnist-lenet300-0", "mnist-lenet5-0", "mnist-lenet300-units-0", "mnist-lenet5-units-0")
CONTROLS = {"dense": "control: dense, trained as long", "magnitude": "control: magnitude pruning, as many weights"}


def mnist(results: Path) -> list[str]:
    """One row for each recipe: means over its seeds, the controls with the same budget, and the published figure."""
    found, controls = read(results / "mnist.json").get("runs", {}), read(results / "controls.json")
    heads = ["recipe", "seeds", "error % (least to largest)", "dense start", "dense, trained as long"]
    heads += [
        "magnitude, as many weights",
        "fewer non-zeros",
        "fewer parameters",
        "our digits in training",
        "published, digits not moved",
    ]
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
        lines.append(f"| {' | '.join([*cells, *ratios, _moved(rows[0]), published(recipe)])} |")
    return lines


def _moved(row: dict[str, Any]) -> str:
    return "moved by up to a pixel" if row["augment"] else "not moved"


def _ratios(rows: list[dict[str, Any]]) -> list[tuple[str, int]]:
    return [(key, 0 if mean(row["compression"][key] for row in rows) > 50 else 1) for key in ("nonzero", "parameters")]


def evaluation(results: Path) -> list[str]:
    """One row for each net of the runs of seed 0: scores, and AUROC by 1 - confidence and, for samples, mutual information."""
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


def headline(results: Path) -> list[str]:
    """The numbers at the top of the page: non-zeros, magnitude pruning to as many weights, and shapes; changes are paired."""
    runs, controls = read(results / "mnist.json").get("runs", {}), read(results / "controls.json")
    single, units = runs["mnist-lenet300"], runs["mnist-lenet300-units"]
    nets = [controls["recipes"]["mnist-lenet300"][str(row["seed"])]["nets"] for row in single]
    magnitude = controls["chosen"]["mnist-lenet300"]["magnitude"]
    nonzero, parameters = (mean(row["compression"][key] for row in rows) for rows, key in
                           ((single, "nonzero"), (units, "parameters")))  # fmt: skip
    faster = [row["compression"]["latency"]["batch_128"] for row in units]
    over, under = (_changes([net[name]["change"] for net in nets]) for name in ("dense start", magnitude))
    return [
        f"- **{nonzero:.0f}x fewer non-zeros** and {_error(single)}; compared with the dense network {over}",
        f"- **Fewer errors than magnitude pruning** to the same number of weights in the same number of epochs: {under}",
        f"- **{parameters:.1f}x fewer parameters** in smaller shapes (`mnist-lenet300-units.yaml`) and {_error(units)}; "
        f"{mean(faster):.1f}x faster ({min(faster):.1f} to {max(faster):.1f}) at batch 128",
    ]


def _error(rows: list[dict[str, Any]]) -> str:
    found = [row["error"] for row in rows]
    return f"{mean(found):.2f}% error ({min(found):.2f} to {max(found):.2f})"


def _changes(changes: list[list[float]]) -> str:
    return "{} points (95% intervals by seed: {})".format(*_paired(changes))


def _paired(changes: list[list[float]]) -> tuple[str, str]:
    """The mean change, and each seed's interval."""
    intervals = "; ".join(f"{low:+.2f} to {high:+.2f}" for _, low, high in changes)
    return f"{mean(change for change, _, _ in changes):+.2f}", intervals


def peers(results: Path) -> list[str]:
    """LeNet-300-100 by others with as many weights, each paired with ours; removal of units is compared by parameters."""
    runs = read(results / "peers.json")["recipes"]["mnist-lenet300"].values()
    same = ("cplxmodule, ARD", "cplxmodule, VD", "gradual magnitude, global", "gradual magnitude, LAMP")
    lines = ["| LeNet-300-100, as many weights | seeds | test error % | ours minus theirs, points (95% intervals by seed) |"]
    lines += ["|---" * 4 + "|"]
    for name in ("ours", *same):
        nets = {run["seed"]: run["nets"][name] for run in runs if name in run["nets"]}
        changes = "" if name == "ours" else "{} ({})".format(*_paired([net["change"] for net in nets.values()]))
        lines.append(f"| {name} | {', '.join(map(str, nets))} | {_by_seed(nets)} | {changes} |")
    stored = mean(run["nets"]["dense start"]["parameters"] / run["nets"]["ours"]["parameters"] for run in runs)
    names = [f"torch-pruning, {way}" for way in ("magnitude", "Taylor")]
    units = [_by_seed({run["seed"]: run["nets"][name] for run in runs if name in run["nets"]}, "%") for name in names]
    lines += ["", "torch-pruning removes units only. With as many parameters as ours stores, zeros among them "]
    lines[-1] += f"({stored:.1f}x fewer), it has {units[0]} by magnitude and {units[1]} by Taylor scores."
    return lines


def _by_seed(nets: dict[int, dict[str, Any]], unit: str = "") -> str:
    found = [net["test_error"] for net in nets.values()]
    return f"{mean(found):.2f}{unit}" + (f" ({', '.join(f'{one:.2f}' for one in found)})" if len(found) > 1 else "")


BLOCKS = {"headline": headline, "mnist": mnist, "evaluation": evaluation, "peers": peers}


def names(text: str) -> list[str]:
    """The blocks that a page has."""
    return [name for name in BLOCKS if f"<!-- {name} -->\n" in text]


def filled(text: str, results: Path) -> str:
    """A page's text with the lines between `<!-- NAME -->` and `<!-- /NAME -->` made from the stored results."""
    for name in names(text):
        first, last = f"<!-- {name} -->\n", f"<!-- /{name} -->\n"
        before, _, rest = text.partition(first)
        _, end, after = rest.partition(last)
        if not end:
            sys.exit(f"the mark {last.strip()} is missing")
        text = "\n".join([before + first, *BLOCKS[name](results), "", last + after])
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        new = filled(text, HERE / "results")
        if options.check and new != text:
            sys.exit(f"{page.name} is not what the stored results say: python benchmarks/readme.py")
        if not options.check:
            page.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
