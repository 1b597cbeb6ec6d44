"""Everything that waits for a GPU, most valuable first, in slices of under ten minutes that go on where the last one ended.

    python benchmarks/gpu.py [--minutes 9] [--out FOLDER] [--cifar FOLDER --resnet FOLDER] [--rxnfp FOLDER --yields FOLDER]
                             [--crepe FOLDER --speech FILE] [--dncnn FOLDER]     (or: make gpu)

Each step writes its result as it ends, below --out (benchmarks/results otherwise): the tests marked `cuda`, the rows of
benchmarks/speed.py that need a GPU, then the long rows of benchmarks/real.py and real_nets.py (the folders are their options),
resumed in each slice. A step that was done is not repeated; one that fails is told with its last lines, the next begins, and
another slice tries it after all others. The machine's own Python needs what is in NEEDED, and torch-pruning for its peers.
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

SPEED = (
    "ResNet-50, batch 128, bfloat16 AMP, compiled",
    "VGG-16, batch 128, bfloat16 AMP, compiled",
    "linear 4096, batch 4096, TF32",
)
"""The rows of the speed benchmark that need a GPU."""

CLOSING = 60.0
"""Seconds before the end of a slice at which a long row is to stop by itself: one of its stages hears that late."""


@dataclass(frozen=True)
class Step:
    """name; the command, told what is left where it has "{minutes}"; seconds that it should have at least."""

    name: str
    command: list[str]
    least: float = 30.0


def steps(options: argparse.Namespace) -> list[Step]:
    """All of them, in order; the long rows as far as their folders are named."""
    from real import CASES
    from real_nets import NAMES

    python, slot = sys.executable, ["--minutes", "{minutes}"]
    found = [
        Step("tests", [python, "-m", "pytest", "-q", "-m", "cuda", "tests/cuda", "-p", "no:cacheprovider"], 60),
        *(Step(f"speed: {name}", [python, "benchmarks/speed.py", "--again", "--only", name], 120) for name in SPEED),
    ]
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
    return found + [Step(name, [python, *command, "--runs", str(options.out), *slot], 120) for name, command in long]


def in_turn(all_steps: list[Step], known: dict[str, Any]) -> list[Step]:
    """Those that are not done: first those that were never tried or were stopped, in order, then those that failed."""
    left = [step for step in all_steps if known.get(step.name, {}).get("rc") != 0]
    return sorted(left, key=lambda step: known.get(step.name, {}).get("rc") is not None)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Ask all that a process has started to end, and wait for it: what goes on holds its run's lock."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        while True:
            process.poll()  # or it stays one of the group
            os.killpg(process.pid, 0)
            time.sleep(0.1)


def bring_along(out: Path) -> None:
    """Copy the results to a folder elsewhere, which may be all that comes back from the machine."""
    if HERE / "results" not in out.resolve().parents:
        for file in (HERE / "results").glob("*.*"):
            if file.stem in ("speed", "real", "real_nets"):
                shutil.copy2(file, out)


def main() -> None:
    """One slice."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "gpu")
    for name in ("cifar", "resnet", "rxnfp", "yields", "crepe", "speech", "dncnn"):
        parser.add_argument(f"--{name}", type=Path)
    options = parser.parse_args()
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        sys.exit(f"{sys.executable} lacks {', '.join(missing)}: install them, or name a folder that has them in PYTHONPATH")
    if find_spec("torch_pruning") is None:
        print("torch-pruning is not there: the rows are made without its peers")
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
        command = [part.replace("{minutes}", f"{(left - CLOSING) / 60:.2f}") for part in step.command]
        process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
        try:
            rc: int | None = process.wait(left - 10)
        except subprocess.TimeoutExpired:
            rc = None
        finally:  # a run stops in good order, with its state, after Ctrl-C too; so does what it started
            end_group(process)
        known[step.name] = {"rc": rc, "seconds": time.monotonic() - started, "device": torch.cuda.get_device_name()}
        ledger.write_text(json.dumps(known, indent=1) + "\n")
        bring_along(options.out)
    names = [step.name for step in steps(options)]
    print(f"left: {', '.join(name for name in names if known.get(name, {}).get('rc') != 0) or 'nothing'}")


if __name__ == "__main__":
    main()
