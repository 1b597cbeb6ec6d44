"""A size far from what pressure alone reached: what is cut by rank alone is reported, with settings for more pressure."""

from dataclasses import replace

import pytest
from quick_search import Path, Quick

from svdcompress.pipeline import _search
from svdcompress.pipeline._search_words import cut_by_rank, told_size
from svdcompress.recipe import load_recipe


@pytest.fixture(autouse=True)
def no_doubts(monkeypatch):
    monkeypatch.setattr(_search, "doubts", lambda *given: [])


class Flat(Path):
    """A path whose pressure removes almost nothing."""

    def climb(self, level):
        row = super().climb(level)
        row["nonzero"] = 1000 / 1.02**level
        return row


class Stubborn(Quick):
    def _trial(self, pressure, target):
        super()._trial(pressure, target)
        self.kept.trials[-1] = replace(self.kept.trials[-1], natural=1.1)


@pytest.mark.parametrize(("goal", "said"), [("nonzero=4x", True), ("nonzero=1.15x", False)])
def test_what_is_cut_by_rank_alone_is_said(tmp_path, goal, said):
    search = Stubborn(tmp_path, f"search.goal={goal}", "search.trials=1", "search.levels=4", "train.epochs=7", path=Flat(4))
    search.run()
    lines = [line for line in search.warned if "by rank alone" in line]
    assert bool(lines) == said
    if said:
        assert "1.1x fewer non-zeros by itself" in lines[0] and "to 4x" in lines[0]
        assert "--set search.levels=7, --epochs 14" in lines[0] and lines[0] in search.context.results.search["notes"]


@pytest.mark.parametrize(
    ("natural", "said"),
    [
        (1.004, "has no fewer non-zeros by itself; all the way to 4x"),
        (1.1, "has 1.1x fewer non-zeros by itself; the rest of the way"),
    ],
)
def test_a_model_that_pressure_left_as_it_was_has_no_fewer(tmp_path, natural, said):
    search = Stubborn(tmp_path, "search.goal=nonzero=4x", "search.trials=1", "search.levels=3", path=Flat(3))
    best = replace(search.run(), natural=natural)
    (line,) = cut_by_rank(best, 3, load_recipe(None, ["search.levels=3"]).search, "non-zeros", "4x", 5, 3)
    assert said in line


def test_a_posterior_of_the_right_size_is_not_complained_of(tmp_path):
    search = Quick(tmp_path, "search.goal=nonzero=4x", "search.trials=2")
    search.run()
    assert not [line for line in search.warned if "by rank alone" in line]


def test_where_accuracy_ended_the_path_more_levels_are_no_cure(tmp_path):
    search = Stubborn(tmp_path, "search.goal=nonzero=4x", "search.trials=1", "search.levels=3", path=Flat(3))
    best = search.run()
    settings = load_recipe(None, ["search.levels=6"]).search
    (line,) = cut_by_rank(best, 3, settings, "non-zeros", "4x", 5, 6)
    assert "search.levels" not in line and "--epochs 10" in line
    assert cut_by_rank(best, 9, settings, "non-zeros", "4x", 5, 6) == []  # far below the path.s end: its own choice
    assert cut_by_rank(replace(best, pressure=8.0), 9, settings, "non-zeros", "4x", 5, 6) != []  # the path's last step


def test_cuts_in_few_steps_are_said_with_what_makes_more_of_them(tmp_path):
    search = Stubborn(tmp_path, "search.goal=nonzero=4x", "search.trials=1", "search.levels=3", path=Flat(3))
    best = search.run()
    settings = load_recipe(None, ["search.levels=3"]).search
    (line,) = cut_by_rank(best, 3, settings, "parameters", "4x", 7, 3, steps=2)
    assert "by rank alone in 2 steps (one per epoch, at most 8: search.cuts)" in line
    assert "--epochs 14" in line and "search.levels" not in line
    assert cut_by_rank(best, 3, settings, "parameters", "4x", 14, 3, steps=4) == []


def test_the_size_is_the_one_that_was_reached_in_its_own_unit_and_by_its_way(tmp_path):
    search = Stubborn(tmp_path, "search.goal=nonzero=4x", "search.trials=1", "search.levels=3", path=Flat(3))
    best = replace(search.run(), mixture={"chosen": "branches", "usual": "global"}, pressure=-7.0)
    settings = load_recipe(None, ["search.levels=3"]).search
    reached = told_size(2.449, "latency", "multiply-accumulates")
    assert reached == "2.45x faster" and told_size(3.0, "macs", "multiply-accumulates") == "3x"
    (line,) = cut_by_rank(best, 3, settings, "multiply-accumulates", reached, 5, 3)
    assert "all the way to 2.45x faster was cut by rank alone (mixture branches). " in line
