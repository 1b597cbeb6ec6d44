"""Which stages are compiled: those whose section says so, in a search too (where `train.compile` used to have no effect)."""

import pytest
import torch
from test_search import searching

from svdcompress.layers import variational_layers
from svdcompress.pipeline import run

SEARCH = ("search.goal='parameters=3x'", "search.trials=1", "search.levels=1", "search.reconstruct=off")


@pytest.fixture
def compiled(monkeypatch):
    """The modules passed to torch.compile, which returns them unchanged."""
    found = []
    monkeypatch.setattr(torch, "compile", lambda what, **more: found.append(what) or what)
    return found


def kinds(compiled):
    """converted: a student that learns its variances or recovers; dense: a dense student or the teacher."""
    models = [what for what in compiled if isinstance(what, torch.nn.Module)]
    return ["converted" if list(variational_layers(model)) else "dense" for model in models]


def test_nothing_is_compiled_unless_asked_for(tiny_recipe, tmp_path, compiled):
    run(searching(tiny_recipe, *SEARCH), tmp_path / "run")
    assert not compiled


def test_fine_tuning_in_a_search_is_compiled(tiny_recipe, tmp_path, compiled):
    results = run(searching(tiny_recipe, *SEARCH, "train.compile=true"), tmp_path / "run")
    stages = {row["stage"] for row in results["history"]}
    parts = [name for name in stages if name != "dense" and not name.startswith("trial")]  # a trial's own rows are its recovery
    assert len(parts) == 2 and kinds(compiled) == ["converted"] * len(parts)


def test_the_dense_model_is_compiled(tiny_recipe, tmp_path, compiled):
    run(searching(tiny_recipe, *SEARCH, "dense.compile=true"), tmp_path / "run")
    assert kinds(compiled) == ["dense"]


def test_recovery_is_compiled_with_its_teacher(tiny_recipe, tmp_path, compiled):
    run(searching(tiny_recipe, *SEARCH, "recover.compile=true", "recover.distill={weight: 0.5}"), tmp_path / "run")
    assert sorted(kinds(compiled)) == ["converted", "dense"]
