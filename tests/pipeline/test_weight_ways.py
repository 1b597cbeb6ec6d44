"""Ways to a number of non-zeros: the search for a threshold, and for mixtures of the same size."""

from __future__ import annotations

import pytest
import torch
from test_ways import ways_of
from torch import Tensor, nn

from svdcompress import cost
from svdcompress.convert import convert
from svdcompress.layers import variational_layers
from svdcompress.pipeline._weight_ways import HIGHEST, LOWEST, STEPS
from svdcompress.prune import prune


def sure(log_sigma2: float) -> tuple[nn.Module, Tensor]:
    """A model whose weights are all different, and have log alpha about `log_sigma2` + 1; and inputs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    with torch.no_grad():
        for layer in (model[0], model[2]):
            layer.weight.mul_(3)  # type: ignore
    return convert(model, share="weight", log_sigma2=log_sigma2).eval(), torch.randn(30, 8)


@pytest.mark.parametrize("log_sigma2", [-5.0, -15.0, -20.0, -60.0])
def test_weights_that_are_known_very_well_go_too(log_sigma2: float) -> None:
    """The search for a threshold ended at -12, so 295 weights stayed where 60 were asked for."""
    model, x = sure(log_sigma2)
    to_size = ways_of(model, x, "nonzero", 60.0)
    way = to_size.usual()
    small = prune(model, x[:20], masks=way.masks)
    assert 0.9 * 60 <= way.size <= 60 and cost.measure(small, x[:2]).nonzero == way.size  # type: ignore
    alphas = torch.cat([layer.log_alpha().flatten() for _, layer in variational_layers(model)])
    assert alphas.min() < way.asked < 0 and way.masks.kept == int((alphas < way.asked).sum())  # type: ignore
    assert all(other.size <= way.size for other in to_size.others_than(way))  # type: ignore


@pytest.mark.parametrize(("log_sigma2", "more"), [(-5.0, 0), (-20.0, 1), (-80.0, 2)])
def test_a_wider_search_is_as_precise(log_sigma2: float, more: int) -> None:
    model, x = sure(log_sigma2)
    low, steps = ways_of(model, x, "nonzero", 60.0).start  # type: ignore
    assert steps == STEPS + more and (HIGHEST - low) / 2**steps == (HIGHEST - LOWEST) / 2**STEPS


def test_weights_without_variance_do_not_count_for_the_bound() -> None:
    model, x = sure(-5.0)
    with torch.no_grad():
        model[0].log_sigma2[0, 0] = -torch.inf  # type: ignore
    assert ways_of(model, x, "nonzero", 60.0).start == (LOWEST, STEPS)  # type: ignore


def test_mixtures_are_as_large_as_the_usual_way() -> None:
    """Each was made four times, as if one weight were one non-zero: `units-100%` had 530 of 999, and lost by its size."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for size in ((64, 100), (100, 50), (50, 10)):
        layers += [nn.Linear(*size), nn.BatchNorm1d(size[1]), nn.ReLU()]
        with torch.no_grad():
            drawn = torch.distributions.Laplace(0.0, 0.1).sample((size[1], size[0]))
            layers[-3].weight.copy_(drawn * 2 * torch.rand(size[1], 1))  # type: ignore
    model = convert(nn.Sequential(*layers[:-2]), share="weight", log_sigma2=-8.0).eval()
    to_size = ways_of(model, torch.randn(30, 64), "nonzero", 1000.0)
    usual = to_size.usual()
    others = {way.name: way.size for way in to_size.others_than(usual)}
    assert set(others) == {"units-25%", "units-50%", "units-100%"}
    assert all(0.9 * usual.size <= size <= usual.size for size in others.values()), others  # type: ignore
