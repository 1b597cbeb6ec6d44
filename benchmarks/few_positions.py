"""A step of a 3 x 3 convolution in bfloat16 on few positions: as torch computes it, and with images laid side by side.

    python benchmarks/few_positions.py

Forward and backward pass over 128 images, with as many output channels as input channels, on one thread; medians of nine
rounds in which the ways take turns, with the smallest and the largest ratio of a round. `arranged_convolutions` of
svdcompress/layers lays images side by side only for the shapes listed as taken, and only on CPUs with AMX. Results go to
benchmarks/results/few_positions.json and few_positions.md.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from mnist import HERE, machine, write
from torch.nn import functional as F

from svdcompress.layers._side_by_side import AMX, laid, side_by_side

CASES = [(channels, edge) for channels in (64, 128, 256, 512) for edge in (2, 4, 8)]
IMAGES, ROUNDS, SEED = 128, 9, 0


def measured(channels: int, edge: int) -> dict[str, Any]:
    """Seconds of each way, by round, and whether the package lays images side by side for this shape."""
    generator = torch.Generator().manual_seed(SEED)
    x = torch.randn(IMAGES, channels, edge, edge, generator=generator)
    weight = torch.randn(channels, channels, 3, 3, generator=generator) / (9 * channels) ** 0.5
    half = [tensor.bfloat16().requires_grad_() for tensor in (x, weight)]
    full = [tensor.requires_grad_() for tensor in (x, weight)]
    ways = {
        "float32": lambda: F.conv2d(*full, padding=1),
        "bfloat16": lambda: F.conv2d(*half, padding=1),
        "side by side": lambda: side_by_side(lambda x, w, b: F.conv2d(x, w, b, padding=1), *half, None, 1, 2),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS + 1):
        for name, way in ways.items():
            begun = time.perf_counter()
            way().sum().backward()
            times[name].append(time.perf_counter() - begun)
    taken = laid(*half, 1, 1, 1, 1) is not None
    return {"channels": channels, "edge": edge, "taken": taken, "seconds": {name: found[1:] for name, found in times.items()}}


def table(made: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """The results as Markdown."""
    lines = [
        "# Convolutions over few positions in bfloat16 on a CPU",
        "",
        "Written by `benchmarks/few_positions.py`, which says how.",
        "",
    ]
    lines += [
        f"{made['machine']['cpu']} ({'with' if made['amx'] else 'without'} AMX), one thread, torch "
        f"{made['torch']}, seed {SEED}. Times as multiples of float32's; ratio: torch's over side by side, per round.",
        "",
        "| channels | positions | float32, ms | torch | side by side | ratio | taken |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        each = row["seconds"]
        middle = {name: statistics.median(found) for name, found in each.items()}
        ratios = sorted(one / other for one, other in zip(each["bfloat16"], each["side by side"], strict=True))
        cells = [f"{row['channels']}", f"{row['edge']} x {row['edge']}", f"{1000 * middle['float32']:.1f}"]
        cells += [f"{middle[name] / middle['float32']:.2f}" for name in ("bfloat16", "side by side")]
        cells += [f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})", "yes" if row["taken"] else "no"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure all shapes."""
    torch.set_num_threads(1)
    made = {"machine": machine(), "torch": torch.__version__, "amx": AMX}
    rows = []
    for channels, edge in CASES:
        rows.append(measured(channels, edge))
        write(HERE / "results" / "few_positions.json", made | {"rows": rows})
        (HERE / "results" / "few_positions.md").write_text(table(made, rows), encoding="utf-8")


if __name__ == "__main__":
    main()
