"""Runs all work that needs a GPU, most valuable first, in slices of under ten minutes that resume where the last one ended.

    python benchmarks/gpu.py [--minutes 9] [--out FOLDER] [--cifar FOLDER --resnet FOLDER] [--rxnfp FOLDER --yields FOLDER]
                             [--crepe FOLDER --speech FILE] [--dncnn FOLDER] [--only STEP ...] [--epochs 24]
                             (or: make gpu)

The steps are: the tests marked `cuda` (meanwhile the models that are timed next are compiled, which needs no GPU); the rows
of benchmarks/speed.py that need a GPU; ResNet-56 cut at once with --epochs of recovery, and then its peers (side by side, as
a single one leaves the GPU idle); VGG-16, which is trained for 40 epochs first, for three goals, and its peers; and then the
long rows of benchmarks/real.py and real_nets.py (the folders are their options), which are resumed in each slice. Each step
stores its result as soon as it ends, under --out or in benchmarks/results. --only: the steps whose names start with one of
these.

A finished step is not repeated. If a step fails, the next one starts, and a later slice tries it again after all others. The
machine's own Python needs the packages in NEEDED, and torch-pruning for the peers.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent

NEEDED = ("torch", "numpy", "pydantic", "yaml", "typer", "rich", "safetensors", "accelerate", "onnx", "onnxruntime", "pytest")
NEEDED += ("onnxscript", "torchmetrics", "matplotlib", "sklearn", "PIL")

FOLDERS = (("cifar", "resnet"), ("rxnfp", "yields"), ("crepe", "speech"), ("dncnn",))
"""Options that name the data of a family of rows: all of a family's, or none."""

SPEED = (
    "ResNet-50, batch 128, bfloat16 AMP, compiled",
    "VGG-16, batch 128, bfloat16 AMP, compiled",
    "linear 4096, batch 4096, TF32",
)
"""The rows of the speed benchmark that need a GPU."""

CLOSING = 60.0
"""Seconds before the end of a slice at which a long row should stop by itself, as some of its stages react late."""


COMPILED = (("ResNet-50", ["ours"]), ("ResNet-50", ["dense"]), ("VGG-16", ["ours", "dense"]))
"""What is compiled during the tests, one process each: the start of a row's name, and contestants. torch caches it."""

AT_ONCE = ("search.trials=1", "recover.batch_size=512", "recover.lr=0.1", "recover.norms=batch", "uncertainty.samples=0")
"""Settings for the networks that are cut at once: large batches, as small ones leave most of a GPU idle."""

OF_VGG = (
    *(setting for setting in AT_ONCE if not setting.startswith(("recover.batch", "recover.lr"))),
    *(f"dense.{setting}" for setting in ("epochs=40", "batch_size=256", "lr=0.1")),
    *(f"recover.{setting}" for setting in ("batch_size=256", "lr=0.05", "distill.weight=0.9", "distill.temperature=3")),
)
"""The same for VGG-16, which the run trains: 40 epochs for the dense network, and as many for recovery."""

UNDER_PRESSURE = ("train.batch_size=256", "train.lr=0.0005", "train.lr_log_sigma2=auto")
"""What VGG-16 has besides for 80x fewer non-zeros, which takes fine-tuning under pressure: 18 epochs, and 30 of recovery."""


@dataclass(frozen=True)
class Step:
    """A step of the work.

    commands: run side by side, with "{minutes}" replaced by the time left. least: the seconds that must be left to start it.
    beside: commands that run at the same time and whose failure does not count.
    """

    name: str
    commands: list[list[str]]
    least: float = 30.0
    beside: tuple[list[str], ...] = ()


def steps(options: argparse.Namespace) -> list[Step]:
    """All steps, in order; those that need folders only if these are given."""
    from real import CASES
    from real_nets import NAMES
    from real_peers import EVENLY, NOT_DISTILLED, PEERS

    peers = [peer for peer in PEERS if peer not in (NOT_DISTILLED, *EVENLY)]  # four side by side keep a GPU busy
    python, slot = sys.executable, ["--minutes", "{minutes}"]
    speed = [python, "benchmarks/speed.py", "--skip", "ours, masked"]
    beside = tuple(
        [*speed, "--only", _row(begin), *(part for name in names for part in ("--compile-only", name))]
        for begin, names in COMPILED
    )
    tests = [python, "-m", "pytest", "-q", "-m", "cuda", "tests/cuda", "-p", "no:cacheprovider"]
    if find_spec("xdist"):  # many, as in these tests the GPU waits for the CPU
        tests += ["-n", str(max(2, 3 * (os.cpu_count() or 1) // 4))]
    found = [
        Step("tests", [tests], 60, beside),
        *(Step(f"speed: {name}", [[*speed, "--again", "--only", name]], 60) for name in SPEED),
    ]
    if options.cifar and options.resnet:
        folders = ["--cifar", str(options.cifar), "--resnet", str(options.resnet), "--runs", str(options.out), *slot]
        settings = [part for setting in AT_ONCE for part in ("--set", setting)]
        command = [python, "benchmarks/real.py", *folders, "--epochs", "0", str(options.epochs), *settings, "--label", "gpu"]
        pair = [[*command, "--only", name, "--peer"] for name in ("resnet56-macs4x", "resnet56-macs2.6x")]
        found.append(Step("at once: ours", pair, 120))
        command = [python, "benchmarks/real.py", *folders, "--label", "gpu"]
        vgg = {}
        for goal, *epochs in (("macs5x", "0", "40"), ("parameters25x", "0", "40"), ("nonzero80x", "18", "30")):
            settings = (*OF_VGG, *(UNDER_PRESSURE if goal == "nonzero80x" else ()))
            settings = [part for setting in settings for part in ("--set", setting)]
            vgg[goal] = [*command, "--epochs", *epochs, *settings, "--only", f"vgg16-{goal}", "--peer"]
        for goal, own in zip(("4x", "2.6x"), pair, strict=True):
            found.append(Step(f"at once: {goal}, peers", [[*own, peer] for peer in peers], 120))
        found += [Step(f"VGG-16: {goal}", [own], 120) for goal, own in vgg.items()]  # one dense network for all
        of_vgg = [*peers, *EVENLY]  # those that rank all units together end at chance
        found += [Step(f"VGG-16: {goal}, peers", [[*own, peer] for peer in of_vgg], 120) for goal, own in vgg.items()]
    long: list[tuple[str, list[str]]] = []
    if options.cifar and options.resnet:
        folders = ["--cifar", str(options.cifar), "--resnet", str(options.resnet)]
        long += [(name, ["benchmarks/real.py", *folders, "--only", name]) for name in CASES]
    for name in NAMES:
        kind = name.partition("-")[0]
        needed = {"crepe": ("crepe", "speech"), "denoise": ("dncnn",)}.get(kind, ("rxnfp", "yields"))
        if all(getattr(options, each) for each in needed):
            folders = [part for each in needed for part in (f"--{each}", str(getattr(options, each)))]
            long.append((name, ["benchmarks/real_nets.py", *folders, "--only", name]))
    found += [Step(name, [[python, *command, "--runs", str(options.out), *slot]], 120) for name, command in long]
    return [step for step in found if not options.only or step.name.startswith(tuple(options.only))]


def _row(begin: str) -> str:
    """The row of the speed benchmark whose name starts with `begin`."""
    return next(name for name in SPEED if name.startswith(begin))


def outcome(codes: list[int | None]) -> int | None:
    """The exit code of a step from those of its commands; None if one was stopped or reached the end of its slice."""
    from slices import UNFINISHED

    if any(code is None or code == UNFINISHED for code in codes):
        return None
    return next((code for code in codes if code), 0)


def run(step: Step, seconds: float) -> int | None:
    """Run the commands of a step side by side, for at most `seconds`; returns its `outcome`."""
    end = time.monotonic() + seconds
    told = [[part.replace("{minutes}", f"{(seconds - CLOSING) / 60:.2f}") for part in each] for each in step.commands]
    processes = [subprocess.Popen(each, cwd=ROOT, start_new_session=True) for each in [*told, *step.beside]]
    codes: list[int | None] = []
    try:
        for process in processes:
            try:
                codes.append(process.wait(max(0.1, end - time.monotonic())))
            except subprocess.TimeoutExpired:
                codes.append(None)
    finally:  # also after Ctrl-C, a run and what it started stop cleanly and keep their state
        for process in processes:
            end_group(process)
    return outcome(codes[: len(step.commands)])


def in_turn(all_steps: list[Step], known: dict[str, Any]) -> list[Step]:
    """The steps that are not done: first those that were never tried or were stopped, in order, then those that failed."""
    left = [step for step in all_steps if known.get(step.name, {}).get("rc") != 0]
    return sorted(left, key=lambda step: known.get(step.name, {}).get("rc") is not None)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Ask all processes that a process has started to end, and wait for them: one that goes on holds its run's lock."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        while True:
            process.poll()  # otherwise it stays in the group as a zombie
            os.killpg(process.pid, 0)
            time.sleep(0.1)


def bring_along(out: Path) -> None:
    """Copy the results to a folder elsewhere, as it may be all that comes back from the machine."""
    if HERE / "results" not in out.resolve().parents:
        for file in (HERE / "results").glob("*.*"):
            if file.stem in ("speed", "real", "real_nets"):
                shutil.copy2(file, out)


def problem(options: argparse.Namespace) -> str | None:
    """What is wrong with the folders that were given: rows would be left out, or fail one by one."""
    given = {name: getattr(options, name) for names in FOLDERS for name in names}
    for name, path in given.items():
        if path is not None and not path.exists():
            return f"--{name}: {path} does not exist"
    if options.resnet and not (list(options.resnet.glob("resnet20-*.th")) and list(options.resnet.glob("resnet56-*.th"))):
        return f"--resnet: {options.resnet} has no resnet20-*.th and resnet56-*.th"
    for names in FOLDERS:
        lacking = [f"--{name}" for name in names if given[name] is None]
        if 0 < len(lacking) < len(names):
            return f"{', '.join(lacking)}: also needed for the rows of --{next(name for name in names if given[name])}"
    if not steps(options):
        return f"--only: no step begins with {' or '.join(options.only)}, of those whose folders are given"
    return None


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--minutes", type=float, default=9.0)
    made.add_argument("--only", nargs="+", help="steps whose names begin so")
    made.add_argument("--epochs", type=int, default=24, help="of recovery, of the networks that are cut at once")
    folder = lambda text: Path(text).resolve()  # noqa: E731 - the steps run in the root
    made.add_argument("--out", type=folder, default=HERE / "results" / "gpu")
    for name in (name for names in FOLDERS for name in names):
        made.add_argument(f"--{name}", type=folder)
    return made


def main() -> None:
    """Run one slice."""
    options = parser().parse_args()
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        sys.exit(f"{sys.executable} lacks {', '.join(missing)}: install them, or name a folder that has them in PYTHONPATH")
    if find_spec("torch_pruning") is None:
        print("torch-pruning is not there: the rows are made without its peers")
    if wrong := problem(options):
        parser().error(wrong)
    import torch

    if not torch.cuda.is_available():
        sys.exit("no CUDA device: this is for machines with one")
    options.out.mkdir(parents=True, exist_ok=True)
    ledger = options.out / "gpu.json"
    known = json.loads(ledger.read_text()) if ledger.is_file() else {}
    end = time.monotonic() + 60 * options.minutes
    for step in in_turn(steps(options), known):
        left = end - time.monotonic()
        if left < step.least:
            break
        started = time.monotonic()
        print(f"== {step.name} ({left:.0f} s left)", flush=True)
        rc = run(step, left - 10)
        known[step.name] = {"rc": rc, "seconds": time.monotonic() - started, "device": torch.cuda.get_device_name()}
        ledger.write_text(json.dumps(known, indent=1) + "\n")
        bring_along(options.out)
    names = [step.name for step in steps(options)]
    print(f"left: {', '.join(name for name in names if known.get(name, {}).get('rc') != 0) or 'nothing'}")


if __name__ == "__main__":
    main()
