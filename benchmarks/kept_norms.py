"""A network that a cut has hardly changed, trained on with the statistics of batches, and with its own.

    python benchmarks/kept_norms.py --cifar FOLDER --resnet FOLDER [--net resnet20] [--factor 1.1 1.3 2] [--images 10000]
                                    [--cache FILE]

The public ResNet-20 (or ResNet-56), cut at once and reconstructed (as benchmarks/reconstruction.py does), then one epoch of
--images training images by SGD, distilled, with crops and flips (the loop of benchmarks/recovery.py): batch normalisation
computes with the statistics of each batch, as torch trains, or keeps its running ones. Each with the best of the learning rates
0.001, 0.003 and 0.01 on the half of the test images that chooses, told on the other half. Beside it: the losses of a batch of
128 before the training in both ways, and what `norms: auto` would decide by them. One seed. What is known is not made again;
results go to benchmarks/results/kept_norms.json and kept_norms.md.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path
from typing import Any

import torch
from controls import change
from mnist import HERE, machine, read, write
from models import cifar10
from reconstruction import ours, sized, told
from recovery import DISTILLED, SEED, TEMPERATURE, Split, Way, accuracy, dense, images, moved, recover, wrong
from torch import Tensor, nn
from torch.nn import functional as F

from svdcompress.train import norms
from svdcompress.train._norms import MORE, TIMES

RESULTS = HERE / "results" / "kept_norms.json"
RATES, BATCH = (0.001, 0.003, 0.01), 128


@torch.no_grad()
def loss(model: nn.Module, teacher: nn.Module, train: Split, own: bool) -> float:
    """Of a batch, as in training; all but normalisation as in eval(). own: with the statistics of the batch."""
    model = copy.deepcopy(model).eval()
    for module in norms(model):
        module.train(own)
    x = moved(images(train[0][:BATCH]), torch.Generator().manual_seed(SEED))
    output, answer = model(x), (teacher.eval()(x) / TEMPERATURE).softmax(1)
    # As the package has it, a divergence: 0 where the student answers as the teacher does.
    soft = F.kl_div((output / TEMPERATURE).log_softmax(1), answer, reduction="batchmean") * TEMPERATURE**2
    return float((1 - DISTILLED) * F.cross_entropy(output, train[1][:BATCH]) + DISTILLED * soft)


def trained(
    small: nn.Module, teacher: nn.Module, data: tuple[Split, Split, Split], keeps_norms: bool
) -> tuple[dict[str, Any], Tensor]:
    """With the rate that is best on the images that choose; and which of the others are wrong."""
    rates, nets = {}, {}
    for rate in RATES:
        nets[rate] = copy.deepcopy(small)
        recover(nets[rate], teacher, data[0], Way(True, rate, 5e-4, True), 1, keeps_norms=keeps_norms)
        rates[rate] = 100 - 100 * float(wrong(nets[rate], data[1]).double().mean())
    best = max(rates, key=rates.__getitem__)
    missed = wrong(nets[best], data[2])
    return accuracy(missed) | {"lr": best, "chosen": {str(rate): at for rate, at in rates.items()}}, missed


def table(results: dict[str, Any]) -> str:
    """Markdown: a row for each cut."""
    lines = ["# Whose statistics batch normalisation computes with, in training after a cut", ""]
    lines += [
        "Written by `benchmarks/kept_norms.py`, which says how. Accuracy in % of the 5,000 test images that chose nothing,"
    ]
    lines += ["with its 95% interval and the learning rate that was chosen; kept, less of batches: in points, paired.", ""]
    heads = ["network", "fewer MACs", "loss, running", "loss, of a batch", "auto", "as cut", "1 epoch, of batches"]
    lines += [f"| {' | '.join([*heads, '1 epoch, kept', 'kept, less of batches'])} |", "|" + "---|" * 9]
    for one in results.values():
        (running, own), (at, low, high) = one["losses"], one["less"]
        cells = [one["net"], f"{one['factor']:g}x", f"{running:.3g}", f"{own:.3g}", one["auto"]]
        cells += [told(one[name]) for name in ("cut", "batch", "keep")]
        lines.append(f"| {' | '.join([*cells, f'{at:+.2f} [{low:+.2f}, {high:+.2f}]'])} |")
    lines.append("")
    made = {(one["machine"]["cpu"], one["torch"], one["images"]) for one in results.values()}
    for cpu, version, count in sorted(made):
        lines.append(f"1 epoch of {count:,} images; {cpu}, one thread, torch {version}, seed {SEED}.")
    return "\n".join(lines) + "\n"


def main() -> None:
    """The cuts that are not known, one by one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cifar", type=Path, required=True)
    parser.add_argument("--resnet", type=Path, required=True)
    parser.add_argument("--net", choices=["resnet20", "resnet56"], default="resnet20")
    parser.add_argument("--factor", type=float, nargs="+", default=[1.1, 1.3, 2.0])
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--cache", help="file that keeps the decoded images (.npz)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    train, chosen, reported = cifar10.data(str(options.cifar), options.images, options.cache)
    order = torch.randperm(len(train[1]), generator=torch.Generator().manual_seed(SEED))  # they lie class by class
    train = train[0][order], train[1][order]
    teacher = dense(options.resnet, options.net)
    torch.manual_seed(SEED)
    cut = ours(teacher, train[0], True)
    for factor in options.factor:
        results, title = read(RESULTS), f"{options.net} {factor:g}x {options.images}"
        if title in results:
            continue
        small, _ = cut(factor)
        found: dict[str, Any] = {"net": options.net, "factor": factor, "images": options.images, "machine": machine()}
        found |= {"torch": torch.__version__, **sized(small, images(train[0][:1])), "cut": accuracy(wrong(small, reported))}
        running, own = found["losses"] = [loss(small, teacher, train, own) for own in (False, True)]
        found["auto"] = "keep" if own > TIMES * running and own - running > MORE else "batch"
        missed = {}
        for name in ("batch", "keep"):
            found[name], missed[name] = trained(small, teacher, (train, chosen, reported), name == "keep")
        found["less"] = change(missed["keep"], missed["batch"])  # errors more with batches: accuracy less
        results[title] = found
        write(RESULTS, results)
        RESULTS.with_suffix(".md").write_text(table(results), encoding="utf-8")
        print(table(results).splitlines()[-3], flush=True)


if __name__ == "__main__":
    main()
