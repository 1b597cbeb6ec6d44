"""If pressure hardly removes a unit within a run's epochs, a trial starts without it, from the dense weights."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from test_cool import SHAPES, Seen
from test_search import searching

from svdcompress import checkpoint
from svdcompress.errors import Interrupted
from svdcompress.pipeline import _search, _trainer, run
from svdcompress.pipeline._path import UNPRESSED
from svdcompress.pipeline._search import Search
from svdcompress.pipeline._search_words import cut_by_rank
from svdcompress.recipe import load_recipe
from svdcompress.search import Trial
from svdcompress.selection import Ranking

LIGHT = (*SHAPES, "train.beta={final: 1.0e-6}", "search.levels=2")


class Ranked:
    """Whether each ranking used examples: its scores are then not the information alone."""

    def __init__(self, patch):
        self.by_outputs = []
        made = Ranking.__init__

        def noting(ranking, *given, **others):
            made(ranking, *given, **others)
            self.by_outputs.append(not np.array_equal(ranking._score, ranking._information))

        patch.setattr(Ranking, "__init__", noting)


@pytest.fixture(scope="module")
def light(tiny_recipe, tmp_path_factory):
    out = tmp_path_factory.mktemp("light") / "run"
    with pytest.MonkeyPatch.context() as patch:
        seen, ranked = Seen(patch), Ranked(patch)
        results = run(searching(tiny_recipe, *LIGHT), out)
    return seen, ranked, out, results


def test_it_begins_from_the_dense_weights_and_ranks_by_the_outputs(light):
    seen, ranked, out, results = light
    (trial,) = results["search"]["trials"]
    assert trial["pressure"] == UNPRESSED and trial["beta"] == pytest.approx(1e-6 / 1024)
    dense = load_file(out / "dense.safetensors")
    assert all(torch.equal(weight, dense[f"{name}.weight"]) for name, weight in seen.before[0].items())
    assert ranked.by_outputs[:2] == [False, False]  # for units that must stay, and for the least size
    assert all(ranked.by_outputs[2:]) and len(ranked.by_outputs) >= 5
    assert len(seen.sizes) == 3 and results["search"]["reached"] is True


def test_it_is_said_in_the_report(light):
    *_, results = light
    assert sum("pressure removes hardly any unit" in note for note in results["notes"]) == 1


def test_a_search_of_single_weights_keeps_no_start(tiny_recipe, tmp_path, monkeypatch):
    kept = []
    save = checkpoint.save
    monkeypatch.setattr(
        checkpoint, "save", lambda model, path, **more: kept.append(Path(path).name) or save(model, path, **more)
    )
    run(searching(tiny_recipe, "search.goal=nonzero=4x", "search.trials=1", "search.levels=1"), tmp_path / "run")
    assert "level-1.safetensors" in kept and "level-0.safetensors" not in kept


def test_no_further_level_is_climbed_for_one_trial(light):
    *_, results = light
    assert [row["level"] for row in results["search"]["path"]] == [1.0]


def test_few_steps_without_pressure_are_said(light):
    *_, results = light
    best = Trial(**results["search"]["trials"][0])
    (line,) = cut_by_rank(best, 1, load_recipe(None, []).search, "parameters", "4x", 6, 1, steps=2)
    assert "pressure removes hardly any parameters" in line and "by rank alone in 2 steps" in line and "--epochs 12" in line
    assert cut_by_rank(best, 1, load_recipe(None, []).search, "parameters", "4x", 13, 1, steps=4) == []


@pytest.mark.parametrize(("recovery", "cure"), [(0, "Epochs of recovery (--set recover.epochs=10)"), (24, "epochs=48)")])
def test_more_epochs_of_recovery_are_more_than_it_had(light, recovery, cure):
    *_, results = light
    best = Trial(**results["search"]["trials"][0])
    (line,) = cut_by_rank(best, 1, load_recipe(None, []).search, "parameters", "4x", 0, 1, recovery=recovery)
    assert cure in line and line.endswith("regain accuracy")


def test_recovery_has_the_noise_of_the_first_level(light, tiny_recipe, tmp_path, monkeypatch):
    """The trial's variances had no pressure to learn from; recovery uses 0.05 times the beta of level 1."""
    told = {}
    fit = _trainer.Trainer.fit

    def noting(trainer, model, stage, *given, schedule=None, **others):
        told[stage] = None if schedule is None else schedule(10.0)
        return fit(trainer, model, stage, *given, schedule=schedule, **others)

    monkeypatch.setattr(_trainer.Trainer, "fit", noting)
    run(searching(tiny_recipe, *LIGHT, "recover.beta=auto"), tmp_path / "run")
    assert told["trial 1"] == pytest.approx(0.05 * 1e-6 / 4)


def test_a_stop_ends_in_the_same_bytes(light, tiny_recipe, tmp_path, monkeypatch):
    *_, whole, _ = light

    def stop(self, row):
        if row["stage"].endswith(", part 2"):
            self.context.stop.signal = "SIGTERM"

    with monkeypatch.context() as patched:
        patched.setattr(_trainer.Trainer, "_log", stop)
        with pytest.raises(Interrupted):
            run(searching(tiny_recipe, *LIGHT), tmp_path / "run")
    run(searching(tiny_recipe, *LIGHT), tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


@pytest.mark.parametrize(("natural", "more", "unpressed"), [(1.15, 0, True), (1.25, 0, False), (1.15, -1, False)])
def test_a_tenth_of_the_way_is_pressure_enough_and_so_are_many_steps(
    light, tiny_recipe, tmp_path, monkeypatch, natural, more, unpressed
):
    """A tenth of 6x in logarithms is 1.196x; from there on, or with more steps per level, pressure is used as usual."""
    ranked = Ranked(monkeypatch)
    recipe = searching(tiny_recipe, *SHAPES)
    epochs = max(1, round(0.15 * recipe.train.epochs))
    steps = epochs * math.ceil(light[-1]["examples"]["train"] / recipe.train.batch_size)
    monkeypatch.setattr(_search, "FEW", steps + 1 + more)
    monkeypatch.setattr(Search, "_natural", lambda search, row: natural)
    (trial,) = run(recipe, tmp_path / "run")["search"]["trials"]
    assert (trial["pressure"] == UNPRESSED) is any(ranked.by_outputs) is unpressed
