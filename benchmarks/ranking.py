"""Which score finds the units that a network can do without: error after one-shot removal, without training afterwards.

    python benchmarks/ranking.py [--seeds 0 1 2] [--results FOLDER]

Two small networks for scikit-learn's digits (models/digits.py) are trained, converted and fine-tuned at a small beta. Then a
share of their living units is removed, or as many units as leave a given share of the parameters, chosen by

- information: that of the weights which read a unit (`svdcompress.relevance.information`), write it, or both;
- signal to noise: the sum of mu^2 / sigma^2 of the weights that read it, which is twice their diagonal optimal brain damage
  if sigma^2 is the inverse of the curvature;
- log alpha of the unit's readers as one group;
- torch-pruning's group magnitude and group Taylor (gradients over all training digits), with its defaults;
- chance.

These are ranked by torch-pruning's pruner over the whole network, through `svdcompress.interop.torch_pruning`; "ranked" is
`svdcompress.selection.ranked` with the information alone, and "ranked, with examples" uses 512 training digits, as searches
do. For shares of the parameters, the small network is also trained further for a few epochs. Test digits are evaluated after
each removal; nothing is chosen by them. Written to benchmarks/results/ranking.json and ranking.md; stored results are not
computed again without --again.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch_pruning as tp
from mnist import HERE, cpu, read, span, write
from torch import Tensor, nn

import svdcompress as svdc
from svdcompress.interop.torch_pruning import RelevanceImportance, chosen
from svdcompress.layers import VariationalLayer, variational_layers
from svdcompress.relevance import Masks, hold
from svdcompress.selection import Ranking

sys.path.insert(0, str(HERE / "models"))
from digits import NETS, data

NETWORKS = ("mlp", "cnn")
REMOVED = (0.3, 0.5, 0.7)
LEFT = (0.5, 0.3, 0.15)
BATCH = 100
BETA = 0.05
STEPS = 30
"""Steps in which torch-pruning reaches its smallest size."""

UNIT_STEPS = 10
"""Steps in which torch-pruning removes a share of the units."""

EXAMPLES = 512
"""Training digits from which the units' sensitivities are computed."""

RECOVERY = 10
"""Epochs of further training of the means after removal by parameters."""


def train(model: nn.Module, x: Tensor, y: Tensor, epochs: int, loss: Callable[[int, Tensor, Tensor], Tensor]) -> None:
    """Train with Adam at 1e-3, falling to 0 over the second half. loss: a function of (epoch, outputs, targets)."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    factor = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: min(1.0, 2 * (1 - epoch / epochs)))
    for epoch in range(epochs):
        model.train()
        for at in torch.randperm(len(x)).split(BATCH):
            optimizer.zero_grad()
            loss(epoch, model(x[at]), y[at]).backward()
            optimizer.step()
        factor.step()
    model.eval()


def trained(name: str, seed: int) -> nn.Module:
    """A converted and fine-tuned network, with its irrelevant weights set to 0."""
    torch.manual_seed(seed)
    (x, y), _ = data()
    model = NETS[name]()
    train(model, x, y, 40, lambda epoch, output, target: nn.functional.cross_entropy(output, target))
    svdc.convert(model)
    elbo = svdc.ELBO(model, nn.CrossEntropyLoss(), num_examples=len(x), schedule=svdc.LinearWarmup(5, 30, BETA))

    def bound(epoch: int, output: Tensor, target: Tensor) -> Tensor:
        elbo.set_epoch(epoch)
        return elbo(output, target)

    train(model, x, y, 80, bound)
    hold(model, svdc.relevance(model))
    with torch.no_grad():
        for _, layer in variational_layers(model):
            layer.weight.mul_(layer.relevant())
    return model


def snr(layer: VariationalLayer) -> Tensor:
    """Signal to noise of each weight."""
    return layer.weight.square() / layer.log_sigma2.exp()


class GroupLogAlpha(tp.importance.Importance):
    """Signal to noise of all weights that read a channel, as one group: the higher, the lower its log alpha."""

    def __call__(self, group: Any) -> Tensor | None:
        signal = RelevanceImportance("readers", weigh=lambda layer: layer.weight.square())(group)
        noise = RelevanceImportance("readers", weigh=lambda layer: layer.log_sigma2.exp())(group)
        return None if signal is None or noise is None else signal / (noise + 1e-30)


SCORES: dict[str, Callable[[], Any]] = {
    "information, readers": lambda: RelevanceImportance("readers"),
    "information, writers": lambda: RelevanceImportance("writers"),
    "information, both": lambda: RelevanceImportance("both"),
    "signal to noise, readers": lambda: RelevanceImportance("readers", weigh=snr),
    "signal to noise, both": lambda: RelevanceImportance("both", weigh=snr),
    "log alpha, readers": GroupLogAlpha,
    "torch-pruning, magnitude": lambda: tp.importance.GroupMagnitudeImportance(),
    "torch-pruning, Taylor": lambda: tp.importance.GroupTaylorImportance(),
    "chance": lambda: tp.importance.RandomImportance(),
}


METHODS = ("ranked", "ranked, with examples", "information, both", "torch-pruning, magnitude", "torch-pruning, Taylor")
"""The methods that are compared by parameters: ours in two ways, and three of the scores with torch-pruning's pruner."""


def error(model: nn.Module, masks: Masks) -> float:
    """The error on the test digits in percent, with these masks held."""
    held = {name: layer.mask for name, layer in variational_layers(model)}
    _, (x, y) = data()
    hold(model, masks)
    with torch.no_grad():
        wrong = float((model(x).argmax(1) != y).double().mean())
    hold(model, held)
    return 100 * wrong


def pruner(model: nn.Module, score: str, ratio: float, steps: int = 1) -> Any:
    """torch-pruning's pruner for the whole network, with the gradients that its scores may need."""
    (x, _), _ = data()
    gradients(model)
    head = [layer for _, layer in variational_layers(model)][-1]
    options = {"global_pruning": True, "pruning_ratio": ratio, "iterative_steps": steps, "ignored_layers": [head]}
    return tp.pruner.BasePruner(model, x[:2], SCORES[score](), **options)


def gradients(model: nn.Module) -> None:
    """Compute the gradients of the loss over all training digits."""
    (x, y), _ = data()
    model.zero_grad(set_to_none=True)
    nn.functional.cross_entropy(model(x), y).backward()


def by_units(model: nn.Module, score: str, living: float) -> dict[str, float]:
    """Error by the share of living units that is removed. living: the share of units that are alive."""
    found = {}
    for share in REMOVED:
        work = copy.deepcopy(model)
        steps = 1 if score == "chance" else UNIT_STEPS  # chance would draw again at each step
        one = pruner(work, score, 1 - living * (1 - share), steps)
        for _ in range(steps):  # in one step, its pruner leaves a layer whole if all of it would go
            hold(work, chosen(one))
        found[str(share)] = error(model, svdc.relevance(work))
    return found


def by_parameters(model: nn.Module, method: str, seed: int) -> dict[str, list[float]]:
    """[error, error after recovery] by the share of parameters, without dead units, that is left at most."""
    (x, _), _ = data()
    total = svdc.prune(model, x[:2], verify=False).pruning.parameters_after
    ours = method.startswith("ranked")
    ranking = Ranking(model, x[:2], examples=x[:EXAMPLES].split(EXAMPLES // 128) if "examples" in method else None)
    found, work = {}, copy.deepcopy(model)
    one = pruner(work, "information, both" if ours else method, 0.99, STEPS)
    for share in LEFT:
        if ours:
            masks = ranking.at({"parameters": round(share * total)}).masks
        else:
            while svdc.prune(work, x[:2], verify=False).pruning.parameters_after > share * total:
                gradients(work)
                hold(work, chosen(one))
            masks = svdc.relevance(work)
        found[str(share)] = [error(model, masks), recovered(model, masks, seed)]
    return found


def recovered(model: nn.Module, masks: Masks, seed: int) -> float:
    """The error after training the small network's means for a few epochs, with the masks held."""
    (x, y), (x_test, y_test) = data()
    small = svdc.prune(model, x[:2], masks=masks, verify=False)
    held = {name: layer.relevant().float() for name, layer in variational_layers(small)}
    svdc.to_dense(small)
    weights = [(small.get_submodule(name).weight, mask) for name, mask in held.items()]

    def loss(epoch: int, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, target)

    handles = [weight.register_hook(lambda gradient, mask=mask: gradient * mask) for weight, mask in weights]
    torch.manual_seed(seed)
    train(small, x, y, RECOVERY, loss)
    for handle in handles:
        handle.remove()
    with torch.no_grad():
        return 100 * float((small(x_test).argmax(1) != y_test).double().mean())


def measured(name: str, seed: int) -> dict[str, Any]:
    """All figures of one network."""
    model = trained(name, seed)
    (x, _), _ = data()
    report = svdc.groups(model, x[:2], masks=svdc.relevance(model))
    units = {group.name: (group.removed, group.removed + group.kept) for group in report.groups if group.prunable}
    living = 1 - sum(gone for gone, _ in units.values()) / sum(count for _, count in units.values())
    found: dict[str, Any] = {"error": error(model, svdc.relevance(model)), "living": living, "units": units}
    torch.manual_seed(seed)
    found["by units"] = {score: by_units(model, score, living) for score in SCORES}
    found["by parameters"] = {method: by_parameters(model, method, seed) for method in METHODS}
    return found


def table(results: dict[str, Any]) -> str:
    """Markdown: for each network, error by units gone and by parameters left."""
    lines = [
        "# Which units a network can do without",
        "",
        "Written by `benchmarks/ranking.py`, which says how. Test errors in %, means over the seeds, in brackets the least and",
        "the largest. Shares are of what is left when dead units have gone.",
    ]
    for name, runs in results["networks"].items():
        runs = [runs[seed] for seed in sorted(runs, key=int)]
        seeds = ", ".join(sorted(results["networks"][name], key=int))
        lines += ["", f"## {name}", "", f"Before: {span([run['error'] for run in runs])}, seeds {seeds}.", ""]
        lines += [f"| score, network-wide | {' | '.join(f'{share:.0%} of the units gone' for share in REMOVED)} |"]
        lines += ["|---" * (1 + len(REMOVED)) + "|"]
        for score in SCORES:
            cells = [span([run["by units"][score][str(share)] for run in runs]) for share in REMOVED]
            lines.append(f"| {score} | {' | '.join(cells)} |")
        heads = [f"{share:.0%} of the parameters left{what}" for what in ("", f", {RECOVERY} epochs on") for share in LEFT]
        lines += ["", f"| method | {' | '.join(heads)} |", "|---" * (1 + len(heads)) + "|"]
        for method in METHODS:
            cells = [span([run["by parameters"][method][str(share)][i] for run in runs]) for i in (0, 1) for share in LEFT]
            lines.append(f"| {method} | {' | '.join(cells)} |")
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    return "\n".join([*lines, "", f"{results['cpu']}, one thread; {versions}.", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--network", action="append", choices=NETWORKS, help="may be given twice; both by default")
    parser.add_argument("--again", action="store_true", help="measure those again whose results are stored")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    path = options.results / "ranking.json"
    results = {"networks": {}} if options.again or not path.is_file() else read(path)
    for name in options.network or NETWORKS:
        for seed in options.seeds:
            if str(seed) in results["networks"].get(name, {}):
                continue
            results["networks"].setdefault(name, {})[str(seed)] = measured(name, seed)
            results |= {"cpu": cpu(), "versions": {one: version(one) for one in ("torch", "torch-pruning", "svdcompress")}}
            write(path, results)
            path.with_suffix(".md").write_text(table(results), encoding="utf-8")
            print(name, seed, flush=True)


if __name__ == "__main__":
    main()
