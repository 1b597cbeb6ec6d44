"""The cost of a training step with each posterior, relative to a dense step, for the networks of real.py and real_nets.py.

    python benchmarks/rank_one_nets.py [--rounds 5] [--only bert ...]

With the shapes and batches of their recipes, random weights and inputs, on one thread, in float32 and under bfloat16
autocast, in turns in each round: forward, backward with the KL, and fused Adam. BERT needs transformers. Results go to
benchmarks/results/rank_one_nets.json and rank_one_nets.md, one network at a time.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from mnist import read, write
from models import crepe, denoise, reactions, resnet_cifar, vgg
from speed import EXAMPLES, RESULTS, keep_freed_memory, machine, timed
from torch import Tensor, nn

import svdcompress as svdc
from svdcompress.batch import call, main_output

PRECISIONS = {"float32": False, "bfloat16 autocast": True}
WEIGHT, RANK_ONE = "a variance for each weight", "rank one"


@dataclass(frozen=True)
class Net:
    """A network to train: its title, a function that makes it, and one that makes a batch of inputs."""

    title: str
    make: Callable[[], nn.Module]
    inputs: Callable[[], Any]


def tokens(batch: int) -> dict[str, Tensor]:
    """A batch of random tokens as long as Suzuki reactions."""
    return {
        "input_ids": torch.randint(12, 500, (batch, reactions.SUZUKI_LENGTH)),
        "attention_mask": torch.ones(batch, reactions.SUZUKI_LENGTH, dtype=torch.int64),
    }


NETS = {
    "resnet20": Net("ResNet-20, batch 128", resnet_cifar.resnet20, lambda: torch.randn(128, 3, 32, 32)),
    "resnet56": Net("ResNet-56, batch 128", resnet_cifar.resnet56, lambda: torch.randn(128, 3, 32, 32)),
    "bert": Net("BERT of reactions, batch 16", reactions.bert, lambda: tokens(16)),
    "dncnn": Net("DnCNN, batch 32", denoise.dncnn, lambda: torch.randn(32, 1, 40, 40)),
    "vgg16": Net("VGG-16-BN, batch 128", vgg.vgg16, lambda: torch.randn(128, 3, 32, 32)),
    "crepe": Net("CREPE full, batch 32", crepe.full, lambda: torch.randn(32, crepe.FRAME)),
}


def step(model: nn.Module, x: Any, kl: bool, fast: bool) -> Callable[[], None]:
    """A training step."""
    model.train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)

    def run() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=fast):
            loss = main_output(call(model, x)).float().square().mean()
        (loss + svdc.kl_divergence(model) / EXAMPLES if kl else loss).backward()
        optimizer.step()

    return run


def measure(net: Net, rounds: int, fast: bool) -> dict[str, Any]:
    """Median times, ratios to the dense step of the same round, and how many times more numbers are trained."""
    torch.manual_seed(0)
    dense, x = net.make(), net.inputs()
    models = {
        "dense": dense,
        WEIGHT: svdc.convert(copy.deepcopy(dense)),
        RANK_ONE: svdc.convert(copy.deepcopy(dense), posterior="rank-one"),
    }
    sizes = {name: sum(parameter.numel() for parameter in model.parameters()) for name, model in models.items()}
    runs = {name: step(model, x, name != "dense", fast) for name, model in models.items()}
    for run in runs.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds):
        order = [*runs]
        for name in order[number % len(order) :] + order[: number % len(order)]:
            times[name].append(timed(runs[name], "cpu")[0])
    return {
        name: {
            "ms": 1e3 * statistics.median(own),
            "ratio": statistics.median(one / base for one, base in zip(own, times["dense"], strict=True)),
            "ratios": [one / base for one, base in zip(own, times["dense"], strict=True)],
            "numbers": sizes[name] / sizes["dense"],
        }
        for name, own in times.items()
    }


def table(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    lines = [
        "# A training step of the real networks, by posterior",
        "",
        "Written by `benchmarks/rank_one_nets.py`, which says how. Median ratios to the dense step of the same round, of the",
        "thread's CPU time, with the least and the greatest.",
        "",
        "| network | precision | dense, ms | a variance for each weight | rank one | parameters over dense |",
        "|---|---|---|---|---|---|",
    ]
    for name, one in results["nets"].items():
        for precision, found in one.items():
            cells = [NETS[name].title, precision, f"{found['dense']['ms']:.0f}"]
            for kind in (WEIGHT, RANK_ONE):
                ratios = found[kind]["ratios"]
                cells.append(f"{found[kind]['ratio']:.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
            cells.append(" / ".join(f"{found[kind]['numbers']:.3f}" for kind in (WEIGHT, RANK_ONE)))
            lines.append(f"| {' | '.join(cells)} |")
    where = results["machine"]
    bfloat16 = f"{'with' if where['fast_bfloat16'] else 'without'} bfloat16 instructions"
    made = f"{results['rounds']} rounds; one thread of {where['cpu']}, {bfloat16}, beside other work; torch"
    return "\n".join([*lines, "", f"{made} {where['versions']['torch']}, seed 0.", ""])


def main() -> None:
    """Measure the networks in order; stored results are replaced."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=[*NETS], default=[*NETS])
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    path = RESULTS / "rank_one_nets.json"
    for name in options.only:
        found = {
            title: measure(NETS[name], options.rounds, fast)
            for title, fast in (("float32", False), ("bfloat16 autocast", True))
        }
        results = read(path)
        nets = {**results.get("nets", {}), name: found}
        results = {"machine": machine(), "rounds": options.rounds, "nets": {key: nets[key] for key in NETS if key in nets}}
        write(path, results)
        path.with_suffix(".md").write_text(table(results), encoding="utf-8")
        print(
            name, {key: {kind: round(one["ratio"], 2) for kind, one in each.items()} for key, each in found.items()}, flush=True
        )


if __name__ == "__main__":
    main()
