"""Where the search goes next, on known curves of error against pressure."""

import math
from dataclasses import replace

import pytest

from svdcompress.search import Trial, better_pressure, next_ratio, pressure_of_size, smallest, start_ratio
from svdcompress.search._plan import reached


def trial(number, pressure, drop, size, allowed=0.5, error=None, ratio=None):
    return Trial(
        number=number,
        pressure=pressure,
        beta=2.0**pressure,
        ratio=pressure if ratio is None else ratio,
        natural=2.0,
        threshold=3.0,
        costs={"nonzero": size},
        metrics={"error": 2 + drop, "nll": 0.1},
        error=2 + drop if error is None else error,
        drop=drop,
        upper=drop,
        allowed=allowed,
        met=drop <= allowed,
        seconds=1.0,
    )


def test_a_loss_that_is_no_number_is_the_largest():
    assert trial(1, 2.0, math.nan, 100).lost == math.inf
    assert replace(trial(1, 2.0, 0.3, 100), estimate=math.nan).lost == math.inf
    assert trial(1, 2.0, 0.3, 100).lost == 0.3


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_whether_a_trial_has_numbers(value):
    one = replace(trial(1, 2.0, 0.3, 100), estimate=0.1)
    assert one.finite and replace(one, estimate=None, upper=None, at_most=math.inf).finite
    for broken in ({"error": value}, {"drop": value}, {"estimate": value}, {"metrics": {"nll": value}}):
        assert not replace(one, **broken).finite


def search(drop_of, start, most=20):
    """Trials until nothing more can be learned, with a known drop at each size."""
    trials = []
    while (ratio := next_ratio(trials, start)) is not None:
        assert ratio not in [t.ratio for t in trials]
        trials.append(trial(len(trials) + 1, 2.0, drop_of(ratio), 1000 * 0.5**ratio, ratio=ratio))
        assert len(trials) <= most
    return trials


@pytest.mark.parametrize("edge", [0.3, 1.0, 2.4, 3.71, 6.9])
@pytest.mark.parametrize("start", [1.0, 3.0, 6.0])
def test_the_edge_of_the_budget_is_found_from_anywhere(edge, start):
    trials = search(lambda ratio: 0.5 * 4 ** (ratio - edge), start)
    best = smallest(trials, "nonzero")
    assert best is not None and edge - 0.2 <= best.ratio <= edge
    assert len(trials) <= 10


def test_all_sizes_may_be_within_the_budget_and_none():
    assert max(t.ratio for t in search(lambda ratio: 0.0, 2.0)) > 13
    lost = search(lambda ratio: 9.0, 3.0)
    assert smallest(lost, "nonzero") is None and min(t.ratio for t in lost) == 0.1 and len(lost) <= 5


def test_nothing_is_tried_beyond_what_can_be_had():
    ratio, trials = next_ratio([], 3.0, most=2.0), []
    while ratio is not None:
        trials.append(trial(len(trials) + 1, 2.0, 0.0, 1000 * 0.5**ratio, ratio=ratio))
        ratio = next_ratio(trials, 3.0, most=4.5)
    assert [each.ratio for each in trials] == [2.0, 3.0, 4.0, 4.5]
    assert next_ratio([], 3.0, most=0.0) == 0.1  # a model from which nothing can be removed


def test_a_trial_speaks_for_the_size_it_has_if_it_kept_the_budget_and_else_for_the_one_asked():
    kept, lost = trial(1, 2.0, 0.1, 62.5, ratio=3.0), trial(2, 4.0, 0.9, 31.25, ratio=4.5)
    count = lambda *trials: [each.ratio for each in reached(trials, 1000.0, "nonzero")]  # noqa: E731
    assert count(kept, lost) == [4.0, 4.5] and next_ratio(reached([kept, lost], 1000.0, "nonzero"), 3.0) == 4.25
    assert count(lost) == [4.5]
    larger = replace(kept, costs={"nonzero": 250.0})  # as a latency may be that was measured again
    assert count(larger) == [3.0]
    below = replace(lost, ratio=3.5)  # the kept one is smaller than that
    assert count(kept, below) == [4.0, 5.0]


def test_far_from_the_budget_it_goes_back_faster():
    assert next_ratio([trial(1, 5.0, 0.6, 10)], 5.0) == 4.0
    assert next_ratio([trial(1, 5.0, 8.0, 10)], 5.0) == 3.0


def test_the_start_is_the_last_level_that_recovery_may_still_save():
    assert start_ratio([2.0, 4.0, 8.0, 16.0], [2.0, 2.4, 3.1, 9.0], 2.0, 0.5) == 3.0
    assert start_ratio([2.0, 4.0], [9.0, 9.0], 2.0, 0.5) == 1.0
    assert start_ratio([1.0], [2.0], 2.0, 0.5) == 0.1


@pytest.mark.parametrize("edge", [1.0, 2.6, 4.0])
def test_models_of_one_size_walk_to_the_least_error(edge):
    trials = []
    while (pressure := better_pressure(trials, 5.0, 6)) is not None:
        assert pressure not in [t.pressure for t in trials]
        trials.append(trial(len(trials) + 1, pressure, 0.0, 100, error=2 + (pressure - edge) ** 2))
    assert trials[0].pressure == 5.0 and len(trials) <= 14
    assert abs(min(trials, key=lambda t: t.error).pressure - edge) <= 0.3


def test_the_pressure_of_a_size_is_between_levels_by_its_log():
    sizes = [1000.0, 500.0, 100.0]
    assert pressure_of_size(sizes, 2000.0) == 1.0 and pressure_of_size(sizes, 10.0) == 3.0
    assert pressure_of_size(sizes, math.sqrt(500 * 100)) == pytest.approx(2.5)


def test_of_trials_within_the_budget_the_smallest_and_of_equal_ones_the_better():
    trials = [trial(1, 1, 0.1, 90), trial(2, 2, 0.4, 50), trial(3, 3, 0.3, 50), trial(4, 4, 0.9, 20)]
    found = smallest(trials, "nonzero")
    assert found is not None and found.number == 3


def test_a_trial_is_stored_and_read():
    one = trial(1, 2.5, 0.1, 90)
    assert Trial.of(one.to_dict()) == one
