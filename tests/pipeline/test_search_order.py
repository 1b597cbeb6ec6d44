"""A search's decisions: the same after any stop, within its time, and what it reports when the time is up."""

import itertools
import time

import pytest
from quick_search import Killed, Path, Quick, asked_for

from svdcompress.errors import CheckpointError
from svdcompress.pipeline import _search
from svdcompress.pipeline._search_kept import Kept


@pytest.fixture(autouse=True)
def no_doubts(monkeypatch):
    monkeypatch.setattr(_search, "doubts", lambda *given: [])


@pytest.fixture
def clock(monkeypatch):
    """Time passes only when a test says so."""
    passed = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: 60 * passed[0])
    return passed


BOTH = ("search.goal='nonzero=40x'", "search.max_drop=0.5")


@pytest.mark.parametrize(
    "settings",
    [
        BOTH,
        (*BOTH, "search.trials=20"),
        ("search.goal='nonzero=40x'", "search.max_drop=0.3", "search.trials=20"),
        ("search.max_drop=0.5", "search.trials=20"),
        ("search.goal='nonzero=40x'", "search.trials=20"),
    ],
)
def test_a_search_killed_after_each_of_its_trials_makes_the_same_ones(tmp_path, settings):
    whole = Quick(tmp_path / "whole", *settings)
    best = whole.run()
    count = len(whole.kept.trials)
    assert count >= 3
    again = Quick(tmp_path / "killed", *settings, kill=1)
    for number in range(1, count + 1):
        with pytest.raises(Killed):
            again.run()
        assert len(again.kept.trials) == number
        again = Quick(tmp_path / "killed", *settings, kill=1)
    assert again.run() == best and again.made == 0
    assert asked_for(again.kept.trials) == asked_for(whole.kept.trials)
    for every in (2, 3):
        folder = tmp_path / f"every-{every}"
        for _ in range(count):
            try:
                found = Quick(folder, *settings, kill=every)
                assert found.run() == best
                break
            except Killed:
                continue
        assert asked_for(found.kept.trials) == asked_for(whole.kept.trials)


def test_a_search_whose_trials_were_fewer_goes_on_from_them(tmp_path):
    """The trials it has are an answer, whatever would be requested now."""
    Quick(tmp_path, *BOTH, "search.trials=3").run()
    more = Quick(tmp_path, *BOTH, "search.trials=6")
    before = list(more.kept.trials)
    more.run()
    assert more.kept.trials[: len(before)] == before and len(before) < len(more.kept.trials) <= 6
    fewer = Quick(tmp_path, *BOTH, "search.trials=1")
    fewer.run()
    assert fewer.made == 0


# Its path


@pytest.mark.parametrize("probabilities", [True, False])
@pytest.mark.parametrize("dense", [0.0, 0.1])
def test_without_a_budget_no_error_ends_the_path(tmp_path, probabilities, dense):
    """The levels' errors are 2.2 to 8.4, which is any number of times the RMSE on a model's own answers."""
    search = Quick(tmp_path, "search.goal='nonzero=60x'")
    search.judge(dense, probabilities)
    search.run()
    assert len(search.path.rows) == 6


@pytest.mark.parametrize(("budget", "levels"), [("max_error=3", 6), ("max_error=0.5", 5), ("max_drop=5", 1)])
def test_the_rmse_of_a_level_ends_the_path_if_it_is_far_beyond_the_budget(tmp_path, budget, levels):
    """Beyond 29.1, 4.1 and 0.2, where the dense RMSE is 0.1: 10 times what may be lost, or at least that RMSE."""
    search = Quick(tmp_path, f"search.{budget}", "search.trials=1")
    search.judge(0.1, False)
    search.run()
    assert len(search.path.rows) == levels


# Its number of trials


@pytest.mark.parametrize(
    ("train", "recover", "levels", "trials"),
    [(100, 20, 6, 5), (45, 20, 6, 4), (20, 100, 6, 3), (7, 10, 6, 3), (1, 1, 6, 1), (100, 0, 6, 7), (100, 0, 1, 8)],
)
def test_without_a_number_a_search_trains_three_times_a_run_at_most(tmp_path, train, recover, levels, trials):
    settings = ("search.max_drop=0.5", f"train.epochs={train}", f"recover.epochs={recover}", f"search.levels={levels}")
    search = Quick(tmp_path, *settings)
    level, cooling = max(1, round(0.15 * train)), max(1, round(0.3 * train))
    path = levels * level
    assert search.trials == trials
    assert path + trials * (cooling + recover) <= max(3 * (train + recover), path + cooling + recover)  # there is always one
    assert path + (trials + 1) * (cooling + recover) > 3 * (train + recover) or trials == 8  # the maximum


def test_a_search_that_would_have_gone_on_says_so_where_no_number_was_set(tmp_path):
    few = Quick(tmp_path / "few", "search.max_drop=0.5", "train.epochs=20", "recover.epochs=100")
    few.run()
    assert len(few.kept.trials) == 3
    (said,) = [line for line in few.said if "times the epochs of one run" in line]
    assert "no more than 3 trials fit into 3 times the epochs of one run; --trials 6 tries more" in said
    settings = (("search.max_drop=0.5", "search.trials=3"), ("search.max_drop=0.5", "search.trials=20"))
    reached = ("search.goal='nonzero=1.2x'", "search.max_drop=9")  # half of the trials, and no reason for more
    for number, more in enumerate((*settings, reached)):
        other = Quick(tmp_path / str(number), "train.epochs=20", "recover.epochs=100", *more)
        other.run()
        assert not any("times the epochs" in line for line in other.said)
    one = Quick(tmp_path / "one", "search.max_drop=0.5", "train.epochs=1", "recover.epochs=1")
    one.run()
    assert len(one.kept.trials) == 1
    (said,) = [line for line in one.said if "times the epochs of one run" in line]
    assert "no more than 1 trial fit" in said and "--trials 2 tries more" in said


# Its time


def test_the_time_of_the_path_counts(tmp_path, clock):
    def minute():
        clock[0] += 1

    search = Quick(tmp_path, "search.max_drop=0.5", "search.max_minutes=1.5", path=Path(takes=minute))
    search.run()
    assert len(search.path.rows) == 2 and len(search.kept.trials) == 1  # there is always one trial


@pytest.mark.parametrize("settings", ["search.max_drop=0.5", "search.goal='nonzero=40x'"])
def test_if_nothing_is_left_when_the_time_is_up_there_is_one_more_trial_with_less_pressure(tmp_path, clock, settings):
    def minute():
        clock[0] += 1

    found = []
    for collapses in (1, 5):
        search = Quick(tmp_path / str(collapses), settings, "search.max_minutes=1.5", path=Path(takes=minute))
        search.collapses = collapses
        best = search.run()
        (first, _), (second, _) = [(trial.pressure, trial.empty) for trial in search.kept.trials]
        assert second < first and "2 of at most" in " ".join(search.warned)
        found.append((best.number, best.empty))
    assert found == [(2, False), (1, True)]  # the model that is left; and no trial after the second


def test_the_time_of_all_sittings_counts(tmp_path, clock):
    """Including one that was interrupted in the middle of a trial."""

    def minute():
        clock[0] += 1

    def broken():
        minute()
        if clock[0] > 7.5:  # six levels, a trial, and part of the second
            raise Killed

    with pytest.raises(Killed):
        Quick(tmp_path, "search.max_drop=0.5", "search.max_minutes=9.5", path=Path(takes=broken)).run()
    assert Quick(tmp_path).kept.seconds == 60 * clock[0] == 480
    search = Quick(tmp_path, "search.max_drop=0.5", "search.max_minutes=9.5", path=Path())
    clock[0] += 1  # the path is loaded
    best = search.run()
    assert len(search.kept.trials) >= 2 and best in search.kept.trials
    again = Quick(tmp_path, "search.max_drop=0.5", "search.max_minutes=8.5", path=Path())
    count = len(again.kept.trials)
    again.run()
    assert len(again.kept.trials) == count  # 9 minutes have already been spent


def test_time_that_is_up_is_said_with_what_would_have_been_tried(tmp_path, clock):
    def minute():
        clock[0] += 1

    settings = ("search.max_drop=0.5", "search.trials=20")
    whole = Quick(tmp_path / "whole", *settings)
    whole.run()
    assert not any("time" in line for line in whole.warned)
    search = Quick(tmp_path / "short", *settings, "search.max_minutes=7.5", path=Path(takes=minute))
    best = search.run()
    assert asked_for(search.kept.trials) == asked_for(whole.kept.trials)[:2] and best in search.kept.trials
    pressure, size = asked_for(whole.kept.trials)[2]
    (line,) = [line for line in search.warned if "time" in line]
    for part in ("search.max_minutes=7.5", "8 minutes", "2 of at most 20 trials", f"{1000 / size:.3g}x fewer non-zeros"):
        assert part in line, (part, line)
    assert f"beta {search.path.beta(pressure):.3g}" in line and "larger --max-minutes" in line
    assert "levels" not in line  # the path was complete
    assert line in search.context.results.search["notes"]
    cut = Quick(tmp_path / "cut", *settings, "search.max_minutes=1.5", path=Path(takes=minute))
    cut.run()
    assert "2 of 6 levels of pressure" in " ".join(cut.warned)


def test_time_that_is_up_when_nothing_is_left_to_try_is_not_said(tmp_path, clock):
    search = Quick(tmp_path, "search.max_drop=0.5", "search.trials=2", "search.max_minutes=7")
    ticks = itertools.count()
    search.path.takes = lambda: clock.__setitem__(0, float(next(ticks)))
    search.run()
    assert len(search.kept.trials) == 2 and clock[0] >= 7
    assert not any("time" in line for line in search.warned)


@pytest.mark.parametrize("minutes", [6.5, 1000])
def test_time_that_is_up_before_the_best_trial_recovers_on_is_said(tmp_path, clock, monkeypatch, minutes):
    search = Quick(tmp_path, "search.max_drop=0.5", f"search.max_minutes={minutes}")
    on = []
    monkeypatch.setattr(Quick, "_recover_on", lambda search, best: on.append(best.number))
    monkeypatch.setattr(_search, "trials_of", lambda *given: 2)
    ticks = itertools.count()
    search.path.takes = lambda: clock.__setitem__(0, float(next(ticks)))
    search.run()
    assert len(search.kept.trials) == 2 and clock[0] >= 7
    assert any("before the best trial could recover further; use a larger --max-minutes" in line for line in search.said) is (
        minutes == 6.5
    )
    assert on == ([] if minutes == 6.5 else [search.context.results.search["chosen"]])


def test_the_dense_models_costs_are_read_as_they_were_written(tmp_path):
    kept = Kept(tmp_path / "trials.json")
    kept.dense = {"costs": {"macs": 1776, "latency": 0.25}, "measured": {}}
    kept.doubted = ["the machine was busy"]
    kept.write()
    assert Kept(kept.file).read().doubted == kept.doubted
    assert repr(Kept(kept.file).read().dense) == repr(kept.dense)  # 1776, not 1776.0: the report shows it
    kept.file.write_text(kept.file.read_text().replace("1776", '"many"'))
    with pytest.raises(CheckpointError, match="damaged"):
        Kept(kept.file).read()
