"""The table of operators: how it is filled, and what happens if a handler refuses or has a bug."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from svdcompress.convert import convert
from svdcompress.prune import prune
from svdcompress.prune._operators import HANDLERS, HandlerBug, Unfollowed, _registry, operator


@pytest.fixture
def relu(monkeypatch):
    """Replace ReLU's handler."""

    def replace(error: BaseException) -> None:
        def handler(trace, name, args, kwargs, out):
            raise error

        known = _registry.Operator(handler)
        monkeypatch.setitem(_registry.OPERATORS, "relu", known)

    return replace


@pytest.fixture
def as_users_have_it(monkeypatch):
    monkeypatch.setattr(_registry, "_raising", False)


def _pruned() -> Any:
    torch.manual_seed(0)
    model = convert(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))).eval()
    with torch.no_grad():
        model[0].log_sigma2[:3] = 20.0
        model[2].log_sigma2[:2] = 20.0
    x = torch.randn(5, 4)
    small = prune(model, x)
    assert torch.allclose(small(x), model(x), atol=1e-6)
    return small


def test_a_handlers_bug_fails_the_tests(relu):
    relu(KeyError("places"))
    with pytest.raises(HandlerBug, match="handler, which follows relu: KeyError: 'places'"):
        _pruned()


def test_a_handlers_bug_costs_users_its_units_alone_and_is_told(relu, as_users_have_it):
    relu(KeyError("places"))
    small = _pruned()
    assert (small[0].out_features, small[2].out_features) == (8, 4)
    (note,) = small.pruning.notes
    assert "enter relu in 1 are kept" in note and "bug" in note and "KeyError: 'places'" in note


def test_a_refusal_is_no_bug(relu):
    relu(Unfollowed())
    small = _pruned()
    assert (small[0].out_features, small[2].out_features) == (8, 4) and small.pruning.notes == []
    assert "enters relu" in small.pruning.groups[0].reason


def test_a_handler_of_a_test_file_is_all_that_an_operator_needs(monkeypatch):
    """`cosh` is pointwise by torch's tag; a handler by name takes precedence."""
    monkeypatch.setattr(_registry, "OPERATORS", dict(_registry.OPERATORS))
    seen = []

    @operator("relu")
    def mine(trace, name, args, kwargs, out):
        seen.append(name)
        trace.put(out, dataclasses.replace(trace.of(args[0])))

    assert _pruned()[0].out_features == 5 and seen


def test_an_operator_has_one_handler():
    with pytest.raises(ValueError, match="mm has two handlers: mm and other"):

        @operator("mm")
        def other(trace, name, args, kwargs, out): ...


def test_every_file_with_handlers_is_asked():
    folder = Path(_registry.__file__).parent
    filling = {file.stem for file in folder.glob("*.py") if "\n@operator(" in file.read_text(encoding="utf-8")}
    assert filling == {module.__name__.rpartition(".")[2] for module in HANDLERS}
