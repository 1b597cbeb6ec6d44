"""A network with zeros in its weights, and a clock set by a test, for the tests of sparse execution."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import svdcompress as svdc

WIDE = 200  # 40,000 weights: enough for one row to be timed


class Clock:
    """Given times for `in_turns`, in order: of the layers that are timed, then of the whole model. Runs the work once."""

    def __init__(self, *times: tuple[float, float]) -> None:
        self.times, self.asked = list(times), 0

    def __call__(self, dense, sparse, seconds, device):
        torch.testing.assert_close(dense(), sparse(), rtol=1e-4, atol=1e-4)
        assert seconds > 0 and device.type == "cpu"
        self.asked += 1
        return self.times.pop(0)


FASTER, SLOWER, SAME = (2e-3, 1e-3), (1e-3, 2e-3), (1.05e-3, 1e-3)


def network(density: float = 0.05, **settings) -> nn.Module:
    """An MLP with zeros in the weights of the first two layers."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(WIDE, WIDE, **settings), nn.ReLU(), nn.Linear(WIDE, WIDE, **settings), nn.ReLU(), nn.Linear(WIDE, 3)
    )
    return thinned(model.eval(), ["0", "2"], density)


def thinned(model: nn.Module, names: list[str], density: float = 0.05) -> nn.Module:
    with torch.no_grad():
        for name in names:
            weight = model.get_submodule(name).weight
            weight.mul_(torch.rand_like(weight) < density)
    return model


def by_hand(model: nn.Module, x: Tensor) -> Tensor:
    """The network as plain matrix products in double precision."""
    x = x.double()
    for at in (0, 2, 4):
        x = x @ model[at].weight.detach().double().T + model[at].bias.detach().double()
        x = x.relu() if at < 4 else x
    return x.float()


def kinds(model: nn.Module) -> dict[str, str]:
    return {name: type(module).__name__ for name, module in model.named_modules() if "Linear" in type(module).__name__}


def entry(model: nn.Module, name: str) -> svdc.SparseEntry:
    return next(one for one in model.sparse_execution if one.name == name)
