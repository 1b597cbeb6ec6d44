"""A network cut at once to a size, before and after a little training, with the kept weights as they are or reconstructed.

    python benchmarks/reconstruction.py --cifar FOLDER --resnet FOLDER [--net resnet20] [--factor 2 4] [--images 10000]
                                        [--epochs 0 1] [--cache FILE]

The public ResNet-20 (or ResNet-56) is cut at once to a half and to a quarter of its multiply-accumulates, without training
before: by torch-pruning (magnitudes; Taylor scores of 512 training images), and by a search's way "half-even" with units
ranked by outputs, with weights as they are or with `svdcompress.reconstruct` on 1,024 training images without labels; with
the latter also by the way "half-even-within-blocks", which keeps all residual channels.
Reported for each is the accuracy as cut, with normalization statistics recomputed on 1,024 training images, and after
--epochs epochs of --images training images by SGD, distilled, with crops and flips (the loop of benchmarks/recovery.py). Of
the learning rates 0.01, 0.02 and 0.05, the one with the best accuracy on the half of the test images used for choices is
taken; all accuracies are on the other half. "gradually": torch-pruning prunes in the first half of these epochs, a little
every 10 steps (by scores of 256 images each). "ahead": of the result of torch-pruning at once by Taylor scores, paired, 95%,
both with their own best rate. One seed. Stored results are not computed again; results go to
benchmarks/results/reconstruction.json and reconstruction.md, one network at a time.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import torch
from controls import change
from cut_choice import EACH, renewed
from mnist import HERE, machine, read, write
from recovery import SEED, Split, Way, accuracy, dense, images, mixed, options_of, recover, wrong
from torch import Tensor, nn
from torch.nn import functional as F

import svdcompress as svdc
from svdcompress.cost import measure
from svdcompress.pipeline._way import PROJECTIONS
from svdcompress.selection import Ranking, whole_units

RESULTS = HERE / "results" / "reconstruction.json"
FRESH, RATES = 1024, (0.01, 0.02, 0.05)
ONCE, GRADUALLY = (400, 512), (100, 256)
"""Steps of torch-pruning's pruner, and images for each of its scores: at once, and gradually."""
EVENNESS = 0.5
TAYLOR_NAME = "torch-pruning, Taylor"
GRADUAL = "torch-pruning, Taylor, gradually"
EVERY = 10
WITHIN = "ours, reconstructed, within blocks"
NAMES = [TAYLOR_NAME, "torch-pruning, magnitude", "ours, as cut", "ours, reconstructed", WITHIN, GRADUAL]
Made = Callable[[float], tuple[nn.Module, float]]


def ours(model: nn.Module, x: Tensor, reconstructed: bool, within: bool = False) -> Made:
    """Maps a factor to our small dense network and the seconds that it took. within: all residual channels stay."""
    converted = svdc.convert(copy.deepcopy(model)).eval()
    batches = [images(part) for part in x[: PROJECTIONS * EACH].split(EACH)]
    ranking = Ranking(converted, images(x[:2]), examples=batches)

    def made(factor: float) -> tuple[nn.Module, float]:
        begun, cut = time.monotonic(), copy.deepcopy(converted)
        found = ranking.at({"macs": ranking.total["macs"] / factor}, evenness=EVENNESS, within_blocks=within)
        masks = whole_units(cut, found.masks)
        if reconstructed:
            svdc.reconstruct(cut, images(x[:FRESH]), masks)
        pruned = svdc.prune(cut, images(x[:2]), masks=masks)
        small = svdc.to_dense(pruned)
        object.__setattr__(small, "pruning", pruned.pruning)  # which of the outputs each layer has kept
        return small, time.monotonic() - begun

    return made


def theirs(net: nn.Module, train: Split, taylor: bool, length: tuple[int, int]) -> Callable[[float], bool]:
    """torch-pruning's pruner for a network: cuts it in place to a share of its multiply-accumulates; returns whether it did.

    length: its steps at most, and the images that each score uses.
    """
    import torch_pruning as tp

    example = torch.zeros(1, 3, 32, 32)
    score = tp.importance.GroupTaylorImportance() if taylor else tp.importance.GroupMagnitudeImportance(p=2)
    head: list[Any] = [layer for layer in net.modules() if isinstance(layer, nn.Linear)]
    named: dict[str, Any] = {
        "global_pruning": True,
        "pruning_ratio": 0.99,
        "iterative_steps": length[0],
        "ignored_layers": head,
    }
    pruner = tp.pruner.BasePruner(net, example, importance=score, **named)
    start = tp.utils.count_ops_and_params(net, example)[0]

    def to(share: float) -> bool:
        training, changed = net.training, False
        net.eval()
        while tp.utils.count_ops_and_params(net, example)[0] > start * share:
            if taylor:
                net.zero_grad(set_to_none=True)
                for a, b in zip(*(part[: length[1]].split(128) for part in train), strict=True):
                    F.cross_entropy(net(images(a)), b).backward()
            pruner.step()
            changed = True
        net.zero_grad(set_to_none=True)
        net.train(training)
        return changed

    return to


def at_once(model: nn.Module, train: Split, taylor: bool) -> Made:
    """The same as `ours`, by torch-pruning."""

    def made(factor: float) -> tuple[nn.Module, float]:
        begun, net = time.monotonic(), copy.deepcopy(model).eval()
        theirs(net, train, taylor, ONCE)(1 / factor)
        return net, time.monotonic() - begun

    return made


def gradually(net: nn.Module, train: Split, factor: float) -> Callable[[float], bool]:
    """Taylor pruning during training: removed multiply-accumulates rise as 1 - (1 - t)^3 in the first half of the steps."""
    to, asked = theirs(net, train, True, GRADUALLY), 0

    def pruned(done: float) -> bool:
        nonlocal asked
        asked += 1
        if (asked - 1) % EVERY:
            return False
        left = 1 / factor
        return to(left + (1 - left) * (1 - min(2 * done, 1.0)) ** 3)

    return pruned


def told(found: dict[str, Any]) -> str:
    """An accuracy as a table cell."""
    low, high = found["interval"]
    rate = f"; {found['lr']:g}" if "lr" in found else ""
    ahead = ""
    if "ahead" in found:
        at, least, most = found["ahead"]
        ahead = f"; ahead by {at:+.2f}, {least:+.2f} to {most:+.2f}"
    return f"{found['accuracy']:.2f} ({low:.2f} to {high:.2f}{rate}{ahead})"


def table(results: dict[str, Any]) -> str:
    """Markdown: a section for each network and factor."""
    lines = ["# Networks that are cut at once, and reconstructed", ""]
    lines += ["Written by `benchmarks/reconstruction.py`, which says how. Accuracy in % of the 5,000 test images that chose"]
    lines += ["nothing, with its 95% interval; after training, also the learning rate that was chosen, and how far ahead of"]
    lines += ["torch-pruning's Taylor scores it is, in points, paired.", ""]
    for title, one in results.items():
        made, lengths = one["setting"], one["setting"]["epochs"]
        cpu, torch_version = made["machine"]["cpu"], made["torch"]
        lines += [f"## {title}", "", f"Dense: {told(one['dense'])}. {cpu}, one thread, torch {torch_version}, seed {SEED}.", ""]
        after = [f"{count} epoch(s) of {made['images']:,}" for count in lengths if count]
        head = ["network", "multiply-accumulates", "parameters", "seconds", "as cut", "statistics anew", *after]
        lines += [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
        for name, net in one["nets"].items():
            cells = [name, *[""] * 5]
            if "cut" in net:
                cells = [name, f"{net['macs']:,}", f"{net['parameters']:,}", f"{net['seconds']:.0f}", told(net["cut"])]
                cells.append(told(net["renewed"]))
            cells += [told(net["trained"][str(count)]) for count in lengths if count]
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def trained(
    small: nn.Module,
    teacher: nn.Module,
    data: tuple[Split, Split, Split],
    epochs: int,
    factor: float | None = None,
    *,
    among: tuple[float, ...] = RATES,
    keeps_norms: bool = False,
    layers: float = 0.0,
) -> tuple[dict[str, Any], Tensor]:
    """Train with each rate; figures of the one that is best on the images for choices, and which reported images it gets wrong.

    factor: how far to prune during training; None if the network is pruned already. among: the rates. keeps_norms, layers: as
    in `recover`.
    """
    best: tuple[float, float, nn.Module] | None = None
    rates = {}
    for rate in among:
        net = copy.deepcopy(small)
        pruned = None if factor is None else gradually(net, data[0], factor)
        recover(net, teacher, data[0], Way(True, rate, 5e-4, True), epochs, pruned, keeps_norms, layers)
        rates[str(rate)] = 100 - 100 * float(wrong(net, data[1]).double().mean())
        if best is None or rates[str(rate)] > best[0]:
            best = rates[str(rate)], rate, net
    assert best is not None
    missed = wrong(best[2], data[2])
    return accuracy(missed) | {"lr": best[1], "chosen": rates}, missed


def sized(small: nn.Module, example: Tensor) -> dict[str, Any]:
    """Multiply-accumulates and parameters of a network."""
    return {"macs": measure(small, example).macs, "parameters": sum(p.numel() for p in small.parameters())}


def main() -> None:
    """Measure the networks without stored results, one by one."""
    parser = options_of(__doc__, 10_000)
    parser.add_argument("--net", choices=["resnet20", "resnet56"], default="resnet20")
    parser.add_argument("--factor", type=float, nargs="+", default=[2.0, 4.0])
    parser.add_argument("--epochs", type=int, nargs="+", default=[0, 1])
    parser.add_argument(
        "--only", nargs="+", choices=NAMES, default=NAMES, help="without Taylor's at once nothing is ahead of it"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    train, chosen, reported = mixed(options)
    teacher = dense(options.resnet, options.net)
    setting = {"images": options.images, "epochs": options.epochs, "machine": machine(), "torch": torch.__version__}
    torch.manual_seed(SEED)
    for factor in options.factor:
        title = f"{options.net.replace('resnet', 'ResNet-')}, {factor:g}x fewer multiply-accumulates"
        ways = {
            TAYLOR_NAME: lambda: at_once(teacher, train, True),
            "torch-pruning, magnitude": lambda: at_once(teacher, train, False),
            "ours, as cut": lambda: ours(teacher, train[0], False),
            "ours, reconstructed": lambda: ours(teacher, train[0], True),
            WITHIN: lambda: ours(teacher, train[0], True, within=True),
        }
        names = [name for name in [*ways, GRADUAL] if name in options.only]
        beside: dict[str, Tensor] = {}  # what Taylor's network gets wrong, by the length of training
        for name in names:
            results = read(RESULTS)
            if results.get(title, {}).get("setting") != setting:  # stored with other images, epochs or machine
                results[title] = {"setting": setting, "dense": accuracy(wrong(teacher, reported)), "nets": {}}
            known = results[title]["nets"]
            if name in known and (name != TAYLOR_NAME or set(known) >= set(names) - {GRADUAL}):
                continue
            if name == GRADUAL:
                small, found = teacher, {"trained": {}}
            else:
                small, seconds = ways[name]()(factor)
                found = sized(small, images(train[0][:1])) | {
                    "seconds": seconds,
                    "cut": accuracy(wrong(small, reported)),
                    "renewed": accuracy(wrong(renewed(small, train[0][:FRESH]), reported)),
                    "trained": {},
                }
            for epochs in (count for count in options.epochs if count):
                one, missed = trained(small, teacher, (train, chosen, reported), epochs, factor if name == GRADUAL else None)
                beside.setdefault(str(epochs), missed)
                if name not in (TAYLOR_NAME, GRADUAL) and TAYLOR_NAME in names:
                    one["ahead"] = change(missed, beside[str(epochs)])
                found["trained"][str(epochs)] = one
            known[name] = found
            write(RESULTS, results)
            RESULTS.with_suffix(".md").write_text(table(results), encoding="utf-8")
            print(f"{name}: {[told(each) for each in (found.get('cut'), *found['trained'].values()) if each]}", flush=True)


if __name__ == "__main__":
    main()
