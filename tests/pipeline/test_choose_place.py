"""Where the choice of what to remove runs: ways are judged on the run's device, but sizes are measured on the CPU, because
pruning and export get their inputs there."""

from contextlib import contextmanager

import pytest
import torch
from test_ways import data_of, half_useful, narrow, ways_of
from torch import nn

from svdcompress.convert import convert
from svdcompress.errors import PruneError
from svdcompress.layers import variational_layers
from svdcompress.pipeline import _choose_masks
from svdcompress.pipeline._choose_masks import chosen, option
from svdcompress.pipeline._measure import Measure
from svdcompress.pipeline._way import Way
from svdcompress.relevance import as_masks
from svdcompress.sources import InMemory


def test_the_model_is_on_the_cpu_where_a_size_is_measured(monkeypatch) -> None:
    """A flag stands in for another device."""
    data, x, _ = data_of(model := narrow(), 4)
    to_size, away, seen = ways_of(model, x, "latency", 0.5), [], []

    @contextmanager
    def there(device, model):
        away.append(device)
        yield
        away.pop()

    def of_small(measure, small, dense):
        seen.append(bool(away))
        left = sum(layer.weight.numel() for _, layer in variational_layers(small))
        return {"macs": left, "parameters": left, "latency": left / 112}

    monkeypatch.setattr(_choose_masks, "there", there)
    monkeypatch.setattr(Measure, "of_small", of_small)
    taken = iter([True, False])
    best = _choose_masks.best_option
    monkeypatch.setattr(_choose_masks, "best_option", lambda options: options[-1] if next(taken, False) else best(options))
    judged = []
    monkeypatch.setattr(_choose_masks, "option", lambda *given, real=option: judged.append(bool(away)) or real(*given))
    to_size.usual()
    before = len(seen)
    chosen(to_size, data, "auto", "cpu")
    assert len(seen) > before and not any(seen) and len(judged) > 2 and all(judged)


def test_a_way_that_cannot_be_pruned_is_not_taken(monkeypatch) -> None:
    _, x, _ = data_of(model := half_useful(), 12)
    to_size = ways_of(model, x, "latency", 0.45)
    masks = as_masks(
        model, {name: torch.ones_like(layer.weight, dtype=torch.bool) for name, layer in variational_layers(model)}
    )

    def refused(*given, **more):
        raise PruneError("two heads are needed")

    monkeypatch.setattr("svdcompress.pipeline._unit_ways.prune", refused)
    assert to_size.fitted(Way("even", masks, None, None, 40.0), Way("global", masks, 0.4, None, 40.0)) is None


def test_normalisation_and_removed_inputs_are_judged_alike() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 2))
    x = torch.randn(300, 3, 6, 6)
    with torch.no_grad():
        net.train()(x)
    model = convert(net, log_sigma2=-40.0).eval()
    y = model(x).argmax(1)
    masks = {name: torch.ones_like(layer.weight, dtype=torch.bool) for name, layer in variational_layers(model)}
    masks["0"][:5], masks["0"][:, 1], masks["4"][:, : 5 * 16] = False, False, False
    data, _, _ = data_of(half_useful(), 12)
    data.train = InMemory(x, y)
    to_size = ways_of(model, x, "macs", 100)
    to_size.pruning["remove_inputs"] = True
    way, found = Way("even", as_masks(model, masks), 9.0, None, 9.0), []

    def small(left):
        found.append(to_size.small(left))
        return found[-1]

    one, other = (option(model, way, data.train, data, "cpu", None, None, how) for how in (small, None))
    assert one.nll == pytest.approx(other.nll, rel=1e-5)
    assert next(iter(found[0].parameters())).shape[:2] == (3, 2)  # of eight channels and three inputs
