"""Convolutions in bfloat16 on this CPU: as torch computes them, and in parts as the package does, compared with float64.

    python benchmarks/wide_kernels.py

Random inputs (8 examples, 128 output positions) and weights (128 outputs), one thread, the forward pass; medians of five
calls, in turns. factor: the least-squares multiple of the right result, which should be 1. Results go to
benchmarks/results/wide_kernels.json and wide_kernels.md.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from mnist import HERE, machine, write
from torch.nn import functional as F

from svdcompress.layers import in_parts
from svdcompress.layers._side_by_side import AMX

CASES = [(channels, kernel) for channels in (128, 512, 1024, 2048) for kernel in (3, 8, 16, 32, 64)]
BATCH, OUTPUTS, POSITIONS, CALLS, SEED = 8, 128, 128, 5, 0


def measured(channels: int, kernel: int) -> dict[str, Any]:
    """Seconds and factors for one shape."""
    generator = torch.Generator().manual_seed(SEED)
    x = torch.randn(BATCH, channels, POSITIONS + kernel - 1, generator=generator).bfloat16()
    weight = torch.randn(OUTPUTS, channels, kernel, generator=generator).bfloat16()
    wide, full = (x.float(), weight.float()), F.conv1d(x.double(), weight.double())
    ways = {
        "float32": lambda: F.conv1d(*wide),
        "bfloat16": lambda: F.conv1d(x, weight),
        "in parts": lambda: in_parts(F.conv1d, x, weight, None),
    }
    factors = {name: float((way().double() * full).sum() / full.square().sum()) for name, way in ways.items()}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(CALLS):
        for name, way in ways.items():
            begun = time.perf_counter()
            way()
            times[name].append(time.perf_counter() - begun)
    seconds = {name: statistics.median(found) for name, found in times.items()}
    return {"channels": channels, "kernel": kernel, "factors": factors, "seconds": seconds}


def table(made: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """The results as Markdown."""
    lines = ["# Convolutions in bfloat16 on a CPU", "", "Written by `benchmarks/wide_kernels.py`, which says how.", ""]
    amx = "with AMX" if made["amx"] else "without AMX"
    lines += [
        f"{made['machine']['cpu']} ({amx}), one thread, torch {made['torch']}, seed {SEED}. Times as multiples of float32's.",
        "",
    ]
    lines += ["| channels | kernel | torch: factor | time | in parts: factor | time |", "|---|---|---|---|---|---|"]
    for row in rows:
        cells = [f"{row['channels']:,}", f"{row['kernel']}"]
        for name in ("bfloat16", "in parts"):
            cells += [f"{row['factors'][name]:.3f}", f"{row['seconds'][name] / row['seconds']['float32']:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure all shapes."""
    torch.set_num_threads(1)
    made = {"machine": machine(), "torch": torch.__version__, "amx": AMX}
    rows = []
    for channels, kernel in CASES:
        rows.append(measured(channels, kernel))
        write(HERE / "results" / "wide_kernels.json", made | {"rows": rows})
        (HERE / "results" / "wide_kernels.md").write_text(table(made, rows), encoding="utf-8")


if __name__ == "__main__":
    main()
