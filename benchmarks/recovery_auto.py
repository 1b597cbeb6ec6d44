"""What `recover.optimizer: auto` chooses for classifiers with batch normalization, compared with Adam.

    python benchmarks/recovery_auto.py [--cifar FOLDER --resnet FOLDER] [--only digits-10x ...] [--runs FOLDER]

Networks are cut at once and reconstructed, then recovered: a CNN of three convolutions on scikit-learn's digits
(models/digits.py, trained by each run; seeds 0 to 2, whose dense networks differ), with the default epochs of a run, to 10
and 25 times fewer multiply-accumulates; and the public ResNet-20 on 10,000 CIFAR-10 images with crops and flips, with 5
epochs of recovery, to 2 and 4 times fewer (one seed; chosen by nothing but the goal). Everything else is the command's
default. Errors are on test examples (digits: 597, the mean of the seeds; CIFAR-10: the half that no run uses), read once;
differences are paired by example, with 95% intervals.

A finished run is not repeated. Results go to benchmarks/results/recovery_auto.json and recovery_auto.md, one row at a time.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from mnist import HERE, machine, read, write
from real import wrong
from real_table import epochs_of
from slices import Slice, sparsified
from torch import Tensor

from svdcompress.pipeline import open_run
from svdcompress.uncertainty import paired_means

RESULTS = HERE / "results" / "recovery_auto.json"
ARMS = {"auto": [], "adam": ["--set", "recover.optimizer=adam"]}
NORMAL = "data.transform=[{normalize: {mean: [0.485, 0.456, 0.406], std: [0.229, 0.224, 0.225]}}]"


@dataclass(frozen=True)
class Case:
    """A network, how many times fewer multiply-accumulates it is cut to, and the seeds of its runs."""

    net: str
    factor: int
    seeds: tuple[int, ...]


CASES = {
    "digits-10x": Case("digits", 10, (0, 1, 2)),
    "digits-25x": Case("digits", 25, (0, 1, 2)),
    "resnet20-2x": Case("resnet20", 2, (0,)),
    "resnet20-4x": Case("resnet20", 4, (0,)),
}


def arguments(case: Case, seed: int, options: argparse.Namespace) -> list[str]:
    """The arguments of `svdc sparsify` for a case."""
    models = HERE / "models"
    found = ["--goal", f"macs={case.factor}x", "--trials", "1", "--set", f"seed={seed}", "--set", "uncertainty.samples=0"]
    if case.net == "digits":
        return [*found, "--model", f"{models / 'digits.py'}:cnn", "--data", f"{models / 'digits.py'}:data"]
    found += ["--model", f"{models / 'resnet_cifar.py'}:resnet20", "--data", f"{models / 'cifar10.py'}:data"]
    found += ["--weights", str(next(options.resnet.glob("resnet20-*.th"))), "--data-arg", f"folder={options.cifar}"]
    found += ["--data-arg", f"cache={options.runs / 'cifar.npz'}", "--epochs", "0"]
    sets = ["weights.strip_prefix=module.", "data.args.train=10000", NORMAL, "data.augment=[{crop: 4}, flip]"]
    sets += ["recover.epochs=5", "recover.precision=auto", "recover.batch_size=128", "recover.noise=false"]
    return [*found, *(part for each in sets for part in ("--set", each))]


def table(results: dict[str, Any]) -> str:
    """Markdown: a row for each network and size."""
    lines = ["# What a network with batch normalisation recovers by, where nothing is set", ""]
    lines += ["Written by `benchmarks/recovery_auto.py`, which says how. Test errors in %; auto, less Adam: in points, paired"]
    lines += ["by example, 95%; below 0 auto is better.", ""]
    lines += ["| network | fewer MACs | seeds | epochs | dense | auto | Adam | auto, less Adam |", "|" + "---|" * 8]
    for one in results.values():
        errors = [f"{one[name]:.2f}" for name in ("dense", "auto", "adam")]
        at, low, high = one["less"]
        cells = [one["net"], f"{one['factor']}x", str(len(one["seeds"])), str(one["epochs"]), *errors]
        lines.append(f"| {' | '.join([*cells, f'{at:+.2f} [{low:+.2f}, {high:+.2f}]'])} |")
    made = {(one["machine"]["cpu"], one["threads"], one["torch"]) for one in results.values()}
    lines += [
        "",
        *(f"{cpu}, {threads} thread(s), beside other work, torch {version}." for cpu, threads, version in sorted(made)),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure the cases, one by one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cifar", type=lambda text: Path(text).resolve())
    parser.add_argument("--resnet", type=lambda text: Path(text).resolve())
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--runs", type=lambda text: Path(text).resolve(), default=HERE.parent / "runs/benchmarks/recovery_auto")
    options = parser.parse_args()
    options.runs.mkdir(parents=True, exist_ok=True)
    for name in options.only:
        case, made = CASES[name], {}
        missed: dict[str, list[Tensor]] = {arm: [] for arm in [*ARMS, "dense"]}
        if case.net == "resnet20" and not (options.cifar and options.resnet):
            print(f"left out, as --cifar and --resnet are not named: {name}")
            continue
        for seed in case.seeds:
            for arm, sets in ARMS.items():
                folder = options.runs / f"{name}-{arm}-{seed}"
                if not sparsified(folder, [*arguments(case, seed, options), *sets], Slice(None)):
                    raise SystemExit(f"failed: {folder.name}")
                opened = open_run(folder, trust_code=True)
                missed[arm].append(wrong(opened.model, opened.data.test).double())
                made["epochs"] = epochs_of(opened.results["history"])
                made["threads"] = opened.results["torch_threads"]
            missed["dense"].append(wrong(opened.dense, opened.data.test).double())
        means = {arm: torch.stack(each).mean(0) for arm, each in missed.items()}
        found: dict[str, Any] = {"net": case.net, "factor": case.factor, "seeds": case.seeds, **made}
        found |= {"machine": machine(), "torch": torch.__version__}
        found |= {arm: 100 * float(each.mean()) for arm, each in means.items()}
        less = means["auto"] - means["adam"]
        found["less"] = [100 * float(each) for each in (less.mean(), *paired_means(less))]
        results = read(RESULTS) | {name: found}
        write(RESULTS, results)
        RESULTS.with_suffix(".md").write_text(table(results), encoding="utf-8")
        print(name, found, flush=True)


if __name__ == "__main__":
    main()
