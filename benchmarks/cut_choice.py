"""What predicts, before any training, which of several cuts of a network with batch normalization will recover best.

    python benchmarks/cut_choice.py --cifar FOLDER --resnet FOLDER [--factor 4] [--images 10000] [--epochs 1] [--cache FILE]

The public ResNet-20 is cut at once to a quarter of its multiply-accumulates (or by another --factor), in each of the eight
ways that a search of `svdc sparsify` knows: units ranked by information (of converted, untrained weights: magnitude) or by
outputs, and removed more or less evenly over the layers. Reported for each small network are the NLL on 2,000 training images
right after the cut; the same with normalization statistics recomputed on 1,000 training images; and the accuracy after
further training by SGD at 0.05, distilled, with crops and flips (the loop of benchmarks/recovery.py), on the half of the test
images that is used for choices. Statistics and NLLs are computed here, without the package's code. One seed. Stored results
are not computed again; results go to benchmarks/results/cut_choice.json and cut_choice.md, one way at a time.
"""

from __future__ import annotations

import copy
import time
from typing import Any

import torch
from mnist import HERE, machine, read, write
from real_nets_figures import spearman
from recovery import SEED, WAYS, dense, images, judged, mixed, options_of, recover
from torch import Tensor, nn
from torch.nn import functional as F

import svdcompress as svdc
from svdcompress.pipeline._unit_ways import BY_OUTPUTS, EVENNESS
from svdcompress.pipeline._way import PROJECTIONS
from svdcompress.selection import Ranking, whole_units

RESULTS = HERE / "results" / "cut_choice.json"
JUDGED, FRESH, BATCH = 2000, 1000, 250
EACH = 4


@torch.no_grad()
def nll(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """The mean NLL, in nats."""
    model.eval()
    parts = (F.cross_entropy(model(images(a)), b, reduction="sum") for a, b in zip(x.split(BATCH), y.split(BATCH), strict=True))
    return float(sum(parts)) / len(y)


@torch.no_grad()
def renewed(model: nn.Module, x: Tensor) -> nn.Module:
    """A copy whose normalization statistics are those of these images."""
    model = copy.deepcopy(model)
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.reset_running_stats()
            layer.momentum = None
    model.train()
    for part in x.split(BATCH):
        model(images(part))
    return model


def cuts(model: nn.Module, x: Tensor, factor: float) -> dict[str, nn.Module]:
    """Small dense networks by the name of the way in which they were cut."""
    example = images(x[:2])
    converted = svdc.convert(copy.deepcopy(model)).eval()
    batches = [images(part) for part in x[: PROJECTIONS * EACH].split(EACH)]
    found = {}
    for end, ranking in (("", Ranking(converted, example)), (BY_OUTPUTS, Ranking(converted, example, examples=batches))):
        for name, evenness in EVENNESS.items():
            masks = ranking.at({"macs": ranking.total["macs"] / factor}, evenness=evenness).masks
            small = svdc.prune(converted, example, masks=whole_units(converted, masks), verify=False)
            found[name + end] = svdc.to_dense(small)
    return found


def table(results: dict[str, Any]) -> str:
    """Markdown: a section for each factor."""
    lines = [
        "# Which cut will recover best, seen before any training",
        "",
        "Written by `benchmarks/cut_choice.py`, which says how. Accuracy is that on the half of the test images that chooses,",
        "with Wilson's 95% interval.",
        "",
    ]
    for title, one in results.items():
        made, ways = one["setting"], one["ways"]
        lines += [
            f"## {title}",
            "",
            f"{made['epochs']} epoch(s) of {made['images']:,} images, distilled. {made['machine']['cpu']}, one thread, torch "
            f"{made['torch']}, seed {SEED}.",
            "",
            "| way | parameters | NLL as cut | NLL, statistics taken anew | accuracy after training on, % |",
            "|---|---|---|---|---|",
        ]
        for name, found in sorted(ways.items(), key=lambda each: each[1]["accuracy"]):
            low, high = found["interval"]
            lines.append(
                f"| {name} | {found['parameters']:,} | {found['cut']:.2f} | {found['renewed']:.2f} | "
                f"{found['accuracy']:.2f} ({low:.2f} to {high:.2f}) |"
            )
        if len(ways) > 2:
            each = {key: torch.tensor([found[key] for found in ways.values()]) for key in ("cut", "renewed", "accuracy")}
            told = {key: spearman(-each[key], each["accuracy"]) for key in ("cut", "renewed")}
            lines += [
                "",
                f"Rank correlation of a low NLL and a high accuracy over {len(ways)} ways: {told['cut']:.2f} as cut, "
                f"{told['renewed']:.2f} with statistics taken anew.",
            ]
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    """Measure the ways without stored results, one by one."""
    parser = options_of(__doc__, 10_000)
    parser.add_argument("--factor", type=float, default=4.0)
    parser.add_argument("--epochs", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    train, chosen, _ = mixed(options)
    teacher = dense(options.resnet, "resnet20")
    title = f"ResNet-20, multiply-accumulates cut to {options.factor:g}x fewer at once"
    setting = {"images": options.images, "epochs": options.epochs, "machine": machine(), "torch": torch.__version__}
    torch.manual_seed(SEED)
    for name, small in cuts(teacher, train[0], options.factor).items():
        results = read(RESULTS)
        if results.get(title, {}).get("setting") != setting:  # stored with other images, epochs or machine
            results[title] = {"setting": setting, "ways": {}}
        if name in results[title]["ways"]:
            continue
        begun, few = time.monotonic(), (train[0][:JUDGED], train[1][:JUDGED])
        found: dict[str, Any] = {
            "parameters": sum(p.numel() for p in small.parameters()),
            "cut": nll(small, *few),
            "renewed": nll(renewed(small, train[0][:FRESH]), *few),
        }
        recover(small, teacher, train, WAYS["sgd-0.05-distilled"], options.epochs)
        found |= judged(small, chosen) | {"seconds": time.monotonic() - begun}
        results[title]["ways"][name] = found
        write(RESULTS, results)
        RESULTS.with_suffix(".md").write_text(table(results), encoding="utf-8")
        print(f"{name}: {found['cut']:.2f}, {found['renewed']:.2f}, {found['accuracy']:.2f}%", flush=True)


if __name__ == "__main__":
    main()
