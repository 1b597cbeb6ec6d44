"""Controls for the MNIST figures, with the budget of the recipe: the dense network trained as long, and magnitude pruning.

    python benchmarks/mnist.py --data FOLDER_OF_THE_IDX_FILES ...    # the runs whose dense weights the controls start from
    python benchmarks/controls.py [--recipe mnist-lenet300 ...] [--seeds 0 1 2] [--runs FOLDER] [--cifar FOLDER_OF_CIFAR10]

Each control starts from the run's own dense weights and uses its training digits, its augmentation, its optimizer and as many
epochs as its fine-tuning and recovery together. Magnitude pruning is gradual and global (Zhu & Gupta 2018: the sparsity rises
as 1 - (1 - t)^3 over the first half of the epochs) and ends with as many non-zero weights as the run. Each control is trained
with two learning-rate plans, one fall and the recipe's two; the one that is better on validation data is reported, and both
are stored. Trained networks are kept with the runs and not trained again; results go to benchmarks/results/controls.json and
controls.md.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from mnist import HERE, RECIPES, cpu
from torch import Tensor, nn

from svdcompress.batch import call, main_output
from svdcompress.pipeline import open_run
from svdcompress.recipe import DataSection
from svdcompress.sources import Examples, open_data
from svdcompress.train import LrFactor
from svdcompress.uncertainty import auroc, images_like, mean_predict, outside, paired_shares, wilson

BATCH = 500
OUTSIDE = 2000
"""The most images of other data that are used."""

PRUNE_EVERY = 100
"""Training steps between two updates of the pruning."""

PLANS = ("one fall", "two falls")
KINDS = {"dense": "dense, trained as long", "magnitude": "gradual magnitude pruning, as many non-zero weights"}


# Training, in plain PyTorch


def train(
    model: nn.Module,
    data: Examples,
    stages: list[tuple[Any, int]],
    prune: Callable[[float], bool | None],
    seed: int,
    penalty: Callable[[float], Any] = lambda epoch: 0.0,
) -> None:
    """Train in place through stages of (settings, epochs).

    prune: called after each step, every `PRUNE_EVERY` steps with the epoch (a fraction), otherwise with -1, and with infinity
    at the end; it returns whether the model has new parameters, which get a new optimizer. penalty: what is added to the
    loss, by the epoch.
    """
    torch.manual_seed(seed)
    first, step = 0, 0
    for settings, epochs in stages:
        make = lambda: torch.optim.Adam(model.parameters(), lr=settings.lr, fused=True)  # noqa: B023, E731
        optimizer = make()
        factor = LrFactor(settings.schedule, epochs)
        batches = math.ceil(len(data) / settings.batch_size)
        for epoch in range(epochs):
            model.train()
            for index, (x, y) in enumerate(data.batches(settings.batch_size, shuffle=1000 * seed + first + epoch)):
                for group in optimizer.param_groups:
                    group["lr"] = settings.lr * factor(epoch + index / batches)
                optimizer.zero_grad(set_to_none=True)
                now = first + epoch + index / batches
                (nn.functional.cross_entropy(main_output(call(model, x)), y) + penalty(now)).backward()
                optimizer.step()
                if prune(now if step % PRUNE_EVERY == 0 else -1.0):
                    optimizer = make()
                step += 1
        first += epochs
    prune(math.inf)
    model.eval()


class Magnitude:
    """Global masks over all weight matrices that set the smallest weights to 0; the excess over `keep` falls as (1 - t)^3.

    score: maps a layer's weights to the values by which they are compared, in the same shape.
    """

    def __init__(self, model: nn.Module, keep: int, end: float, score: Callable[[Tensor], Tensor] = torch.abs) -> None:
        self.weights = [p for p in model.parameters() if p.dim() > 1]
        self.total, self.keep, self.end, self.score = sum(p.numel() for p in self.weights), keep, end, score
        self.masks = [torch.ones_like(p) for p in self.weights]

    @torch.no_grad()
    def __call__(self, epoch: float) -> None:
        if epoch >= 0:
            left = (1 - min(epoch / self.end, 1.0)) ** 3
            count = self.keep + round((self.total - self.keep) * left)
            scores = [self.score(p) for p in self.weights]
            limit = torch.cat([score.flatten() for score in scores]).kthvalue(self.total - count + 1).values
            self.masks = [(score >= limit).float() for score in scores]
        for weight, mask in zip(self.weights, self.masks, strict=True):
            weight.mul_(mask)


def stages_of(recipe: Any, plan: str) -> list[tuple[Any, int]]:
    """The epochs of fine-tuning and recovery: with one fall of the learning rate over all of them, or with the recipe's two."""
    if plan == "one fall":
        return [(recipe.train, recipe.train.epochs + recipe.recover.epochs)]
    return [(recipe.train, recipe.train.epochs), (recipe.recover, recipe.recover.epochs)]


# A control of a run


def control(folder: Path, kind: str, plan: str, seed: int, out: Path) -> Path:
    """Train the control of a run's folder, unless its weights are there already; returns the file of its weights."""
    file = out / f"{folder.name}-{kind}-{plan.replace(' ', '-')}.pt"
    if not file.is_file():
        opened = open_run(folder)
        model, recipe = copy.deepcopy(opened.dense), opened.recipe.model_copy(update={"recover": opened.recovery})
        keep = sum(layer["weights"] for layer in opened.results["layers"])
        ramp = 0.5 * (recipe.train.epochs + recipe.recover.epochs)
        prune = Magnitude(model, keep, ramp) if kind == "magnitude" else lambda epoch: None
        train(model, opened.data.train, stages_of(recipe, plan), prune, seed)
        torch.save(model.state_dict(), file)
    return file


def predicted(model: nn.Module, examples: Examples) -> tuple[Tensor, Tensor]:
    """(probabilities, targets) of all examples."""
    parts = [(mean_predict(model, x).mean, y) for x, y in examples.batches(BATCH)]
    return torch.cat([p for p, _ in parts]), torch.cat([y for _, y in parts])


def judged(model: nn.Module, opened: Any, others: dict[str, Any]) -> tuple[dict[str, Any], Tensor]:
    """Figures of a network, and which test digits it gets wrong. The AUROC is that of 1 - confidence."""
    data = opened.data
    found: dict[str, Any] = {"weights": sum(int(p.count_nonzero()) for p in model.parameters() if p.dim() > 1)}
    for split in ("validation", "test"):
        p, y = predicted(model, getattr(data, split))
        wrong = p.argmax(1) != y
        found[f"{split}_error"] = 100 * float(wrong.double().mean())
        found[f"{split}_nll"] = float(nn.functional.nll_loss(p.double().clamp_min(1e-38).log(), y))
    doubt = 1 - p.amax(1)
    sets = {name: batches for name, batches in outside(lambda: data.test.batches(BATCH)).items() if name == "uniform"} | others
    scores = {name: torch.cat([1 - mean_predict(model, x).mean.amax(1) for x, _ in sets[name]()]) for name in sets}
    found["auroc"] = {name: auroc(doubt, score) for name, score in scores.items()}
    found["wilson"] = [100 * bound for bound in wilson(float(wrong.sum()), len(wrong))]
    return found, wrong


def compared(folder: Path, seed: int, out: Path, kinds: list[str], cifar: str | None) -> dict[str, Any]:
    """A run's sparse network, its dense start and all controls; a change is the error of the sparse network minus theirs."""
    opened = open_run(folder)
    others = {}
    if cifar is not None:
        pictures = open_data(DataSection(name="cifar10", root=cifar), "classification", strict=False).test
        if len(pictures) > OUTSIDE:  # evenly spaced, as they may be sorted by class; as in `svdc evaluate`
            pictures = pictures.subset(torch.linspace(0, len(pictures) - 1, OUTSIDE).long())
        others["cifar10"] = images_like(lambda: pictures.batches(BATCH), opened.data.preprocessing, OUTSIDE)
    found = {}
    sparse, wrong = judged(opened.model, opened, others)
    found["sparse"] = {**sparse, "weights": sum(layer["weights"] for layer in opened.results["layers"])}
    start, start_wrong = judged(opened.dense, opened, others)
    found["dense start"] = {**start, "change": change(start_wrong, wrong)}
    for kind in kinds:
        for plan in PLANS:
            model = copy.deepcopy(opened.dense)
            model.load_state_dict(torch.load(control(folder, kind, plan, seed, out), weights_only=True))
            figures, others_wrong = judged(model.eval(), opened, others)
            found[f"{kind}, {plan}"] = {**figures, "change": change(others_wrong, wrong)}
    recipe = opened.recipe
    budget = {name: getattr(recipe, name).epochs for name in ("dense", "train", "recover")}
    return {"seed": seed, "epochs": budget, "augment": recipe.data.augment, "nets": found}


def change(before: Tensor, after: Tensor) -> list[float]:
    """Error of the network `after` minus that of `before`, with its paired 95% interval: [change, low, high] in points."""
    low, high = paired_shares(before, after)
    return [100 * float(after.double().mean() - before.double().mean()), 100 * low, 100 * high]


# Results


def chosen(runs: list[dict[str, Any]], kind: str) -> str | None:
    """The plan of a kind with the lowest validation error (then NLL), averaged over the seeds; None if there is none."""
    names = [f"{kind}, {plan}" for plan in PLANS if all(f"{kind}, {plan}" in run["nets"] for run in runs)]
    rank: Callable[[str], tuple[float, ...]] = lambda name: tuple(  # noqa: E731
        mean(run["nets"][name][key] for run in runs) for key in ("validation_error", "validation_nll")
    )
    return min(names, key=rank, default=None)


def table(results: dict[str, Any]) -> str:
    """Markdown: for each recipe the sparse network, its dense start and its controls."""
    lines = [
        "# Controls of the MNIST figures",
        "",
        "Written by `benchmarks/controls.py`. All nets of a recipe have the same dense start, digits and augmentation; the",
        "controls have as many epochs as fine-tuning and recovery together. Means over the seeds, in brackets each seed's. The",
        "change is the error of the sparse network less that of the row, in points, with its paired 95% interval on the test",
        "digits of each seed. AUROC: test digits against others, by 1 - confidence.",
    ]
    for recipe, runs in results["recipes"].items():
        runs = [runs[seed] for seed in sorted(runs, key=int)]
        epochs, augment = runs[0]["epochs"], runs[0]["augment"]
        moved = "digits moved by up to a pixel" if augment else "no augmentation"
        lines += ["", f"## {recipe}", ""]
        lines += [f"Dense start {epochs['dense']} epochs, then {epochs['train']} + {epochs['recover']}; {moved}.", ""]
        sets = list(runs[0]["nets"]["sparse"]["auroc"])
        heads = ["net", "weights", "test error %", "validation error %", "change by seed", *(f"AUROC {name}" for name in sets)]
        lines += [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
        rows = {"sparse": "sparse (`svdc sparsify`)", "dense start": "its dense start"}
        known = results["chosen"][recipe]
        rows |= {known[kind]: f"{label} ({known[kind].split(', ')[1]})" for kind, label in KINDS.items() if known[kind]}
        for name, label in rows.items():
            nets = [run["nets"][name] for run in runs]
            cells = [label, f"{mean(net['weights'] for net in nets):,.0f}"]
            for key in ("test_error", "validation_error"):
                values = [net[key] for net in nets]
                cells.append(f"{mean(values):.2f} ({', '.join(f'{value:.2f}' for value in values)})")
            spans = [
                f"{net['change'][0]:+.2f} [{net['change'][1]:+.2f}, {net['change'][2]:+.2f}]" for net in nets if "change" in net
            ]
            cells.append("; ".join(spans))
            cells += [f"{mean(net['auroc'][key] for net in nets):.3f}" for key in sets]
            lines.append(f"| {' | '.join(cells)} |")
    lines += ["", f"{results['machine']['cpu']}; torch {results['machine']['torch']}.", ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", action="append", help="name of the runs' folders without the seed; may be given again")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--kind", action="append", choices=list(KINDS), help="this control only; may be given again")
    parser.add_argument("--runs", type=Path, default=HERE.parent / "runs" / "benchmarks", help="where the runs' folders are")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--cifar", help="folder of CIFAR-10, for pictures in grey")
    options = parser.parse_args()
    out = options.runs / "controls"
    out.mkdir(parents=True, exist_ok=True)
    path = options.results / "controls.json"
    results = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"recipes": {}}
    missing = []
    for recipe in options.recipe or RECIPES:
        for seed in options.seeds:
            folder = options.runs / f"{recipe}-{seed}"
            if not (folder / "report.json").is_file():
                missing.append(folder.name)
                continue
            found = compared(folder, seed, out, options.kind or list(KINDS), options.cifar)
            results["recipes"].setdefault(recipe, {})[str(seed)] = found
            runs = list(results["recipes"][recipe].values())
            results.setdefault("chosen", {})[recipe] = {kind: chosen(runs, kind) for kind in KINDS}
            results["machine"] = {"cpu": cpu(), "torch": torch.__version__}
            path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
            path.with_suffix(".md").write_text(table(results), encoding="utf-8")
            print(folder.name, flush=True)
    if missing:
        sys.exit(f"no finished run (benchmarks/mnist.py makes them): {', '.join(missing)}")


if __name__ == "__main__":
    main()
