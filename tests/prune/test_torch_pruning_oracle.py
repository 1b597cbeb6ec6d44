"""Units found by our tracing, against those of torch-pruning's dependency graph, on architectures where that is right.

An independent oracle for discovery only: for each output channel of each layer, everything that must be removed with it.
(Where the graph is wrong, crashes or does not end, `docs/pruning.md` says so; there the masked model is the oracle, in
tests/zoo.)
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from zoo_models import ZOO

from svdcompress.prune._prune import analyse

tp = pytest.importorskip("torch_pruning")

Place = tuple[str, str, int]
"""(module, "in" or "out", index)."""

LAYERS = (nn.Linear, nn.modules.conv._ConvNd)
NORMS = nn.modules.batchnorm._BatchNorm


def chain() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 8, 3), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(8 * 4, 10), nn.ReLU(), nn.Linear(10, 4)),
    )


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 9), nn.BatchNorm1d(9), nn.Tanh(), nn.Linear(9, 3))


CASES = {
    "chain": (chain, lambda: torch.randn(2, 3, 8, 8)),
    "mlp": (mlp, lambda: torch.randn(2, 8)),
    "resnet-basic": ZOO["resnet-basic"],
    "resnet-bottleneck": ZOO["resnet-bottleneck"],
    "vgg-bn": ZOO["vgg-bn"],
    "densenet": ZOO["densenet"],
    "unet": ZOO["unet"],
}


def theirs(model: nn.Module, inputs: torch.Tensor) -> Iterator[tuple[Place, frozenset[Place]]]:
    """What torch-pruning would remove along with each output channel."""
    names = {module: name for name, module in model.named_modules()}
    graph = tp.DependencyGraph().build_dependency(model, inputs)
    for name, module in model.named_modules():
        if not isinstance(module, LAYERS):
            continue
        prune_out = graph.get_pruner_of_module(module).prune_out_channels
        for channel in range(getattr(module, "out_channels", 0) or module.out_features):
            found = set()
            for dependency, indices in graph.get_pruning_group(module, prune_out, [channel]):
                target = dependency.target.module
                if target in names and isinstance(target, (*LAYERS, NORMS)):
                    side = "in" if graph.is_in_channel_pruning_fn(dependency.handler) and isinstance(target, LAYERS) else "out"
                    found |= {(names[target], side, int(i)) for i in indices}
            yield (name, "out", channel), frozenset(found)


def ours(model: nn.Module, inputs: torch.Tensor) -> dict[Place, frozenset[Place]]:
    """Everything that is removed along with each place, from the roots of its slots."""
    analysis = analyse(model, inputs)
    assert analysis is not None
    modules = dict(model.named_modules())
    members: dict[int, set[Place]] = {}
    for parameter in analysis.trace.units.parameters:
        name, _, key = parameter.name.rpartition(".")
        if key != "weight" or not isinstance(modules[name], (*LAYERS, NORMS)):
            continue
        turned = getattr(modules[name], "transposed", False)
        for axis, (first, size) in enumerate(zip(parameter.axes, parameter.sizes, strict=True)):
            if axis > 1:
                continue  # the kernel's positions
            side = "out" if axis == (1 if turned else 0) else "in"
            for i, root in enumerate(analysis.root[first : first + size].tolist()):
                members.setdefault(root, set()).add((name, side, i))
    return {place: frozenset(group) for group in members.values() for place in group}


@pytest.mark.parametrize("name", CASES)
def test_the_same_units_are_coupled(name: str) -> None:
    torch.manual_seed(0)
    factory, inputs = CASES[name]
    model, x = factory().eval(), inputs()
    own = ours(model, x)
    checked = 0
    for place, expected in theirs(model, x):
        assert own[place] == expected, place
        checked += 1
    assert checked == sum(m.weight.shape[getattr(m, "transposed", False)] for m in model.modules() if isinstance(m, LAYERS))
