"""Training of a network that was cut at once and reconstructed, with and without the dense network's layers as targets.

    python benchmarks/layerwise.py --cifar FOLDER --resnet FOLDER [--net resnet20] [--factor 4 2] [--images 10000]
                                   [--epochs 1 3] [--layers 10 30 100] [--cache FILE]

The public ResNet-20 (or ResNet-56) is cut as in benchmarks/reconstruction.py, then trained for --epochs epochs of --images
training images by SGD at 0.02, distilled, with crops and flips (the loop of benchmarks/recovery.py): without layers, and with
each of the weights --layers for `recover.distill.layers`, which fall as (1 - t)^2. Each weight is judged by its accuracy on
the half of the test images used for choices; the best is reported on the other half, with the network trained without layers
and the paired difference with its 95% interval. One seed. Stored results are not computed again; results go to
benchmarks/results/layerwise.json and layerwise.md, one network at a time.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from controls import change
from mnist import HERE, machine, read, write
from reconstruction import ours, sized, told, trained
from recovery import SEED, accuracy, dense, images, mixed, options_of, wrong

RESULTS = HERE / "results" / "layerwise.json"
RATE = 0.02


def table(results: dict[str, Any]) -> str:
    """Markdown: a row for each cut and length of training."""
    lines = ["# Layers of the dense network as targets after a cut", ""]
    lines += ["Written by `benchmarks/layerwise.py`, which says how. Accuracy in % of the 5,000 test images that chose"]
    lines += ["nothing, with its 95% interval; by weight: of those that chose the weight. Ahead: in points, paired.", ""]
    heads = ["network", "fewer MACs", "epochs", "as cut", "without", "with, best weight", "ahead", "by weight (0: without)"]
    lines += [f"| {' | '.join([*heads, 'seconds without, with'])} |", "|" + "---|" * 9]
    for one in sorted(results.values(), key=lambda one: (one["net"], one["factor"], one["epochs"])):
        at, low, high = one["ahead"]
        chosen = ", ".join(f"{weight}: {value:.2f}" for weight, value in one["chosen"].items())
        with_layers = f"{told(one['with'])}, {one['weight']:g}"
        cells = [one["net"], f"{one['factor']:g}x", f"{one['epochs']} of {one['images']:,}", told(one["cut"])]
        cells += [told(one["without"]), with_layers, f"{at:+.2f} [{low:+.2f}, {high:+.2f}]", chosen]
        lines.append(f"| {' | '.join([*cells, '{:.0f}, {:.0f}'.format(*one['seconds'])])} |")
    lines.append("")
    made = {(one["machine"]["cpu"], one["torch"]) for one in results.values()}
    lines += [f"{cpu}, one thread, beside other work, torch {version}, seed {SEED}." for cpu, version in sorted(made)]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure the cuts without stored results, one by one."""
    parser = options_of(__doc__, 10_000)
    parser.add_argument("--net", choices=["resnet20", "resnet56"], default="resnet20")
    parser.add_argument("--factor", type=float, nargs="+", default=[4.0, 2.0])
    parser.add_argument("--epochs", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--layers", type=float, nargs="+", default=[10.0, 30.0, 100.0])
    options = parser.parse_args()
    torch.set_num_threads(1)
    train, chosen, reported = mixed(options)
    teacher = dense(options.resnet, options.net)
    setting = {"images": options.images, "machine": machine(), "torch": torch.__version__, "weights": options.layers}
    torch.manual_seed(SEED)
    cut = ours(teacher, train[0], True)
    for factor in options.factor:
        small = None
        for epochs in options.epochs:
            results, title = read(RESULTS), f"{options.net} {factor:g}x {epochs}"
            found: dict[str, Any] = {"net": options.net, "factor": factor, "epochs": epochs, **setting}
            if found.items() <= results.get(title, {}).items():  # otherwise stored with other images or machine
                continue
            small = cut(factor)[0] if small is None else small
            found |= {**sized(small, images(train[0][:1])), "cut": accuracy(wrong(small, reported)), "chosen": {}}
            made = {}
            for weight in (0.0, *options.layers):
                begun = time.monotonic()
                one, missed = trained(small, teacher, (train, chosen, reported), epochs, among=(RATE,), layers=weight)
                found["chosen"][f"{weight:g}"] = one.pop("chosen")[str(RATE)]
                made[weight] = one, missed, time.monotonic() - begun
            best = max(options.layers, key=lambda weight: found["chosen"][f"{weight:g}"])
            found |= {"weight": best, "without": made[0.0][0], "with": made[best][0]}
            found["ahead"] = change(made[best][1], made[0.0][1])  # errors added without layers: the accuracy gained with them
            found["seconds"] = [made[0.0][2], made[best][2]]
            results[title] = found
            write(RESULTS, results)
            RESULTS.with_suffix(".md").write_text(table(results), encoding="utf-8")
            print(title, found["chosen"], found["ahead"], flush=True)


if __name__ == "__main__":
    main()
