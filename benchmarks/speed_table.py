"""The results of benchmarks/speed.py as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

EXPLANATION = (
    "Peers less than 1.3 times slower than ours, explained. cplxmodule and pytorch-ard draw each pre-activation, as we do: "
    "in float32 that is two products for everybody, and where products are all of the time (large batches, convolutions) "
    "nobody can be much below 2; the bfloat16 variance path is what goes below it, where the chip has the instructions. "
    "bayesian-torch is another estimator: one draw of the weights for a whole batch, so one product for our two. It is cheap "
    "where weights are few, as in convolutions, and dear where they are many. The price is in the gradient, whose noise all "
    "examples share: gradient_noise.md has it measured. pytorch-ard has the log-uniform prior, the rest ARD or a fixed normal "
    "one; its convolutions have no bias."
)


def markdown(results: dict[str, Any], goals: dict[str, float], peers: Sequence[str]) -> str:
    """The results as a table. goals: for each row, the wanted ratio to a dense step; peers: the other libraries."""
    columns = ["ours", "ours: the KL alone", "ours, masked", "dense, compiled", "ours, compiled"]
    columns += [name for peer in peers for name in (peer, f"{peer}, compiled")]
    lines = [
        "# A training step over a dense step",
        "",
        "One thread. Median ratios to the dense step in the same rounds, of the thread's CPU time (CUDA: of events). The "
        "variance path is in bfloat16 where that is fast, else in float32: then 2.0 is the floor of matrix products. Rows of "
        "different machines are not to be compared. Compiled peers have the same parts compiled as ours.",
        "",
        "| work | goal | dense, ms | " + " | ".join(columns) + " | on |",
        "|---" * (len(columns) + 4) + "|",
    ]
    notes = []
    for name, goal in goals.items():
        found = results["rows"].get(name)
        if found is None:
            lines.append(f"| {name} | {goal} |" + " |" * (len(columns) + 2))
            continue
        cells = [found["contestants"].get(column) for column in columns]
        values = [f"{cell['ratio']:.2f}" if cell else "" for cell in cells]
        lines.append(
            f"| {name} | {goal} | {found['contestants']['dense']['ms']:.1f} | " + " | ".join([*values, _on(found)]) + " |"
        )
        notes += [f"- {name}, {peer}: {reason}" for peer, reason in found["absent"].items()]
    lines += ["", EXPLANATION]
    return "\n".join([*lines, "", *(["Not measured:", ""] if notes else []), *notes]).rstrip() + "\n"


def _on(found: dict[str, Any]) -> str:
    where = found["machine"]
    bfloat16 = f"{'with' if where['fast_bfloat16'] else 'without'} bfloat16 instructions"
    chip = where["gpu"] if found.get("device") == "cuda" else f"{where['cpu']}, {bfloat16}"
    return f"{chip}, torch {where['versions']['torch']}"
