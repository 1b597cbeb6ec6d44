"""`sampling` with models whose path varies between calls: weights are drawn wherever they meet a row more than once."""

import pytest
import torch
from torch import nn

import svdcompress as svdc

STD = torch.exp(torch.tensor(-1.0))  # of weights whose log variance is -2


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def converted(model):
    nn.init.ones_(model.linear.weight)  # so that no weight is irrelevant
    return svdc.convert(model, log_sigma2=-2.0).eval()


class Flag(nn.Module):
    """Either the mean over tokens of a map, or the map of their mean."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 1)

    def forward(self, x, tokens=False):
        return self.linear(x).mean(1) if tokens else self.linear(x.mean(1))


class Steps(nn.Module):
    """Uses one weight as many times as the inputs say."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 4, bias=False)

    def forward(self, x, n):
        return sum(self.linear(x) for _ in range(int(n.max()))) / int(n.max())


@pytest.mark.parametrize("before", [False, True])
def test_a_flag_is_another_path(before):
    model, x = converted(Flag()), torch.ones(4, 32, 8)
    with torch.no_grad(), svdc.sampling(model, generator=seeded()):
        if before:
            model(x)
        draws = torch.stack([model(x, tokens=True) for _ in range(500)])
    assert float(draws.std(0).mean()) == pytest.approx(8**0.5 * float(STD), rel=0.1)


@pytest.mark.parametrize("before", [False, True])
def test_values_that_lead_elsewhere_are_seen_in_the_call_itself(before):
    model, x, one = converted(Steps()), torch.ones(4, 8), torch.ones(4, dtype=torch.long)
    with torch.no_grad(), svdc.sampling(model, generator=seeded()):
        if before:
            model(x, one)
            model(x, 16 * one)  # this call reuses the weight
        draws = torch.stack([model(x, 16 * one) for _ in range(500)])
    assert float(draws.std(0).mean()) == pytest.approx(8**0.5 * float(STD), rel=0.1)


def test_calls_of_one_kind_are_looked_at_once():
    model, x = converted(Flag()), torch.ones(4, 32, 8)
    seen = []
    model.linear.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[0]))
    with torch.no_grad(), svdc.sampling(model):
        for _ in range(3):
            model(x)
        for _ in range(3):
            model(x, tokens=True)
    assert seen == [2, 3, 4, 4, 4, 2, 3, 4, 4, 4]
