"""The precision in which ways to a size are compared: that of the recovery, and only there."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from test_ways import data_of, narrow, ways_of
from torch import nn

from svdcompress.layers import variational_layers
from svdcompress.pipeline import _choose_masks, estimate
from svdcompress.pipeline._choose_masks import chosen, chosen_for, compared_on, option
from svdcompress.pipeline._estimate import CHOSEN
from svdcompress.pipeline._levels import COOLING_EPOCHS, epochs_of
from svdcompress.pipeline._way import Way
from svdcompress.recipe import load_recipe
from svdcompress.relevance import as_masks


def cut(model: nn.Module) -> Way:
    masks = {name: torch.ones_like(layer.weight, dtype=torch.bool) for name, layer in variational_layers(model)}
    first = next(iter(masks))
    masks[first][1:3] = False
    return Way("even", as_masks(model, masks), 9.0, None, 9.0)


def by_hand(model: nn.Module, way: Way, x: torch.Tensor) -> nn.Sequential:
    """Plain layers with the masked means."""
    layers: list[nn.Module] = []
    for name, layer in variational_layers(model):
        plain = nn.Linear(layer.weight.shape[1], layer.weight.shape[0])
        with torch.no_grad():
            plain.weight.copy_(layer.weight * way.masks[name])
            plain.bias.copy_(layer.bias)
        layers += [plain, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


@pytest.mark.parametrize("pruned", [False, True])
def test_ways_are_judged_as_plain_layers_in_that_precision(pruned: bool) -> None:
    model = narrow()
    data, x, y = data_of(model, 4)
    way = cut(model)
    small = (lambda masks: by_hand(model, way, x)) if pruned else None
    exact, lower = (option(model, way, data.train, data, "cpu", None, None, small, how) for how in ("no", "bf16"))
    plain = by_hand(model, way, x)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        wanted = nn.functional.cross_entropy(plain(x).float(), y, reduction="none")
    torch.testing.assert_close(lower.rows.float(), wanted, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(exact.rows.float(), nn.functional.cross_entropy(plain(x), y, reduction="none"))
    assert exact.nll != lower.nll == pytest.approx(exact.nll, rel=0.02)
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_all_ways_are_judged_in_it(monkeypatch: pytest.MonkeyPatch, precision: str) -> None:
    model, given = narrow(), []
    data, x, _ = data_of(model, 4)
    monkeypatch.setattr(_choose_masks, "option", lambda *all, real=option: given.append(all[-1]) or real(*all))
    way, _ = chosen(ways_of(model, x, "macs", 52.0, enough=False), data, "auto", "cpu", precision=precision)
    assert len(given) > 2 and set(given) == {precision}
    assert way.name == chosen(ways_of(model, x, "macs", 52.0, enough=False), data, "auto", "cpu")[0].name


@pytest.mark.parametrize(
    ("setting", "fast", "precision"), [("bf16", False, "bf16"), ("auto", True, "bf16"), ("auto", False, "no")]
)
def test_it_is_that_of_the_recovery(monkeypatch: pytest.MonkeyPatch, setting: str, fast: bool, precision: str) -> None:
    monkeypatch.setattr("svdcompress.train._device.fast_bfloat16", lambda device: fast)
    found: list[Any] = []
    monkeypatch.setattr(_choose_masks, "chosen", lambda *given: found.append(given[-1]))
    recipe = load_recipe(None, [f"recover.precision={setting}", "train.precision=no"])
    context: Any = Mock(recipe=recipe, place=SimpleNamespace(device=torch.device("cpu")))
    to_size: Any = SimpleNamespace(model=nn.Linear(2, 2), opened=SimpleNamespace(inputs=torch.randn(3, 2)))
    data: Any = SimpleNamespace(train=range(10))
    chosen_for(context, data, to_size)
    monkeypatch.setattr(_choose_masks, "is_right", lambda *given: False)
    chosen_for(context, data, to_size)  # a CPU that computes it wrong
    assert found == [precision, "no"]


def test_a_plan_counts_the_choice_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str] = []

    def forward(model: Any, data: Any, recipe: Any, device: Any, precision: str = "no") -> float:
        given.append(precision)
        return 0.01 if precision == "no" else 0.001

    monkeypatch.setattr("svdcompress.pipeline._estimate._forward_seconds", forward)
    monkeypatch.setattr("svdcompress.pipeline._estimate._epoch_seconds", lambda *given, **more: 1.0)
    found = {}
    for precision in ("no", "bf16"):
        more = ["search.goal='macs=2x'", "search.trials=2", f"recover.precision={precision}"]
        found[precision] = estimate(load_recipe("digits", more))
    saved = found["no"].seconds["search"] - found["bf16"].seconds["search"]
    count = compared_on(found["no"].examples["train"], epochs_of(load_recipe("digits", []).train, COOLING_EPOCHS))
    assert given == ["no", "no", "bf16"]
    assert saved == pytest.approx(2 * CHOSEN * 0.009 * count)
