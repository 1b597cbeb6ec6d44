"""Which score finds the units that a network can do without: error after one-shot removal, nothing trained afterwards.

    python benchmarks/ranking.py [--seeds 0 1 2] [--results FOLDER]

Two small networks for scikit-learn's digits (models/digits.py) are trained, converted and fine-tuned at a small beta. Then so
many of their living units go, or so many that this share of the parameters is left, chosen by

- information: that of the weights which read a unit (`svdcompress.relevance.information`), write it, or both;
- signal to noise: the sum of mu^2 / sigma^2 of the weights that read it, which is twice their diagonal optimal brain damage
  where sigma^2 is the inverse of the curvature;
- log alpha of the unit's readers as one group;
- torch-pruning's group magnitude and group Taylor (gradients over all training digits), with its defaults;
- chance.

These are ranked by torch-pruning's pruner over the whole network, through `svdcompress.interop.torch_pruning`; "ranked" is
`svdcompress.selection.ranked`: information, both sides, per parameter. Test digits are looked at after each removal; they
choose nothing. Written to benchmarks/results/ranking.json and ranking.md.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch_pruning as tp
from mnist import HERE
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


def train(model: nn.Module, x: Tensor, y: Tensor, epochs: int, loss: Callable[[int, Tensor, Tensor], Tensor]) -> None:
    """Adam at 1e-3, falling to 0 over the second half. loss: of (epoch, outputs, targets)."""
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
    """A converted network, fine-tuned, with its irrelevant weights at 0."""
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
    """Minus the log alpha of all that reads a channel, as one group."""

    def __call__(self, group: Any) -> Tensor | None:
        signal = RelevanceImportance(weigh=lambda layer: layer.weight.square())(group)
        noise = RelevanceImportance(weigh=lambda layer: layer.log_sigma2.exp())(group)
        return None if signal is None or noise is None else ((signal + 1e-8) / (noise + 1e-30)).log()


SCORES: dict[str, Callable[[], Any]] = {
    "information, readers": lambda: RelevanceImportance(),
    "information, writers": lambda: RelevanceImportance("writers"),
    "information, both": lambda: RelevanceImportance("both"),
    "signal to noise, readers": lambda: RelevanceImportance(weigh=snr),
    "signal to noise, both": lambda: RelevanceImportance("both", weigh=snr),
    "log alpha, readers": GroupLogAlpha,
    "torch-pruning, magnitude": lambda: tp.importance.GroupMagnitudeImportance(),
    "torch-pruning, Taylor": lambda: tp.importance.GroupTaylorImportance(),
    "chance": lambda: tp.importance.RandomImportance(),
}


def error(model: nn.Module, masks: Masks) -> float:
    """Of the test digits, in per cent, with masks held."""
    held = {name: layer.mask for name, layer in variational_layers(model)}
    _, (x, y) = data()
    hold(model, masks)
    with torch.no_grad():
        wrong = float((model(x).argmax(1) != y).double().mean())
    hold(model, held)
    return 100 * wrong


def pruner(model: nn.Module, score: str, ratio: float, steps: int = 1) -> Any:
    """torch-pruning's, over the whole network; gradients are there for it."""
    (x, y), _ = data()
    model.zero_grad(set_to_none=True)
    nn.functional.cross_entropy(model(x), y).backward()
    head = [layer for _, layer in variational_layers(model)][-1]
    options = {"global_pruning": True, "pruning_ratio": ratio, "iterative_steps": steps, "ignored_layers": [head]}
    return tp.pruner.BasePruner(model, x[:2], SCORES[score](), **options)


def by_units(model: nn.Module, score: str, living: float) -> dict[str, float]:
    """Error by the share of living units that went. living: their share of all units."""
    found = {}
    for share in REMOVED:
        ratio = 1 - living * (1 - share)
        found[str(share)] = error(model, chosen(pruner(copy.deepcopy(model), score, ratio)))
    return found


def by_parameters(model: nn.Module, score: str) -> dict[str, float]:
    """Error by the share of the parameters that is left at most, after dead units."""
    (x, _), _ = data()
    total = svdc.prune(model, x[:2], verify=False).pruning.parameters_after
    found, work = {}, copy.deepcopy(model)
    steps = 200
    one = pruner(work, score, 0.995, steps)
    ranking = Ranking(model, x[:2])
    for share in LEFT:
        if score == "ranked":
            masks = ranking.at({"parameters": round(share * total)}).masks
        else:
            while svdc.prune(work, x[:2], verify=False).pruning.parameters_after > share * total:
                hold(work, chosen(one))
            masks = svdc.relevance(work)
        found[str(share)] = error(model, masks)
    return found


def measured(name: str, seed: int) -> dict[str, Any]:
    """All figures of one network."""
    model = trained(name, seed)
    (x, _), _ = data()
    report = svdc.groups(model, x[:2], masks=svdc.relevance(model))
    units = {group.name: (group.removed, group.removed + group.kept) for group in report.groups if group.can_go}
    living = 1 - sum(gone for gone, _ in units.values()) / sum(count for _, count in units.values())
    found: dict[str, Any] = {"error": error(model, svdc.relevance(model)), "living": living, "units": units}
    torch.manual_seed(seed)
    found["by units"] = {score: by_units(model, score, living) for score in SCORES}
    found["by parameters"] = {score: by_parameters(model, score) for score in ("ranked", *SCORES)}
    return found
