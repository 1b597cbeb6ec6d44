"""Networks that others trained: `svdc sparsify --goal` beside what else the same epochs give, from the same weights.

    python benchmarks/real.py --cifar FOLDER --resnet FOLDER [--only resnet20-macs2x ...] [--peer NAME ...] [--runs FOLDER]
                              [--epochs 7 10] [--minutes 9]

FOLDER of --resnet holds the .th files of akamaster/pytorch_resnet_cifar10, that of --cifar train.tar.gz and test.tar.gz. The
weights have seen all training images, so one fixed half of the test images chooses, and the other one is reported; all 10,000
are reported apart. Ours is the command alone with the recipe of benchmarks/models/. Every peer starts from the same weights and
has the training images, the augmentation, the optimizer, the precision and as many epochs as the way to our network (levels of
the path, cooling, recovery; other trials of the search are not counted), in one fall of the learning rate:

- dense, trained as long
- torch-pruning (magnitude; Taylor): gradual, globally, over the first half of the epochs, to no more MACs than ours
- gradual magnitude pruning of single weights (Zhu & Gupta 2018) to as many non-zeros as ours has parameters (or non-zeros,
  where they are the goal); MACs stay

--epochs: of training and of recovery, where the recipe's are too many for the machine. A run that is finished is not repeated,
one that was stopped goes on, and so does a peer at its last epoch; with --minutes a slice ends after so many. Results are
written after each network to benchmarks/results/real.json and real.md.
"""

from __future__ import annotations

import argparse
import copy
import math
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from controls import Magnitude, change
from mnist import machine, read, write
from real_table import table
from slices import UNFINISHED, Slice
from torch import Tensor, nn

from svdcompress import cost
from svdcompress.pipeline import OpenRun, open_run
from svdcompress.sources import Examples
from svdcompress.train import LrFactor, seed_everything
from svdcompress.uncertainty import wilson

HERE = Path(__file__).resolve().parent
BATCH = 500
PRUNE_EVERY = 50
"""Steps between two steps of a pruner."""

TAYLOR_BATCHES = 4
"""Batches whose gradients torch-pruning's Taylor scores are made of, before each step of pruning."""


@dataclass(frozen=True)
class Case:
    """A network: its recipe in benchmarks/models, its file of weights, and the size that is asked for."""

    recipe: str
    weights: str | None  # None: trained by the run
    goal: str
    anchor: str


CASES = {
    "resnet20-macs2x": Case("resnet20", "resnet20-*.th", "macs=2x", "torch-pruning, same run"),
    "resnet56-macs2.6x": Case("resnet56", "resnet56-*.th", "macs=2.6x", "DepGraph: 93.64% at 2.57x from 93.53%"),
    "resnet20-macs4x": Case("resnet20", "resnet20-*.th", "macs=4x", "torch-pruning, same run"),
    "resnet56-macs4x": Case("resnet56", "resnet56-*.th", "macs=4x", "PPSM: 93.22% at 4.1x from 93.44%"),
    "vgg16-macs5x": Case("vgg16", None, "macs=5x", "3.0x MACs at no loss"),
    "vgg16-parameters25x": Case("vgg16", None, "parameters=25x", "18x parameters at no loss"),
    "vgg16-nonzero80x": Case("vgg16", None, "nonzero=80x", "Sparse VD: 65x non-zeros"),
}


# Ours


def ours(name: str, options: argparse.Namespace, slot: Slice) -> bool:
    """Run, or go on with, the command; whether it has ended well."""
    case, out = CASES[name], options.runs / name
    if (out / "report.json").is_file():
        return True
    command = [sys.executable, "-m", "svdcompress", "sparsify", "--out", str(out), "--trust-code"]
    if (out / "recipe.yaml").is_file():
        command += ["--resume"]
    else:
        command += [str(HERE / "models" / f"{case.recipe}.yaml"), "--goal", case.goal]
        if case.weights is not None:
            command += ["--weights", str(next(options.resnet.glob(case.weights)))]
        command += ["--data-arg", f"folder={options.cifar}", "--data-arg", f"cache={options.runs / 'cifar.npz'}"]
        for name, epochs in zip(("train", "recover"), options.epochs or (), strict=False):
            command += ["--set", f"{name}.epochs={epochs}"]
        for setting in options.set:
            command += ["--set", setting]
    process = subprocess.Popen(command, cwd=HERE.parent)
    try:
        return process.wait(slot.left) == 0
    except subprocess.TimeoutExpired:
        process.terminate()  # the command stops at the next batch, and keeps what it has
        process.wait()
        raise Slice.Over from None


# Peers


@dataclass
class Size:
    """What ours ended with, and what its way cost."""

    macs: int
    left: int  # parameters, or those that are not 0 where the goal counts these
    epochs: int


Prune = Callable[[float], bool | None]


def nothing(epoch: float) -> None:
    """A control that prunes nothing."""


def torch_pruning(model: nn.Module, opened: OpenRun, size: Size, *, taylor: bool) -> Prune:
    """torch-pruning's own pruner, a little at a time: MACs fall as 1 - (1 - t)^3 over the first half of the epochs."""
    import torch_pruning as tp

    example = next(iter(opened.data.train.batches(2, device=_device(model))))[0]
    score = tp.importance.GroupTaylorImportance() if taylor else tp.importance.GroupMagnitudeImportance(p=2)
    head = [layer for layer in model.modules() if isinstance(layer, nn.Linear | nn.Conv2d)][-1]
    pruner = tp.pruner.BasePruner(
        model, example, importance=score, global_pruning=True, pruning_ratio=0.99, iterative_steps=400, ignored_layers=[head]
    )
    start = macs(model, example)

    def prune(epoch: float) -> bool:
        target = size.macs + (start - size.macs) * (1 - min(epoch / (0.5 * size.epochs), 1.0)) ** 3
        changed = False
        while macs(model, example) > target:
            if pruner.current_step >= pruner.iterative_steps:
                raise RuntimeError(f"torch-pruning ended at {macs(model, example):,} MACs; {target:,.0f} were wanted")
            if taylor:
                _gradients(model, opened.data.train, pruner.current_step)
            pruner.step()
            changed = True
        return changed

    return prune


def magnitude(model: nn.Module, opened: OpenRun, size: Size) -> Prune:
    """Gradual global pruning of single weights; biases and normalisation stay and are counted."""
    others = sum(p.numel() for p in model.parameters() if p.dim() < 2)
    return Magnitude(model, size.left - others, 0.5 * size.epochs)


PEERS: dict[str, Callable[[nn.Module, OpenRun, Size], Prune]] = {
    "torch-pruning, Taylor": lambda *given: torch_pruning(*given, taylor=True),
    "torch-pruning, magnitude": lambda *given: torch_pruning(*given, taylor=False),
    "dense, trained as long": lambda *given: nothing,
    "gradual magnitude, single weights": magnitude,
}


def train(model: nn.Module, opened: OpenRun, epochs: int, prune: Prune, file: Path, slot: Slice) -> nn.Module:
    """Train with the recipe's optimizer settings and one fall of the learning rate; the model, which pruning may have renewed.

    prune: told the epoch, fractions allowed, every so many steps; it says whether the parameters are others now. file: what was
    reached, after each epoch, for a later slice.
    """
    settings, data, device = opened.recipe.train, opened.data.train, _device(model)
    first, state = 0, None
    if file.is_file():
        kept = torch.load(file, weights_only=False)  # our own, of an earlier slice
        first, model, prune, state = kept["epochs"], kept["model"].to(device), kept["prune"], kept["optimizer"]
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.lr)
    if state is not None:
        optimizer.load_state_dict(state)
    factor = LrFactor(settings.schedule, epochs)
    batches = math.ceil(len(data) / settings.batch_size)
    for epoch in range(first, epochs):
        model.train()
        seed_everything(opened.recipe.seed, "peer", epoch)
        stream = data.batches(settings.batch_size, shuffle=1000 * opened.recipe.seed + epoch, device=device)
        for index, (x, y) in enumerate(stream):
            if index % PRUNE_EVERY == 0 and prune(epoch + index / batches):
                model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
                optimizer = torch.optim.Adam(model.parameters(), lr=settings.lr)
            for group in optimizer.param_groups:
                group["lr"] = settings.lr * factor(epoch + index / batches)
            with torch.autocast(device.type, torch.bfloat16, enabled=settings.precision == "bf16"):
                loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            if isinstance(prune, Magnitude):
                prune(-1.0)
            slot.check()
        print(f"  epoch {epoch + 1}/{epochs}, last loss {float(loss):.3f}", flush=True)
        alike = prune is nothing or isinstance(prune, Magnitude)
        if alike or epoch + 1 > 0.5 * epochs:  # before that torch-pruning's pruner would have to be kept too
            kept = {
                "epochs": epoch + 1,
                "model": model,
                "prune": prune if alike else nothing,
                "optimizer": optimizer.state_dict(),
            }
            torch.save(kept, file)
    if isinstance(prune, Magnitude):
        prune(math.inf)
    file.unlink(missing_ok=True)
    return model.to(memory_format=torch.contiguous_format).eval()  # type: ignore[call-overload]


def _gradients(model: nn.Module, data: Examples, seed: int) -> None:
    """Of the loss summed over a few batches, as they come with this seed."""
    model.zero_grad(set_to_none=True)
    for index, (x, y) in enumerate(data.batches(128, shuffle=seed, device=_device(model))):
        if index == TAYLOR_BATCHES:
            return
        nn.functional.cross_entropy(model(x), y).backward()


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def macs(model: nn.Module, example: Any) -> int:
    """Multiply-accumulates of one example, counted as the package counts ours."""
    return cost.measure(model, example[:1]).macs


# Figures


@torch.no_grad()
def wrong(model: nn.Module, examples: Examples) -> Tensor:
    """Which of the examples a network gets wrong (N,)."""
    batches = examples.batches(BATCH, device=_device(model))
    return torch.cat([(model(x).argmax(1) != y).cpu() for x, y in batches])


def figures(model: nn.Module, opened: OpenRun) -> tuple[dict[str, Any], Tensor]:
    """Size and errors, and which images of the reported half are wrong."""
    chosen, reported = wrong(model, opened.data.validation), wrong(model, opened.data.test)
    parts = {"chosen": chosen, "reported": reported}
    if isinstance(opened.recipe.weights.file, str):  # both are test images then
        parts["all"] = torch.cat([chosen, reported])
    example = next(iter(opened.data.test.batches(1, device=_device(model))))[0]
    found = {
        "macs": macs(model, example),
        "parameters": sum(p.numel() for p in model.parameters()),
        "nonzero": sum(int(p.count_nonzero()) for p in model.parameters()),
        "accuracy": {name: 100 - 100 * float(part.double().mean()) for name, part in parts.items()},
        "interval": [100 - 100 * bound for bound in reversed(wilson(float(reported.sum()), len(reported)))],
    }
    return found, reported


def compared(name: str, options: argparse.Namespace, slot: Slice, store: Callable[[dict[str, Any]], None]) -> None:
    """Our network's figures, then the peers that are not known; stored after each."""
    opened = open_run(options.runs / name, trust_code=True)
    results, device = opened.results, "cuda" if torch.cuda.is_available() else "cpu"
    known = read(HERE / "results" / "real.json").get(name, {})
    nets = known.setdefault("nets", {})
    small, missed = figures(opened.model.to(device), opened)
    small |= {name: results["sparse"][name] for name in ("macs", "parameters", "nonzero")}  # of the means alone
    epochs = sum(row["stage"] != "dense" for row in results["history"])
    size = Size(small["macs"], small["nonzero" if CASES[name].goal.startswith("nonzero") else "parameters"], epochs)
    trials = len(results["search"]["trials"])
    nets["ours"] = {**small, "seconds": results["search"]["seconds"], "trials": trials, "reached": results["search"]["reached"]}
    start, start_missed = figures(copy.deepcopy(opened.dense).to(device), opened)
    nets["dense start"] = {**start, "change": change(start_missed, missed)}
    known |= {"anchor": CASES[name].anchor, "goal": CASES[name].goal, "epochs": size.epochs, "machine": machine()}
    recipe = opened.recipe
    known["setting"] = {
        "train": recipe.train.epochs,
        "recover": recipe.recover.epochs,
        "precision": recipe.train.precision,
        "distill": recipe.recover.distill.weight,
        "augment": recipe.data.augment,
        "lr": recipe.train.lr,
        "levels": recipe.search.levels,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
    }
    store(known)
    for peer in options.peer or PEERS:
        if peer in nets:
            continue
        print(f"{name}: {peer}, {size.epochs} epochs", flush=True)
        begun = time.monotonic()
        model = copy.deepcopy(opened.dense).to(device)
        file = options.runs / f"{name}-{peer.replace(', ', '-').replace(' ', '-')}.pt"
        model = train(model, opened, size.epochs, PEERS[peer](model, opened, size), file, slot)
        found, other = figures(model, opened)
        nets[peer] = {**found, "change": change(other, missed), "seconds": time.monotonic() - begun}
        store(known)


def main() -> None:
    """The cases in order, as far as the slice goes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cifar", type=Path, required=True)
    parser.add_argument("--resnet", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--peer", nargs="+", choices=PEERS)
    parser.add_argument("--epochs", type=int, nargs=2, metavar=("TRAIN", "RECOVER"))
    parser.add_argument("--set", action="append", default=[], help="for the command, as in search.trials=2")
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--runs", type=Path, default=HERE.parent / "runs" / "benchmarks" / "real")
    options = parser.parse_args()
    options.runs = options.runs.resolve()
    options.runs.mkdir(parents=True, exist_ok=True)
    slot, path, failed = Slice(options.minutes), HERE / "results" / "real.json", []
    try:
        for name in options.only:
            if not ours(name, options, slot):
                failed.append(name)
                continue

            def store(found: dict[str, Any], name: str = name) -> None:
                results = read(path) | {name: found}  # another process may have added to it
                write(path, results)
                path.with_suffix(".md").write_text(table(results), encoding="utf-8")

            compared(name, options, slot, store)
    except Slice.Over:
        print("the slice has ended; the next one goes on from here")
        sys.exit(UNFINISHED)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
