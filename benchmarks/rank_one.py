"""The cost of a training step of a wide Linear network with each posterior, relative to a dense step.

    python benchmarks/rank_one.py [--rounds 15]

Two layers of 2048 x 2048 and a head, on one thread, in turns in each round as in speed.py: forward, backward with the KL, and
fused Adam; and the same without the KL. Results go to benchmarks/results/rank_one.json and rank_one.md.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
from collections.abc import Callable
from typing import Any

import torch
from speed import RESULTS, Row, keep_freed_memory, machine, mlp, step, timed
from torch import nn

import svdcompress as svdc

ROW = Row(lambda: mlp(2048, 2048, 2048, 10), (128, 2048), 0.0)
POSTERIORS: dict[str, dict[str, Any]] = {
    "a variance for each weight": {},
    "the same, in float32": {"variance_dtype": "float32"},
    "rank one": {"posterior": "rank-one"},
}


def runs(dense: nn.Module) -> dict[str, Callable[[], None]]:
    """A training step of each contestant."""
    x, y = torch.randn(ROW.shape), torch.randint(10, (ROW.shape[0],))
    found = {"dense": step((dense, None), x, y, ROW, False)}
    for name, settings in POSTERIORS.items():
        model = svdc.convert(copy.deepcopy(dense), **settings)
        found[name] = step((model, lambda model=model: svdc.kl_divergence(model)), x, y, ROW, False)
        model = svdc.convert(copy.deepcopy(dense), **settings)
        found[f"{name}, without the KL"] = step((model, None), x, y, ROW, False)
    return found


def numbers(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def measure(rounds: int) -> list[dict[str, Any]]:
    """Median times, and median ratios to the dense step of the same round."""
    torch.manual_seed(0)
    dense = ROW.make()
    sizes = {name: numbers(svdc.convert(copy.deepcopy(dense), **own)) / numbers(dense) for name, own in POSTERIORS.items()}
    contestants = runs(dense)
    for run in contestants.values():
        run()
        run()
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(rounds):
        order = list(contestants)
        for name in order[number % len(order) :] + order[: number % len(order)]:
            times[name].append(timed(contestants[name], "cpu")[0])
    return [
        {
            "work": name,
            "ms": statistics.median(own) * 1e3,
            "ratio": statistics.median(one / base for one, base in zip(own, times["dense"], strict=True)),
            "numbers": sizes.get(name, None if name != "dense" else 1.0),
        }
        for name, own in times.items()
    ]


def table(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    where = results["machine"]
    lines = [
        "# A training step of a wide Linear network, by posterior",
        "",
        f"2048-2048-2048-10, batch {ROW.shape[0]}; medians of {results['rounds']} rounds, of the thread's CPU time, and of the "
        f"ratios to the dense step of the same round. One thread of {where['cpu']}, "
        f"{'with' if where['fast_bfloat16'] else 'without'} bfloat16 instructions, torch {where['versions']['torch']}, seed 0.",
        "",
        "| step | ms | over dense | parameters over dense |",
        "|---|---|---|---|",
    ]
    for row in results["rows"]:
        size = "" if row["numbers"] is None else f"{row['numbers']:.3f}"
        lines.append(f"| {row['work']} | {row['ms']:.1f} | {row['ratio']:.2f} | {size} |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    keep_freed_memory()
    results = {"machine": machine(), "rounds": rounds, "rows": measure(rounds)}
    (RESULTS / "rank_one.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (RESULTS / "rank_one.md").write_text(table(results), encoding="utf-8")
    print(table(results))


if __name__ == "__main__":
    main()
