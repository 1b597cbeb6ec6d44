"""Networks that others trained: `svdc sparsify` with a goal or a budget, compared with other uses of the same epochs, from the
same weights.

    python benchmarks/real.py --cifar FOLDER --resnet FOLDER [--only resnet20-macs2x ...] [--peer NAME ...] [--runs FOLDER]
                              [--epochs 7 10] [--minutes 9]

The folder of --resnet holds the .th files of akamaster/pytorch_resnet_cifar10, that of --cifar train.tar.gz and test.tar.gz.
The weights were trained on all training images, so one fixed half of the test images is used for choices, and the other one
is reported; figures on all 10,000 are reported separately. Ours is the command alone with the recipe of benchmarks/models/.
Every peer starts from the same weights and uses the training images, the augmentation, the precision, the optimizer and the
distillation of our recovery, and as many epochs as led to our network (levels of the path, cooling, recovery; other trials of
the search are not counted), with one fall of the learning rate:

- dense, trained as long
- torch-pruning (magnitude; Taylor): gradual, globally, over the first half of the epochs, to no more MACs than ours (to no
  more parameters than ours has parameters or non-zeros, where these are the goal), whatever size a budget led to; if named,
  also evenly: the same share of each layer
- gradual magnitude pruning of single weights (Zhu & Gupta 2018) to as many non-zeros as ours has parameters (or non-zeros,
  where they are the goal); MACs stay the same

--epochs: of training and of recovery, where the recipe's are too many for the machine. A finished run is not repeated, and a
stopped one is resumed, as is a peer from its last epoch; with --minutes a slice ends after that time. Peers made with other
settings are not kept with ours; --label keeps what is stored, and stores this setting under a name of its own. Results are
written after each network to benchmarks/results/real.json and real.md.
"""

from __future__ import annotations

import argparse
import copy
import fcntl
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from controls import change
from mnist import machine, read, write
from real_peers import EVENLY, PEERS, Way, file_of, macs, nothing, peers_of, train, unpickled
from real_table import asked, epochs_of, kept_of, table
from slices import UNFINISHED, Slice, sparsified
from torch import Tensor, nn

from svdcompress.pipeline import OpenRun, open_run
from svdcompress.recipe import Recipe, load_recipe
from svdcompress.sources import Examples
from svdcompress.train import resolved_precision
from svdcompress.uncertainty import wilson

HERE = Path(__file__).resolve().parent
BATCH = 500

BEFORE = {"batch": 128}
"""Settings of rows that were stored before these settings were."""


@dataclass(frozen=True)
class Case:
    """A network: its recipe in benchmarks/models, its weights, what is asked for, and what the result is compared with."""

    recipe: str
    weights: str | None  # None: trained by the run
    goal: str  # as --goal takes it, or max-drop=POINTS
    anchor: str


CASES = {
    "resnet20-macs2x": Case("resnet20", "resnet20-*.th", "macs=2x", "torch-pruning, same run"),
    "resnet56-macs2.6x": Case("resnet56", "resnet56-*.th", "macs=2.6x", "DepGraph: 93.64% at 2.57x from 93.53%"),
    "resnet20-macs4x": Case("resnet20", "resnet20-*.th", "macs=4x", "torch-pruning, same run"),
    "resnet20-latency2x": Case("resnet20", "resnet20-*.th", "latency=2x", "units alone"),
    "resnet56-latency2x": Case("resnet56", "resnet56-*.th", "latency=2x", "units alone"),
    "resnet20-drop2": Case("resnet20", "resnet20-*.th", "max-drop=2", "torch-pruning, same run, as many MACs"),
    "resnet56-macs4x": Case("resnet56", "resnet56-*.th", "macs=4x", "PPSM: 93.22% at 4.1x from 93.44%"),
    "resnet56-drop2": Case("resnet56", "resnet56-*.th", "max-drop=2", "torch-pruning, same run, as many MACs"),
    "vgg16-macs5x": Case("vgg16", None, "macs=5x", "3.0x MACs at no loss"),
    "vgg16-parameters25x": Case("vgg16", None, "parameters=25x", "18x parameters at no loss"),
    "vgg16-nonzero80x": Case("vgg16", None, "nonzero=80x", "Sparse VD: 65x non-zeros"),
    "vgg16-drop1": Case("vgg16", None, "max-drop=1", "torch-pruning, same run, as many MACs"),
}


def row(name: str, label: str) -> str:
    """The name that a case is stored under."""
    return f"{name}-{label}" if label else name


def trained_before(name: str, options: argparse.Namespace) -> Path | None:
    """The dense network that another case's run has trained with the same settings, whatever its goal, or None; that run may
    still be cutting it."""
    asked = load_recipe(HERE / "models" / f"{CASES[name].recipe}.yaml", options.set)
    for other, case in CASES.items():
        run = options.runs / row(other, options.label)
        if other == name or case.recipe != CASES[name].recipe or not (run / "dense.safetensors").is_file():
            continue
        made = load_recipe(run / "recipe.yaml")
        if made.weights.file is None and (made.dense, made.seed, made.model) == (asked.dense, asked.seed, asked.model):
            return run / "dense.safetensors"
    return None


def dense_training(recipe: Recipe) -> dict[str, Any]:
    """How the dense network was trained, by this run or, with the same settings, by the run whose file it uses."""
    return trained_by(recipe.dense) | {"epochs": recipe.dense.epochs}


def arguments(name: str, options: argparse.Namespace) -> list[str]:
    """The arguments of `svdc sparsify` for a case."""
    case = CASES[name]
    found = [str(HERE / "models" / f"{case.recipe}.yaml"), *asked(case.goal).split()]
    if case.weights is not None:
        weights = next(options.resnet.glob(case.weights), None)
        if weights is None:
            sys.exit(f"--resnet: {options.resnet} has no {case.weights}")
        found += ["--weights", str(weights)]
    elif (trained := trained_before(name, options)) is not None:
        found += ["--weights", str(trained)]
    found += ["--data-arg", f"folder={options.cifar}", "--data-arg", f"cache={options.runs / 'cifar.npz'}"]
    epochs = [f"{stage}.epochs={count}" for stage, count in zip(("train", "recover"), options.epochs or (), strict=False)]
    return [*found, *(part for setting in [*epochs, *options.set] for part in ("--set", setting))]


# Figures


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


@torch.no_grad()
def wrong(model: nn.Module, examples: Examples) -> Tensor:
    """Which of the examples a network gets wrong (N,)."""
    batches = examples.batches(BATCH, device=_device(model))
    return torch.cat([(model(x).argmax(1) != y).cpu() for x, y in batches])


Missed = dict[str, Tensor]
"""Which images a network gets wrong, by part of the test images (N,)."""


def figures(model: nn.Module, opened: OpenRun) -> tuple[dict[str, Any], Missed]:
    """Size and accuracy, and which images are wrong: "chosen", "reported", and "all" if both halves are test images."""
    chosen, reported = wrong(model, opened.data.validation), wrong(model, opened.data.test)
    parts = {"chosen": chosen, "reported": reported}
    if not str(opened.recipe.data.name).endswith(":whole"):  # both are test images then
        parts["all"] = torch.cat([chosen, reported])
    example = next(iter(opened.data.test.batches(1, device=_device(model))))[0]
    found = {
        "macs": macs(model, example),
        "parameters": sum(p.numel() for p in model.parameters()),
        "nonzero": sum(int(p.count_nonzero()) for p in model.parameters()),
        "accuracy": {name: 100 - 100 * float(part.double().mean()) for name, part in parts.items()},
        "interval": [100 - 100 * bound for bound in reversed(wilson(float(reported.sum()), len(reported)))],
    }
    return found, parts


def changes(before: Missed, after: Missed) -> dict[str, Any]:
    """The change of the error on the reported half, and on all test images if half of them were used for choices."""
    found = {"change": change(before["reported"], after["reported"])}
    return found | ({"change_all": change(before["all"], after["all"])} if "all" in before else {})


def trained_by(settings: Any) -> dict[str, Any]:
    """The optimizer settings in a section of a recipe."""
    return {key: getattr(settings, key) for key in ("optimizer", "lr", "weight_decay")}


def beside(earlier: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """The stored networks of a case if they were made with the current epochs and settings, {} otherwise."""
    same = earlier.get("epochs") == now["epochs"]
    same = same and all(earlier["setting"].get(key, BEFORE.get(key)) == value for key, value in now["setting"].items())
    return earlier["nets"] if same else {}


def joined(stored: dict[str, Any] | None, found: dict[str, Any]) -> dict[str, Any]:
    """This process's results for a case, and the peers that others have meanwhile compared with the same network."""
    others = beside(stored, found) if stored else {}
    if any(others.get("ours", {}).get(key) != found["nets"]["ours"][key] for key in ("macs", "accuracy")):
        return found
    missing = {peer: net for peer, net in others.items() if "change" in net and "change" not in found["nets"].get(peer, {})}
    return found | {"nets": found["nets"] | missing}


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """A lock on a folder: only one process at a time is inside."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _same_dense(name: str, runs: Path, label: str, epochs: int, setting: dict[str, Any]) -> str | None:
    """Another case whose dense network was trained as long, from the same weights with the same settings, or None."""
    alike = ("images", "augment", "recovery", "batch", "precision", "torch", "device")
    results, peer = read(HERE / "results" / "real.json"), next(peer for peer, pruner in PEERS.items() if pruner is nothing)
    for sister, case in CASES.items():
        same = sister != name and case.weights is not None and case.recipe == CASES[name].recipe
        found = results.get(row(sister, label), {})
        same = same and all(
            found.get("setting", {}).get(key, BEFORE.get(key)) == setting.get(key, BEFORE.get(key)) for key in alike
        )
        if same and found.get("nets", {}).get(peer, {}).get("epochs") == epochs:
            return sister if (runs / f"{row(sister, label)}-dense-trained-as-long.done.pt").is_file() else None
    return None


def way_of(goal: str, epochs: int, small: dict[str, Any]) -> Way:
    """What peers get: the epochs of our network, and its size by what the goal counts."""
    measure, _, _ = goal.partition("=")
    by_weights = measure in ("parameters", "nonzero")  # a budget goes by multiply-accumulates
    return Way(epochs, small["macs"], small["nonzero" if measure == "nonzero" else "parameters"], by_weights=by_weights)


def compared(name: str, options: argparse.Namespace, slot: Slice, store: Callable[[dict[str, Any]], None]) -> None:
    """Measure our network, then the peers without stored results; store after each."""
    opened = open_run(options.runs / row(name, options.label), trust_code=True)
    results, device = opened.results, "cuda" if torch.cuda.is_available() else "cpu"
    known = read(HERE / "results" / "real.json").get(row(name, options.label), {})
    earlier, nets = dict(known), {}
    small, missed = figures(opened.model.to(device), opened)
    small |= {key: results["sparse"][key] for key in ("macs", "parameters", "nonzero", "latency_ms")}  # of the means alone
    way = way_of(CASES[name].goal, epochs_of(results["history"]), small)
    search = results["search"]
    trials = sum(trial.get("continues") is None for trial in search["trials"])
    known["nets"] = nets
    if layers := opened.recovery.distill.layers:  # ours alone: which of the teacher's layers those of peers match is unknown
        small["layers"] = layers
    nets["ours"] = {**small, "seconds": search["seconds"], "trials": trials, "reached": search["reached"]} | kept_of(search)
    start, start_missed = figures(copy.deepcopy(opened.dense).to(device), opened)
    nets["dense start"] = start | changes(start_missed, missed) | {"latency_ms": results["dense"]["latency_ms"]}
    known |= {"anchor": CASES[name].anchor, "goal": CASES[name].goal, "epochs": way.epochs, "machine": machine()}
    recipe = opened.recipe
    known["setting"] = {
        "train": recipe.train.epochs,
        "recover": recipe.recover.epochs,
        "precision": resolved_precision(recipe.train.precision, device),
        "distill": opened.recovery.distill.weight,
        "augment": recipe.data.augment,
        "lr": recipe.train.lr,
        "training": trained_by(recipe.train) | {"distill": recipe.train.distill.weight},
        "recovery": trained_by(opened.recovery),
        "batch": opened.recovery.batch_size,
        "levels": len(search["path"]),
        "images": len(opened.data.train),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
    }
    if CASES[name].weights is None:
        known["setting"]["dense"] = dense_training(recipe)
    before = beside(earlier, known)
    same = {key: before.get("ours", {}).get(key) for key in ("macs", "accuracy")} == {
        key: small[key] for key in ("macs", "accuracy")
    }
    for peer in (peer for peer in before if peer in PEERS):  # differences from an earlier network of ours do not count
        nets[peer] = before[peer] if same else {key: value for key, value in before[peer].items() if "change" not in key}
    store(known)
    asked_for = peers_of(opened) if options.peer is None else options.peer
    for peer in [*peers_of(opened), *EVENLY]:
        file = file_of(options.runs, row(name, options.label), peer)
        done = file.with_suffix(".done.pt")
        seconds, epochs = (before.get(peer, {}).get(key) for key in ("seconds", "epochs"))
        if (
            PEERS[peer] is nothing
            and not done.is_file()
            and (sister := _same_dense(name, options.runs, options.label, way.epochs, known["setting"]))
        ):
            own, others = (f"{row(case, options.label)}-" for case in (name, sister))
            shutil.copy(options.runs / f"{others}{done.name.removeprefix(own)}", done)
            nets_of_sister = read(HERE / "results" / "real.json")[row(sister, options.label)]["nets"]
            seconds, epochs = nets_of_sister[peer]["seconds"], way.epochs
        if "change" in nets.get(peer, {}):
            continue
        if done.is_file():  # judged again, as our network, from which its difference is taken, has changed
            model = unpickled(done).to(device)
        elif peer in nets:
            print(f"{name}: {peer} stays without its interval, as {done} is not there")
            continue
        elif peer not in asked_for:
            continue
        else:
            print(f"{name}: {peer}, {way.epochs} epochs", flush=True)
            try:
                model, seconds = train(copy.deepcopy(opened.dense).to(device), opened, way, peer, file, slot)
            except ModuleNotFoundError as error:  # another machine may have it
                print(f"{name}: {peer} is left out: {error}")
                continue
            epochs = way.epochs
            torch.save(model, done)  # other benchmarks use it, too
            file.unlink(missing_ok=True)
        found, other = figures(model, opened)
        nets[peer] = {**found, **changes(other, missed), "seconds": seconds, "epochs": epochs}
        store(known)


def main() -> None:
    """Run the cases in order, until the slice ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cifar", type=Path, required=True)
    parser.add_argument("--resnet", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--peer", nargs="*", choices=PEERS, help="these alone; none: ours alone")
    parser.add_argument("--epochs", type=int, nargs=2, metavar=("TRAIN", "RECOVER"))
    parser.add_argument("--set", action="append", default=[], help="for the command, as in search.trials=2")
    parser.add_argument("--label", default="", help="run and stored as NAME-LABEL, beside rows of another setting")
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--runs", type=Path, default=HERE.parent / "runs" / "benchmarks" / "real")
    options = parser.parse_args()
    options.runs = options.runs.resolve()
    options.runs.mkdir(parents=True, exist_ok=True)
    slot, path, failed = Slice(options.minutes), HERE / "results" / "real.json", []
    try:
        for name in options.only:
            if not sparsified(options.runs / row(name, options.label), arguments(name, options), slot):
                failed.append(name)
                continue

            def store(found: dict[str, Any], name: str = name) -> None:
                with alone(path.parent):
                    results = read(path)
                    results[row(name, options.label)] = joined(results.get(row(name, options.label)), found)
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
