"""The model that a search writes is the one of its chosen trial, by the error on the validation data."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from test_search import searching
from torch import nn

from svdcompress.pipeline import run
from svdcompress.pipeline._as_chosen import other_than_chosen
from svdcompress.pipeline._search import Search
from svdcompress.sources import InMemory

NOT_AS = "the model that was written is not as the chosen trial"


def told(name, stored, found, **calibrated):
    trials = [{"number": 1, "metrics": {name: 0.0}}, {"number": 2, "metrics": {name: stored}}]
    search = {"chosen": 2, "trials": trials}
    results = SimpleNamespace(search=search, sparse=SimpleNamespace(validation={name: found}), calibrate=calibrated)
    part = InMemory(torch.zeros(1000, 1), torch.ones(1000))
    data = SimpleNamespace(validation=part, test=part, target_scale=None)
    return other_than_chosen(results, data)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "near", "far"), [("error", 4.2, 4.3), ("rmse", 4.03, 4.05)])
def test_what_rounding_does_not_explain_is_told(name, near, far):
    assert told(name, 4.0, 4.0) is None and told(name, 4.0, near) is None
    line = told(name, 4.0, far)
    assert line is not None and line.startswith(f"{NOT_AS} 2 was: ") and f"{far:.4g}" in line
    assert told(name, 4.0, far, posterior="refit") is None and told(name, 4.0, far, posterior="variational") is not None


def test_without_a_search_or_figures_there_is_nothing_to_compare():
    for search, found in ((None, {"error": 3.0}), ({"chosen": 1}, None)):
        results = SimpleNamespace(search=search, sparse=SimpleNamespace(validation=found), calibrate=None)
        assert other_than_chosen(results, None) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("harmed", [False, True])
def test_a_search_that_writes_another_model_says_so(tiny_recipe, tmp_path, monkeypatch, harmed):
    once = Search._found

    def found(self, best):
        made = once(self, best)
        if harmed:
            with torch.no_grad():
                last = [module for module in made.small.model.modules() if isinstance(module, nn.Linear)][-1]
                last.weight.neg_()
        return made

    monkeypatch.setattr(Search, "_found", found)
    recipe = searching(tiny_recipe, "search.goal=nonzero=2x", "search.levels=1", "search.trials=1")
    results = run(recipe, tmp_path / "run")
    assert any(line.startswith(NOT_AS) for line in results["warnings"]) == harmed
    assert "the chosen trial" not in (results.get("failed") or {})
