"""Is the small model sure, and rightly so? The sparse network against the dense one with its temperature, means over seeds.

    python benchmarks/uncertainty.py --runs RUN [RUN ...] [--cifar FOLDER_OF_CIFAR10] [--table FOLDER] [--samples 50]

RUN: folders of finished runs, named RECIPE-SEED as by benchmarks/mnist.py, or after the case as by benchmarks/real.py. Each
run's predictions are computed once and kept in RUN/uncertainty.npz. All runs of a recipe have the same test data, so the
intervals are those of the mean over the seeds: test inputs are resampled (1,000 times; 200 for AUROC and the share answered),
in the same way for all. "sparse" is the mean or the draws, whichever the run's validation data chose, as in `svdc predict`.
OOD score: the entropy of the predictive distribution. Corrupted: all kinds at levels 1 to 5 (svdcompress.uncertainty.LEVELS)
of 2,000 test inputs.

--table: makes a table with known noise in this folder, runs on it, and compares with deep ensembles
(benchmarks/uncertainty_table.py). Written to benchmarks/results/uncertainty.json and uncertainty.md; stored groups that are
not given are kept.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from uncertainty_table import measured, table_lines

from svdcompress.calibrate import draws_of
from svdcompress.likelihoods import own_likelihood
from svdcompress.pipeline import open_run, versions
from svdcompress.recipe import DataSection
from svdcompress.sources import open_data
from svdcompress.uncertainty import (
    fit_temperature,
    gather,
    images_like,
    mean_contender,
    outside,
    paired_bootstrap,
    sampled_contender,
    shifts,
)
from svdcompress.uncertainty._bootstrap import totals_of_probabilities

RESULTS = Path(__file__).resolve().parent / "results"
SHIFTED, ELSEWHERE = 2000, 2000
REPLICATES = 200
"""Bootstrap samples for AUROC and the share answered."""

ANSWERED = 0.999
DENSE, MEAN, SAMPLES = "dense, temperature", "sparse, mean", "sparse, samples"

MEASURES = {
    "error": ("error %", ".2f"),
    "nll": ("NLL", ".4f"),
    "ece": ("ECE", ".4f"),
    "corrupted ece": ("ECE, corrupted", ".4f"),
    "answered": ("share answered at 99.9%", ".3f"),
    "auroc shuffled": ("AUROC, shuffled", ".4f"),
    "auroc cifar10": ("AUROC, CIFAR-10", ".4f"),
}
GOALS = {
    "digits": "goal: NLL 0.085, ECE 0.020",
    "mnist-lenet300": "goal: ECE 0.0024, at least the dense network's share answered",
    "mnist-lenet5": "goal: ECE 0.0010, AUROC 0.999 and 0.998, half of the dense network's ECE on corrupted digits",
    "resnet20-macs2x": "goal: NLL and ECE no worse, 0.7 times the dense network's ECE on corrupted images",
}


# What a run predicts


def predicted(run: Path, cifar: Path | None, samples: int) -> dict[str, np.ndarray]:
    """The predictions of a run's three contenders, from RUN/uncertainty.npz if it exists.

    Keys are "set/who/what": probabilities p of the test data ("test") and, for the two that are compared, of corrupted ones
    ("KIND LEVEL"); entropies of the test data and of data from elsewhere; also "labels" and "labels corrupted".
    """
    file = run / "uncertainty.npz"
    if file.is_file():
        return dict(np.load(file))
    opened = open_run(run, trust_code=True)
    data, own = opened.data, own_likelihood(opened.model, opened.data.task, opened.data.dim)
    plain = own.plain()
    logits = draws_of(opened.dense, data.validation, plain)  # always with a temperature, as the baseline of `svdc evaluate`
    temperature = fit_temperature(logits.outputs[0], logits.targets)
    contenders = [
        mean_contender(DENSE, opened.dense, plain, temperature),
        mean_contender(MEAN, opened.model, own),
        sampled_contender(SAMPLES, opened.model, own, samples, 0),
    ]
    better = (opened.results.get("calibrate") or {}).get("better", "samples")
    test = lambda: data.test.batches(500)  # noqa: E731
    elsewhere = {"shuffled": outside(test, 0, ELSEWHERE)["shuffled"]}
    if cifar is not None and len(opened.preprocessing.get("input_shape") or ()) == 3:
        other = open_data(DataSection(name="cifar10", root=str(cifar)), "classification", strict=False)
        elsewhere["cifar10"] = images_like(lambda: other.test.batches(500), opened.preprocessing, ELSEWHERE)
    found: dict[str, np.ndarray] = {"better": np.array(better)}
    for contender in contenders:
        who = contender.name
        seen = gather(contender.predict, test, own)
        found[f"test/{who}/p"], found["labels"] = seen.mean.float().numpy(), seen.targets.numpy()
        found[f"test/{who}/entropy"] = seen.scores["entropy"].numpy()
        for name, batches in elsewhere.items():
            found[f"{name}/{who}/entropy"] = gather(contender.predict, batches, own).scores["entropy"].numpy()
        if who not in (DENSE, MEAN if better == "mean" else SAMPLES):
            continue  # on corrupted data, only those that are compared
        for kind, levels in shifts(test, 0, SHIFTED, opened.preprocessing.get("input_shape")).items():
            for level, batches in enumerate(levels[1:], 1):
                seen = gather(contender.predict, batches, own)
                found[f"{kind} {level}/{who}/p"], found["labels corrupted"] = seen.mean.float().numpy(), seen.targets.numpy()
    arrays: dict[str, Any] = dict(found)
    np.savez_compressed(file, **arrays)
    return found


# Figures of a group of seeds


def group(runs: Sequence[Mapping[str, np.ndarray]]) -> dict[str, Any]:
    """Means over the seeds by contender, and differences of "sparse" from dense with its temperature, with 95% intervals."""
    chosen = [MEAN if str(run["better"]) == "mean" else SAMPLES for run in runs]
    who: dict[str, list[str]] = {name: [name] * len(runs) for name in (DENSE, MEAN, SAMPLES)} | {"sparse": chosen}
    found: dict[str, Any] = {"figures": {}, "difference": {}, "chosen": chosen}
    totals = {
        name: [_totals(run, f"test/{each}/p", "labels") for run, each in zip(runs, names, strict=True)]
        for name, names in who.items()
    }
    _take(found, totals, {"error": "error", "nll": "nll", "ece": "ece"})
    sets = sorted({key.split("/")[0] for key in runs[0] if key.endswith(f"{DENSE}/p") and not key.startswith("test/")})
    if sets:
        pairs = {name: list(zip(runs, who[name], strict=True)) for name in (DENSE, "sparse")}
        totals = {
            name: [_totals(run, f"{one}/{each}/p", "labels corrupted") for one in sets for run, each in both]
            for name, both in pairs.items()
        }
        _take(found, totals, {"ece": "corrupted ece"})
    weights = _weights(len(runs[0]["labels"]), 0)
    for name in ("shuffled", "cifar10"):
        if f"{name}/{DENSE}/entropy" not in runs[0]:
            continue
        others = _weights(len(runs[0][f"{name}/{DENSE}/entropy"]), 1)
        areas = {
            each: _mean(
                auroc(_tensor(run[f"test/{one}/entropy"]), _tensor(run[f"{name}/{one}/entropy"]), weights, others)
                for run, one in zip(runs, names, strict=True)
            )
            for each, names in who.items()
        }
        _note(found, f"auroc {name}", areas)
    shares = {
        each: _mean(answered(run, one, weights) for run, one in zip(runs, names, strict=True)) for each, names in who.items()
    }
    _note(found, "answered", shares)
    return found


def _totals(run: Mapping[str, np.ndarray], key: str, labels: str) -> Any:
    p, truths = _tensor(run[key]), torch.from_numpy(run[labels])
    return totals_of_probabilities(p, truths, torch.arange(len(p)), len(p))


def _take(found: dict[str, Any], totals: dict[str, Any], names: dict[str, str]) -> None:
    differences = paired_bootstrap(totals, DENSE)
    for name, sets in totals.items():
        every = [one.figures() for one in sets]
        figures = found["figures"].setdefault(name, {})
        figures |= {to: float(torch.stack([one[key] for one in every]).mean()) for key, to in names.items()}
    found["difference"] |= {to: differences["sparse"][key] for key, to in names.items()}


def _note(found: dict[str, Any], measure: str, drawn: dict[str, Tensor]) -> None:
    """Store a measure. drawn: (1 + R,) for each contender, first the value for the test data, then for bootstrap samples."""
    for name, values in drawn.items():
        found["figures"][name][measure] = float(values[0])
    less = drawn["sparse"] - drawn[DENSE]
    low, high = torch.quantile(less[1:], torch.tensor([0.025, 0.975], dtype=less.dtype)).tolist()
    found["difference"][measure] = {"value": float(less[0]), "low": low, "high": high}


def _weights(count: int, seed: int) -> Tensor:
    """(1 + R, N): 1 for each of N inputs, then how often each one is in a bootstrap sample."""
    generator = torch.Generator().manual_seed(seed)
    index = torch.randint(count, (REPLICATES, count), generator=generator)
    ones = torch.ones(REPLICATES, count, dtype=torch.float64)
    return torch.cat([ones[:1], torch.zeros_like(ones).scatter_add_(1, index, ones)])


def auroc(inside: Tensor, outside: Tensor, inner: Tensor, outer: Tensor) -> Tensor:
    """AUROC (R,), with each input counted by its weight, (R, N) and (R, M); ties count half."""
    ranks = torch.unique(torch.cat([inside, outside]), return_inverse=True)[1]
    size = int(ranks.max()) + 1
    ins = torch.zeros(len(inner), size, dtype=torch.float64).index_add_(1, ranks[: len(inside)], inner)
    outs = torch.zeros(len(outer), size, dtype=torch.float64).index_add_(1, ranks[len(inside) :], outer)
    below = ins.cumsum(1) - 0.5 * ins
    return (outs * below).sum(1) / (ins.sum(1) * outs.sum(1))


def answered(run: Mapping[str, np.ndarray], who: str, weights: Tensor) -> Tensor:
    """The largest share of the inputs, the surest first, of which ANSWERED are right; (R,)."""
    p, labels = _tensor(run[f"test/{who}/p"]), torch.from_numpy(run["labels"])
    doubt, wrong = 1 - p.amax(1), (p.argmax(1) != labels).double()
    ranks = torch.unique(doubt, return_inverse=True)[1]
    size = int(ranks.max()) + 1
    zeros = torch.zeros(len(weights), size, dtype=torch.float64)
    count, lost = zeros.index_add(1, ranks, weights).cumsum(1), zeros.index_add(1, ranks, weights * wrong).cumsum(1)
    fits = lost <= (1 - ANSWERED) * count + 1e-9
    return torch.where(fits, count, 0.0).amax(1) / weights.sum(1)


def _tensor(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array).double()


def _mean(values: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(values)).mean(0)


# The table


def table(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    lines = [
        "# Sure, and rightly so",
        "",
        "Written by `benchmarks/uncertainty.py`, which says how. Test data, means over seeds.",
    ]
    for name, found in results.items():
        if name == "table":
            lines += table_lines(found)
            continue
        lines += ["", f"## {name}", ""]
        lines += [
            f"{len(found['seeds'])} runs (seeds {', '.join(found['seeds'])}), {found['compression']:.3g}x fewer non-zeros."
        ]
        goal = next((text for recipe, text in GOALS.items() if name in (recipe, f"{recipe}-still", f"{recipe}-units")), "")
        lines[-1] += f" {goal[:1].upper()}{goal[1:]}." if goal else ""
        lines[-1] += f" Chosen on validation data: {'; '.join(found['chosen'])}."
        head = ("", DENSE, "sparse, as chosen", "less (95% interval)", "sparse, mean", f"sparse, {found['samples']} samples")
        lines += ["", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
        for key, (label, form) in MEASURES.items():
            if key not in found["difference"]:
                continue
            less = found["difference"][key]
            cells = [label] + [_cell(found, who, key, form) for who in (DENSE, "sparse")]
            cells += [f"{less['value']:+{form}} ({less['low']:+{form}} to {less['high']:+{form}})"]
            lines.append(f"| {' | '.join(cells + [_cell(found, who, key, form) for who in (MEAN, SAMPLES)])} |")
    made = dict.fromkeys(", ".join(f"{a} {b}" for a, b in one["versions"].items()) for one in results.values())
    return "\n".join([*lines, "", *(f"{line}." for line in made), ""])


def _cell(found: dict[str, Any], who: str, key: str, form: str) -> str:
    value = found["figures"][who].get(key)
    return "" if value is None else f"{value:{form}}"


def named(run: Path) -> tuple[str, str]:
    """The group of a run, and its seed."""
    recipe, _, seed = run.name.rpartition("-")
    return (recipe, seed) if seed.isdigit() else (run.name, "0")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="*", type=Path, default=[])
    parser.add_argument("--cifar", type=Path, help="folder of CIFAR-10")
    parser.add_argument("--table", type=Path, help="folder for the runs on a table that this makes")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the table's runs")
    parser.add_argument("--samples", type=int, default=50)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    file = options.results / "uncertainty.json"
    results = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    groups: dict[str, list[Path]] = {}
    for run in options.runs:
        if (run / "report.json").is_file():
            groups.setdefault(named(run)[0], []).append(run)
    made: dict[str, Any] = {}
    for name, folders in groups.items():
        seen = [predicted(run, options.cifar, options.samples) for run in folders]
        ratios = [json.loads((run / "report.json").read_text(encoding="utf-8"))["compression"]["nonzero"] for run in folders]
        seeds = [named(run)[1] for run in folders]
        made[name] = {"seeds": seeds, "compression": sum(ratios) / len(ratios), "samples": options.samples, **group(seen)}
    if options.table is not None:
        made["table"] = measured(options.table, options.seeds, options.samples)
    results |= {name: {**found, "versions": versions()} for name, found in made.items()}
    file.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    file.with_suffix(".md").write_text(table(results), encoding="utf-8")


if __name__ == "__main__":
    main()
