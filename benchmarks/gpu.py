"""Everything that waits for a GPU, most valuable first, in slices of under ten minutes that go on where the last one ended.

    python benchmarks/gpu.py [--minutes 9] [--out FOLDER] [--cifar FOLDER] [--resnet FOLDER]     (or: make gpu)

Each step writes its result as it ends, below --out (benchmarks/results otherwise): the tests marked `cuda`, the rows of
benchmarks/speed.py that need a GPU, then the long rows: the public ResNets on CIFAR-10 by `svdc sparsify --goal`, resumed in
each slice. A step that was done is not repeated; one that fails is told with its last lines, and the next one begins.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from real import CASES

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent


SPEED = [part for name in (
    "ResNet-50, batch 128, bfloat16 AMP, compiled",
    "VGG-16, batch 128, bfloat16 AMP, compiled",
    "linear 4096, batch 4096, TF32",
) for part in ("--only", name)]  # fmt: skip
"""The rows of the speed benchmark that need a GPU."""


@dataclass(frozen=True)
class Step:
    """name; the command, told what is left where it has "{minutes}"; seconds that it should have at least."""

    name: str
    command: list[str]
    least: float = 30.0


def steps(out: Path, cifar: Path | None, resnet: Path | None) -> list[Step]:
    """All of them, in order."""
    python = [sys.executable]
    found = [
        Step("tests", [*python, "-m", "pytest", "-q", "-m", "cuda", "tests/cuda", "-p", "no:cacheprovider"], 60),
        Step("speed", [*python, "benchmarks/speed.py", "--again", *SPEED], 120),
    ]
    if cifar is None or resnet is None:
        return found
    for name in CASES:
        command = [*python, "benchmarks/real.py", "--cifar", str(cifar), "--resnet", str(resnet), "--runs", str(out)]
        command += [
            "--only",
            name,
            "--set",
            "train.precision=bf16",
            "--set",
            "recover.precision=bf16",
            "--set",
            "train.batch_size=128",
        ]
        command += ["--set", "recover.batch_size=128", "--minutes", "{minutes}"]
        found.append(Step(name, command, 120))
    return found


def main() -> None:
    """One slice."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "gpu")
    parser.add_argument("--cifar", type=Path, default=None)
    parser.add_argument("--resnet", type=Path, default=None)
    options = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        sys.exit("no CUDA device: this is for machines with one")
    options.out.mkdir(parents=True, exist_ok=True)
    ledger = options.out / "gpu.json"
    known = json.loads(ledger.read_text()) if ledger.is_file() else {}
    end = time.monotonic() + 60 * options.minutes
    for step in steps(options.out, options.cifar, options.resnet):
        if known.get(step.name, {}).get("rc") == 0:
            continue
        left = end - time.monotonic()
        if left < step.least:
            break
        started = time.monotonic()
        print(f"== {step.name} ({left:.0f} s left)", flush=True)
        command = [part.replace("{minutes}", f"{(left - 30) / 60:.2f}") for part in step.command]
        process = subprocess.Popen(command, cwd=ROOT)
        try:
            rc: int | None = process.wait(left - 10)
        except subprocess.TimeoutExpired:
            process.terminate()  # a run stops in good order, with its state
            process.wait()
            rc = None
        known[step.name] = {"rc": rc, "seconds": time.monotonic() - started, "device": torch.cuda.get_device_name()}
        ledger.write_text(json.dumps(known, indent=1) + "\n")
    names = [step.name for step in steps(options.out, options.cifar, options.resnet)]
    print(f"left: {', '.join(name for name in names if known.get(name, {}).get('rc') != 0) or 'nothing'}")


if __name__ == "__main__":
    main()
