"""Training of a network that a cut has hardly changed, with the statistics of batches and with its own running ones.

    python benchmarks/kept_norms.py --cifar FOLDER --resnet FOLDER [--net resnet20] [--factor 1.1 1.3 2] [--images 10000]
                                    [--cache FILE]

The public ResNet-20 (or ResNet-56) is cut at once and reconstructed (as in benchmarks/reconstruction.py), then trained for
one epoch of --images training images by SGD, distilled, with crops and flips (the loop of benchmarks/recovery.py). Batch
normalization either uses the statistics of each batch, as torch trains, or keeps its running ones. Each is trained with the
learning rate among 0.001, 0.003 and 0.01 that is best on the half of the test images used for choices, and reported on the
other half. Also given are the losses of a batch of 128 before training in both ways, and what `norms: auto` would choose from
them. One seed. Stored results are not computed again; results go to benchmarks/results/kept_norms.json and kept_norms.md.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from controls import change
from mnist import HERE, machine, read, write
from reconstruction import ours, sized, told, trained
from recovery import DISTILLED, SEED, TEMPERATURE, Split, accuracy, dense, images, mixed, moved, options_of, wrong
from torch import nn
from torch.nn import functional as F

from svdcompress.train import norms
from svdcompress.train._norms import far

RESULTS = HERE / "results" / "kept_norms.json"
RATES, BATCH = (0.001, 0.003, 0.01), 128


@torch.no_grad()
def loss(model: nn.Module, teacher: nn.Module, train: Split, own: bool) -> float:
    """The training loss of a batch, all but normalization in eval(). own: normalize with the statistics of the batch."""
    model = copy.deepcopy(model).eval()
    for module in norms(model):
        module.train(own)
    x = moved(images(train[0][:BATCH]), torch.Generator().manual_seed(SEED))
    output, answer = model(x), (teacher.eval()(x) / TEMPERATURE).softmax(1)
    # A divergence, as in the package: 0 where the student answers as the teacher does.
    soft = F.kl_div((output / TEMPERATURE).log_softmax(1), answer, reduction="batchmean") * TEMPERATURE**2
    return float((1 - DISTILLED) * F.cross_entropy(output, train[1][:BATCH]) + DISTILLED * soft)


def table(results: dict[str, Any]) -> str:
    """Markdown: a row for each cut."""
    lines = ["# Whose statistics batch normalisation computes with, in training after a cut", ""]
    lines += ["Written by `benchmarks/kept_norms.py`, which says how. Accuracy in % of the 5,000 test images that chose"]
    lines += [
        "nothing, with its 95% interval and the learning rate that was chosen; kept, less of batches: in points, paired.",
        "",
    ]
    heads = ["network", "fewer MACs", "loss, running", "loss, of a batch", "auto", "as cut", "1 epoch, of batches"]
    lines += [f"| {' | '.join([*heads, '1 epoch, kept', 'kept, less of batches'])} |", "|" + "---|" * 9]
    for one in sorted(results.values(), key=lambda one: (one["net"], one["factor"])):
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
    """Measure the cuts without stored results, one by one."""
    parser = options_of(__doc__, 10_000)
    parser.add_argument("--net", choices=["resnet20", "resnet56"], default="resnet20")
    parser.add_argument("--factor", type=float, nargs="+", default=[1.1, 1.3, 2.0])
    options = parser.parse_args()
    torch.set_num_threads(1)
    train, chosen, reported = mixed(options)
    teacher = dense(options.resnet, options.net)
    setting = {"images": options.images, "machine": machine(), "torch": torch.__version__}
    torch.manual_seed(SEED)
    cut = ours(teacher, train[0], True)
    for factor in options.factor:
        results, title = read(RESULTS), f"{options.net} {factor:g}x"
        found: dict[str, Any] = {"net": options.net, "factor": factor, **setting}
        if found.items() <= results.get(title, {}).items():  # otherwise stored with other images or machine
            continue
        small, _ = cut(factor)
        found |= {**sized(small, images(train[0][:1])), "cut": accuracy(wrong(small, reported))}
        running, own = found["losses"] = [loss(small, teacher, train, own) for own in (False, True)]
        found["auto"] = "keep" if far(running, own) else "batch"
        missed = {}
        for name in ("batch", "keep"):
            how: dict[str, Any] = {"among": RATES, "keeps_norms": name == "keep"}
            found[name], missed[name] = trained(small, teacher, (train, chosen, reported), 1, **how)
        found["less"] = change(missed["keep"], missed["batch"])  # errors that batches add: the accuracy that `keep` gains
        results[title] = found
        write(RESULTS, results)
        RESULTS.with_suffix(".md").write_text(table(results), encoding="utf-8")
        print(table(results).splitlines()[-3], flush=True)


if __name__ == "__main__":
    main()
