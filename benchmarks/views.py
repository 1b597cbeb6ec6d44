"""Recovery with augmented batches that come again, so that the dense network answers each once, or with ever new ones.

    python benchmarks/views.py --cifar FOLDER --resnet FOLDER [--case resnet20-macs4x] [--runs FOLDER] [--seeds 2]
                               [--arm EPOCHS VIEWS ...]

A public network (benchmarks/real.py says from where) is cut at once and reconstructed by `svdc sparsify`, and that one network
recovers in each way: for EPOCHS epochs, in which batches come again after VIEWS epochs (`recover.distill.views`; 0: never),
with SGD at 0.02 and the settings of its recipe. Reported are the CPU time of recovery, with one thread, and the accuracy on all
10,000 test images, with the paired difference from as many epochs without views (95%; run these first), means over seeds of the
order and the augmentation. These images choose nothing but the cut, which all ways share.

Stored results are not computed again; they go to benchmarks/results/views.json and views.md.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch
from mnist import HERE, machine, read, write
from real import CASES, arguments, wrong
from safetensors.torch import load_file, save_file
from slices import Slice, sparsified
from torch import Tensor

from svdcompress.likelihoods import make_loss
from svdcompress.pipeline import open_run
from svdcompress.train import fit
from svdcompress.uncertainty import paired_means

RESULTS = HERE / "results" / "views.json"
SETTINGS = ["search.trials=1", "recover.lr=0.02", "uncertainty.samples=0"]


def recovered(run: Path, epochs: int, views: int, seed: int) -> tuple[Tensor, float]:
    """Which of the 10,000 test images the recovered network gets wrong, and the seconds of CPU time that recovery took."""
    opened = open_run(run, trust_code=True)
    section, model, data = opened.recovery, opened.model, opened.data
    distill = section.distill.model_copy(update={"views": views})
    began = time.process_time()
    fit(
        model,
        data.train,
        make_loss(opened.recipe.loss, dim=data.dim),
        section.model_copy(update={"epochs": epochs}),
        stage="recover",
        noise=False,
        teacher=opened.dense,
        distill=distill,
        seed=seed,
        device="cpu",
    )
    took = time.process_time() - began
    return torch.cat([wrong(model.eval(), part) for part in (data.validation, data.test)]).double(), took


def table(results: dict[str, Any]) -> str:
    """Markdown: a row for each case, number of epochs and number of views."""
    lines = ["# Augmented batches that come again", "", "Written by `benchmarks/views.py`, which says how.", ""]
    head = ["network", "epochs", "views", "seeds", "CPU time, saved", "accuracy %", "difference (95%)"]
    lines += [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for one in sorted(results.values(), key=lambda one: (one["case"], one["epochs"], one["views"])):
        control, saved, difference = results.get(named(one["case"], one["epochs"], 0)), "", ""
        if one["views"] and control is not None:
            saved = f", {1 - one['seconds'] / control['seconds']:.0%}"
        if "ahead" in one:
            difference = "{:+.2f} ({:+.2f} to {:+.2f})".format(*one["ahead"])
        cells = [one["case"], str(one["epochs"]), str(one["views"]), str(one["seeds"])]
        cells += [f"{one['seconds'] / 60:.1f} min{saved}", f"{one['accuracy']:.2f}", difference]
        lines.append(f"| {' | '.join(cells)} |")
    made = {f"{one['machine']['cpu']}, one thread, torch {one['torch']}." for one in results.values()}
    return "\n".join([*lines, "", *sorted(made), ""])


def named(case: str, epochs: int, views: int) -> str:
    """The name that an arm is stored under."""
    return f"{case}, {epochs} epochs, {views} views"


def file_of(runs: Path, name: str) -> Path:
    """The file of which test images an arm's networks get wrong."""
    return runs / f"{name}.safetensors"


def main() -> None:
    """Measure the arms without stored results, one by one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("cifar", "resnet"):
        parser.add_argument(f"--{name}", type=lambda text: Path(text).resolve(), required=True)
    parser.add_argument("--case", choices=[name for name, case in CASES.items() if case.weights], default="resnet20-macs4x")
    parser.add_argument("--runs", type=Path, default=HERE.parent / "runs" / "benchmarks" / "views")
    parser.add_argument("--arm", nargs=2, type=int, action="append", metavar=("EPOCHS", "VIEWS"))
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.runs = options.runs.resolve()
    options.runs.mkdir(parents=True, exist_ok=True)
    options.epochs, options.set, options.label = (0, 0), SETTINGS, ""
    run = options.runs / options.case
    if not sparsified(run, arguments(options.case, options), Slice(None)):
        sys.exit(f"{options.case}: the cut failed")
    for epochs, views in options.arm or [(16, 0), (16, 4), (16, 8)]:
        name, setting = named(options.case, epochs, views), {"seeds": options.seeds, "torch": torch.__version__}
        if read(RESULTS).get(name, {}).items() >= setting.items():
            continue
        each = [recovered(run, epochs, views, seed) for seed in range(options.seeds)]
        missed = torch.stack([wrong_ones for wrong_ones, _ in each]).mean(0)
        save_file({"missed": missed}, file_of(options.runs, name))
        found = {"case": options.case, "epochs": epochs, "views": views, **setting, "machine": machine()}
        found |= {"seconds": sum(took for _, took in each) / len(each), "accuracy": 100 - 100 * float(missed.mean())}
        control = file_of(options.runs, named(options.case, epochs, 0))
        if views and control.is_file():
            ahead = 100 * (load_file(control)["missed"] - missed)
            found["ahead"] = [float(ahead.mean()), *paired_means(ahead)]
        results = read(RESULTS) | {name: found}
        write(RESULTS, results)
        RESULTS.with_suffix(".md").write_text(table(results), encoding="utf-8")
        print(f"{name}: {found['accuracy']:.2f}%, {found['seconds'] / 60:.1f} min", flush=True)


if __name__ == "__main__":
    main()
