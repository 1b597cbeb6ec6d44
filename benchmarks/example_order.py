"""A network cut at once and reconstructed on training images in random order, and on the same images sorted by class.

    python benchmarks/example_order.py --cifar FOLDER --resnet FOLDER [--net resnet20] [--factor 2 4]
                                       [--cache FILE] [--label NAME]

As a search does, units are ranked by 512 training images in batches of four, by the way "half-even" (for ResNet-56
"half-even-within-blocks"), and layers are reconstructed on 1,024, without any training. Accuracy is on the half of the test
images that chooses nothing. --label: a row of its own, for another version of the package on the path. Results go to
benchmarks/results/example_order.json and example_order.md.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from controls import change
from mnist import HERE, machine, read, write
from reconstruction import EVENNESS, FRESH, told
from recovery import SEED, accuracy, dense, images, mixed, options_of, wrong
from torch import Tensor, nn

import svdcompress as svdc
from svdcompress.pipeline._way import PROJECTIONS
from svdcompress.selection import Ranking, whole_units

RESULTS = HERE / "results" / "example_order.json"
EACH = 4
ORDERS = {"random order": (), "fitted by class": (FRESH,), "ranked and fitted by class": (EACH * PROJECTIONS, FRESH)}
"""Which of the two sets of images are sorted by class."""


def cut(model: nn.Module, ranked_on: Tensor, fitted_on: Tensor, factor: float, within: bool) -> nn.Module:
    """The small dense network; both sets of images are bytes, in the order in which they are used."""
    converted = svdc.convert(copy.deepcopy(model)).eval()
    batches = [images(part) for part in ranked_on.split(EACH)]
    ranking = Ranking(converted, images(ranked_on[:2]), examples=batches)
    found = ranking.at({"macs": ranking.total["macs"] / factor}, evenness=EVENNESS, within_blocks=within)
    masks = whole_units(converted, found.masks)
    svdc.reconstruct(converted, images(fitted_on), masks)
    return svdc.to_dense(svdc.prune(converted, images(ranked_on[:2]), masks=masks))


def table(results: dict[str, Any]) -> str:
    """Markdown: a row for each network and version."""
    lines = ["# Cut and reconstructed on images in random order, and sorted by class", ""]
    lines += [
        "Written by `benchmarks/example_order.py`, which says how. Accuracy in % of the 5,000 test images that chose nothing,"
    ]
    lines += ["without any training, with its 95% interval; ahead of random order, in points, paired.", ""]
    lines += [f"| network | {' | '.join(ORDERS)} | made with |", "|" + "---|" * 5]
    for title, one in results.items():
        made = f"{one['machine']['cpu']}, one thread, torch {one['torch']}, seed {SEED}"
        cells = [title, *(told(one[order]) for order in ORDERS), made]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def main() -> None:
    """Measure each factor, and store it."""
    parser = options_of(__doc__, 50_000)
    parser.add_argument("--net", choices=["resnet20", "resnet56"], default="resnet20")
    parser.add_argument("--factor", type=float, nargs="+", default=[2.0, 4.0])
    parser.add_argument("--label", default="")
    options = parser.parse_args()
    torch.set_num_threads(1)
    (x, y), _, reported = mixed(options)
    model = dense(options.resnet, options.net)
    for factor in options.factor:
        title = f"{options.net.replace('resnet', 'ResNet-')}, {factor:g}x fewer multiply-accumulates"
        title += f" ({options.label})" if options.label else ""
        found: dict[str, Any] = {"machine": machine(), "torch": torch.__version__}
        first: Tensor | None = None
        for order, by_class in ORDERS.items():
            ranked_on, fitted_on = (
                x[:count][y[:count].argsort(stable=True)] if count in by_class else x[:count]
                for count in (EACH * PROJECTIONS, FRESH)
            )
            torch.manual_seed(SEED)
            small = cut(model, ranked_on, fitted_on, factor, within=options.net == "resnet56")
            missed = wrong(small, reported)
            found[order] = accuracy(missed) | ({} if first is None else {"ahead": change(missed, first)})
            first = missed if first is None else first
        results = read(RESULTS) | {title: found}
        write(RESULTS, results)
        RESULTS.with_suffix(".md").write_text(table(results), encoding="utf-8")
        print(f"{title}: {[told(found[order]) for order in ORDERS]}", flush=True)


if __name__ == "__main__":
    main()
