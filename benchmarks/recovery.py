"""What recovers a pruned convolutional network with batch normalization: optimizers, learning rates, distillation.

    python benchmarks/recovery.py --cifar FOLDER --resnet FOLDER [--images 25000] [--epochs 3] [--only sgd-0.05 ...]
    python benchmarks/recovery.py ... --pruned RUN/state/search/trial-1/pruned.safetensors --epochs 2

The public ResNet-20 is cut at once to half of its multiply-accumulates by torch-pruning's magnitudes; or, with --pruned, the
public ResNet-56 is used as a search of `svdc sparsify` has cut it in steps, before it recovers (the checkpoint of a trial
that was stopped then). Each way trains it further, with a learning rate that rises for 50 steps and then falls once: batches
of 128, crops and flips, no noise and no KL; weights that are 0 at the start stay 0. It is plain PyTorch, with one seed.
distilled: 0.9 of the loss is that of the dense network's answers at temperature 3. Accuracies are on the half of the test
images used for choices; the other half is not read. Stored results are not computed again; results go to
benchmarks/results/recovery.json and recovery.md, one way at a time.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from mnist import HERE, machine, read, write
from models import cifar10, resnet_cifar
from torch import Tensor, nn
from torch.nn import functional as F

import svdcompress as svdc
from svdcompress.sources import load_weights
from svdcompress.train import norms
from svdcompress.train._layerwise import Layerwise
from svdcompress.uncertainty import wilson

BATCH, WARM, SEED = 128, 50, 0
DISTILLED, TEMPERATURE = 0.9, 3.0
RESULTS = HERE / "results" / "recovery.json"
Split = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Way:
    """How a network is trained further."""

    sgd: bool
    lr: float
    decay: float = 0.0
    distilled: bool = False

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer of the model's parameters."""
        if self.sgd:
            return torch.optim.SGD(model.parameters(), self.lr, momentum=0.9, weight_decay=self.decay)
        return torch.optim.Adam(model.parameters(), self.lr, weight_decay=self.decay)


WAYS = {
    "sgd-0.01-distilled": Way(True, 0.01, 5e-4, True),
    "adam-0.001-distilled": Way(False, 1e-3, 0.0, True),
    "adam-0.001": Way(False, 1e-3),
    "sgd-0.05": Way(True, 0.05, 5e-4),
    "sgd-0.05-distilled": Way(True, 0.05, 5e-4, True),
    "adam-0.003": Way(False, 3e-3),
    "adam-0.003-distilled": Way(False, 3e-3, 0.0, True),
    "sgd-0.01": Way(True, 0.01, 5e-4),
    "sgd-0.1": Way(True, 0.1, 5e-4),
    "sgd-0.02": Way(True, 0.02, 5e-4),
    "sgd-0.05-no-decay": Way(True, 0.05),
    "adam-0.01": Way(False, 1e-2),
}


def options_of(text: str | None, count: int) -> argparse.ArgumentParser:
    """A parser with the options of all scripts that train on these images. count: the default number of images."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cifar", type=Path, required=True)
    parser.add_argument("--resnet", type=Path, required=True)
    parser.add_argument("--images", type=int, default=count)
    parser.add_argument("--cache", help="file that keeps the decoded images (.npz)")
    return parser


def mixed(options: argparse.Namespace) -> tuple[Split, Split, Split]:
    """Training images in random order (they are stored class by class), test images for choices, and those to report."""
    train, chosen, reported = cifar10.data(str(options.cifar), options.images, options.cache)
    order = torch.randperm(len(train[1]), generator=torch.Generator().manual_seed(SEED))
    return (train[0][order], train[1][order]), chosen, reported


def dense(folder: Path, name: str) -> nn.Module:
    """The public network of this name."""
    return load_weights(getattr(resnet_cifar, name)(), next(folder.glob(f"{name}-*.th")), "module.").eval()


def halved(folder: Path) -> nn.Module:
    """ResNet-20 cut to half of its multiply-accumulates by magnitudes."""
    import torch_pruning as tp

    model, example = dense(folder, "resnet20"), torch.zeros(1, 3, 32, 32)
    head: list[Any] = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    pruner = tp.pruner.BasePruner(
        model,
        example,
        importance=tp.importance.GroupMagnitudeImportance(p=2),
        global_pruning=True,
        pruning_ratio=0.99,
        iterative_steps=400,
        ignored_layers=head,
    )
    start = tp.utils.count_ops_and_params(model, example)[0]
    while tp.utils.count_ops_and_params(model, example)[0] > start / 2:
        pruner.step()
    return model


def images(x: Tensor) -> Tensor:
    """Images as bytes (N, 3, 32, 32), normalized as the network expects them."""
    mean, deviation = (torch.tensor(values)[:, None, None] for values in (cifar10.MEAN, cifar10.STD))
    return (x.float() / 255 - mean) / deviation


def moved(x: Tensor, generator: torch.Generator) -> Tensor:
    """Each image shifted by up to four pixels, and mirrored at random."""
    wide = F.pad(x, (4, 4, 4, 4))
    shifts = torch.randint(9, (len(x), 2), generator=generator).tolist()
    x = torch.stack([image[:, i : i + 32, j : j + 32] for image, (i, j) in zip(wide, shifts, strict=True)])
    return torch.where(torch.rand(len(x), 1, 1, 1, generator=generator) < 0.5, x.flip(3), x)


@torch.no_grad()
def wrong(model: nn.Module, examples: Split) -> Tensor:
    """Which of the examples a network gets wrong (N,)."""
    model.eval()
    return torch.cat([model(images(x)).argmax(1) != y for x, y in zip(*(part.split(500) for part in examples), strict=True)])


def judged(model: nn.Module, examples: Split) -> dict[str, Any]:
    """Accuracy in %, and its 95% interval (Wilson)."""
    return accuracy(wrong(model, examples))


def accuracy(missed: Tensor) -> dict[str, Any]:
    """The same, from which examples are wrong (N,)."""
    wrong, count = int(missed.sum()), len(missed)
    interval = [100 - 100 * bound for bound in reversed(wilson(wrong, count))]
    return {"accuracy": 100 - 100 * wrong / count, "interval": interval}


def recover(
    model: nn.Module,
    teacher: nn.Module | None,
    train: Split,
    way: Way,
    epochs: int,
    pruned: Callable[[float], bool] | None = None,
    keeps_norms: bool = False,
    layers: float = 0.0,
) -> None:
    """Train in place.

    pruned: called before each step with the share of the steps that are done; True means that it has changed the network,
    which then has other parameters. keeps_norms: batch normalization uses its running statistics. layers: the weight of the
    error of layers' outputs against the teacher's, for a network that `svdc.prune` made (`.pruning`).
    """
    pruning: Any = getattr(model, "pruning", None)
    watched = Layerwise(model, teacher, pruning.outputs_kept) if layers and teacher is not None else None
    optimizer, generator = way.optimizer(model), torch.Generator().manual_seed(SEED)
    steps, step = epochs * math.ceil(len(train[1]) / BATCH), 0
    held = [(p, p.detach() != 0) for p in model.parameters() if p.dim() > 1 and not p.detach().all()]
    for _ in range(epochs):
        model.train()
        for module in norms(model) if keeps_norms else ():
            module.eval()
        for rows in torch.randperm(len(train[1]), generator=generator).split(BATCH):
            x, y = moved(images(train[0][rows]), generator), train[1][rows]
            if pruned is not None and pruned(step / steps):
                optimizer = way.optimizer(model)
            for group in optimizer.param_groups:
                group["lr"] = way.lr * min(1.0, (step + 1) / WARM) * (1 - step / steps)
            output = model(x)
            loss = F.cross_entropy(output, y)
            if teacher is not None:
                with torch.no_grad():
                    answer = (teacher(x) / TEMPERATURE).softmax(1)
                soft = F.cross_entropy(output / TEMPERATURE, answer) * TEMPERATURE**2
                loss = (1 - DISTILLED) * loss + DISTILLED * soft
            if watched is not None and (error := watched.error()) is not None:
                loss = loss + layers * (1 - step / steps) ** 2 * error
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for weight, kept in held:
                    weight.mul_(kept)
            step += 1
    if watched is not None:
        watched.close()


def table(results: dict[str, Any]) -> str:
    """Markdown: a section for each network."""
    lines = [
        "# What recovers a pruned network",
        "",
        "Written by `benchmarks/recovery.py`, which says how. Accuracy is that on the",
    ]
    lines += ["half of the test images that chooses, with Wilson's 95% interval.", ""]
    for title, one in results.items():
        made = one["setting"]
        length = f"{made['epochs']} epochs of {made['images']:,} images"
        lines += [
            f"## {title}",
            "",
            f"{made['dense']:.2f}% dense, {made['pruned']:.2f}% as pruned; {length}.",
            f"{made['machine']['cpu']}, one thread, torch {made['torch']}, seed {SEED}.",
            "",
            "| optimizer | learning rate | weight decay | distilled | accuracy % |",
            "|---|---|---|---|---|",
        ]
        for name, found in sorted(one["ways"].items(), key=lambda each: each[1]["accuracy"]):
            way, (low, high) = WAYS[name], found["interval"]
            cells = [
                "SGD, momentum 0.9" if way.sgd else "Adam",
                f"{way.lr:g}",
                f"{way.decay:g}",
                "yes" if way.distilled else "no",
            ]
            lines.append(f"| {' | '.join(cells)} | {found['accuracy']:.2f} ({low:.2f} to {high:.2f}) |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    """Measure the ways without stored results, one by one."""
    parser = options_of(__doc__, 25_000)
    parser.add_argument("--pruned", type=Path, help="a checkpoint of ResNet-56")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=WAYS, default=list(WAYS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    train, chosen, _ = cifar10.data(str(options.cifar), options.images, options.cache)
    net, title = "resnet56", "ResNet-56, cut in steps by a search"
    if options.pruned is None:
        net, title = "resnet20", "ResNet-20, cut at once to half its multiply-accumulates"

    def start() -> nn.Module:
        if options.pruned is None:
            return halved(options.resnet)
        return svdc.to_dense(svdc.load(options.pruned, resnet_cifar.resnet56()))

    teacher = dense(options.resnet, net)
    setting = {"images": options.images, "epochs": options.epochs, "machine": machine(), "torch": torch.__version__}
    setting |= {"dense": judged(teacher, chosen)["accuracy"], "pruned": judged(start(), chosen)["accuracy"]}
    for name in options.only:
        results = read(RESULTS)
        if results.get(title, {}).get("setting") != setting:  # stored with other images, epochs or machine
            results[title] = {"setting": setting, "ways": {}}
        if name in results[title]["ways"]:
            continue
        way, begun, model = WAYS[name], time.monotonic(), start()
        recover(model, teacher if way.distilled else None, train, way, options.epochs)
        found = judged(model, chosen) | {"seconds": time.monotonic() - begun}
        others = read(RESULTS).get(title, {})  # another process may have added to it
        if others.get("setting") == setting:
            results[title] = others
        results[title]["ways"][name] = found
        write(RESULTS, results)
        RESULTS.with_suffix(".md").write_text(table(results), encoding="utf-8")
        print(f"{name}: {found['accuracy']:.2f}%, {found['seconds']:.0f} s", flush=True)


if __name__ == "__main__":
    main()
