"""Which trial is chosen in the end, and that the next one depends only on the trials so far."""

import dataclasses
import math

import pytest
from test_plan import trial

from svdcompress.search import NOTHING, Strategy, better_pressure

PATH = {"ratios": [2.0, 4.0, 8.0, 16.0], "errors": [2.0, 2.4, 3.1, 9.0]}


def strategy(goal=None, budget=True, trials=8):
    return Strategy("nonzero", 1000.0, goal, budget, trials, **PATH, error=2.0, allowed=0.5 if budget else math.inf)


@pytest.mark.parametrize(
    ("goal", "budget", "taken"),
    [
        (None, True, 3),  # the smallest that keeps the budget
        (200.0, False, 2),  # the one at the goal that loses least
        (200.0, True, 2),
        (60.0, True, 3),  # the only one at the goal loses too much
        (60.0, False, 4),
        (10.0, False, 4),  # none reaches it: the closest
        (10.0, True, 3),
    ],
)
def test_which_trial_is_taken(goal, budget, taken):
    sizes, drops = (500, 200, 100, 50), (0.0, 0.2, 0.4, 0.9)
    trials = [trial(n, 2.0, drop, size) for n, (size, drop) in enumerate(zip(sizes, drops, strict=True), 1)]
    assert strategy(goal, budget).best(trials).number == taken


def test_of_trials_as_close_to_a_goal_that_none_reached_the_one_that_loses_least_is_taken():
    sizes, drops = (103, 101.5, 100, 300), (0.1, 0.2, 2.0, 0.0)
    trials = [trial(n, 2.0, drop, size) for n, (size, drop) in enumerate(zip(sizes, drops, strict=True), 1)]
    assert strategy(10.0, budget=False).best(trials).number == 2  # 1.5% larger than the smallest; the first is 3% larger


def test_a_trial_of_which_nothing_is_left_is_taken_last_even_where_it_is_the_closest_in_size():
    """It counts as large as the dense model; a file with metadata may be even larger."""
    empty = dataclasses.replace(trial(1, 2.0, 100.0, 1000), metrics={"error": 102.0, "nll": NOTHING})
    real = trial(2, 2.0, 1068.0, 1100)
    assert strategy(10.0, budget=False).best([empty, real]) is real
    assert strategy(10.0).best([empty]) is empty


def test_where_units_are_cut_in_steps_the_first_pressure_is_no_higher_than_told_whatever_trials_say():
    plain = dataclasses.replace(strategy(goal=60.0, budget=False), measure="parameters")
    capped = dataclasses.replace(plain, press=2.5)
    assert plain.next([])[0] > 2.5 == capped.next([])[0]  # the pressure for 1000 / 60 would only come at the end of the path
    easy = dataclasses.replace(capped, goal=400.0)
    assert easy.next([]) == dataclasses.replace(plain, goal=400.0).next([])
    budget = dataclasses.replace(strategy(), press=2.5)
    assert budget.next([trial(1, 2.5, 0.1, 100)])[0] == 2.5 < strategy().next([trial(1, 2.5, 0.1, 100)])[0]


def test_a_budget_is_followed_no_further_than_what_can_be_had():
    """Every size keeps the budget: the last trial has the least size, once, not 0.85 of it at another pressure."""
    bounded, trials = dataclasses.replace(strategy(), least=50.0), []
    while (ask := bounded.next(trials)) is not None:
        trials.append(trial(len(trials) + 1, ask[0], 0.0, ask[1], ratio=math.log2(1000 / ask[1])))
    assert trials[-1].costs["nonzero"] == 50.0 and len(trials) < bounded.trials
    assert sum(one.costs["nonzero"] == 50.0 for one in trials) == 1
    coarse = [dataclasses.replace(trials[-1], costs={"nonzero": 56.0})]  # 0.85 of it would be below the least size
    assert bounded.next(coarse)[1] == 50.0 > 0.85 * 56


def test_of_those_that_lose_too_much_the_one_that_loses_least_is_taken():
    trials = [trial(1, 2.0, 0.9, 100), trial(2, 2.0, 0.7, 300), trial(3, 2.0, 3.0, 50)]
    assert strategy().best(trials).number == 2 == strategy(goal=60.0).best(trials).number


def nothing_left(number, pressure):
    """A trial with nothing left, as a search records it: as large as the dense model, 100% worse."""
    return dataclasses.replace(trial(number, pressure, 100.0, 1000), metrics={"error": 102.0, "nll": NOTHING})


@pytest.mark.parametrize("goal", [None, 60.0])
@pytest.mark.parametrize("budget", [True, False])
def test_a_trial_of_which_nothing_is_left_is_no_model_to_take(goal, budget):
    """A regression may lose more than 100% of its RMSE and still be a model."""
    gone = nothing_left(1, 2.0)
    trials = [gone, trial(2, 2.0, 180.0, 200), trial(3, 2.0, 130.0, 400)]
    assert strategy(goal, budget).best(trials).number == (2 if goal and not budget else 3)
    assert strategy(1500.0, budget).best(trials).number == 3  # the dense model has this size too
    assert strategy(goal, budget).best([gone]).number == 1  # there is no other


def test_where_nothing_is_left_no_other_pressure_is_looked_for():
    """The walk towards less error moves away from it, whatever error was recorded for it."""
    far = dataclasses.replace(nothing_left(1, 2.0), error=0.1)
    towards = better_pressure([far, trial(2, 1.0, 3.0, 60)], 1.0, 4)
    assert towards is not None and abs(towards - 1.0) <= 0.5


SIX = {"ratios": [2.0, 4.0, 8.0, 16.0, 32.0, 64.0], "errors": [2.0, 2.0, 2.1, 2.4, 3.0, 3.4], "error": 2.0}


def test_after_a_trial_of_which_nothing_is_left_there_is_less_pressure():
    """It counts as no smaller than the dense model, as if pressure did nothing."""
    within = Strategy("nonzero", 1e5, None, True, 8, **SIX, allowed=0.5)
    (pressure, size), gone = within.next([]), dataclasses.replace(nothing_left(1, 5.2), ratio=6.0, natural=1.0)
    assert (pressure, size) == (5.2, 1e5 / 64)
    assert within.next([gone]) == (3.2, 1e5 / 16)  # the pressure of this size on the path, as if there had been no trial
    steps = dataclasses.replace(within, press=2.5)
    assert steps.next([]) == (2.5, 1e5 / 64)
    assert steps.next([dataclasses.replace(gone, pressure=2.5)]) == (1.5, 1e5 / 16)
    without = dataclasses.replace(gone, pressure=-7.0)  # there was no pressure to be too much
    assert steps.next([without]) == (2.5, 1e5 / 16)


@pytest.mark.parametrize("edge", [1.9, 4.0])
def test_a_goal_at_whose_pressure_nothing_is_left_is_looked_for_below(edge):
    aimed, trials = Strategy("nonzero", 1e5, 2e3, False, 4, **SIX, allowed=math.inf), []
    while (ask := aimed.next(trials)) is not None:
        number, (pressure, size) = len(trials) + 1, ask
        natural = {"natural": 2.0 ** (pressure + 0.8)}
        trials.append(nothing_left(number, pressure) if pressure > edge else trial(number, pressure, 0.1, size))
        trials[-1] = dataclasses.replace(trials[-1], **({"natural": 1.0} if trials[-1].empty else natural))
    assert len(trials) == 4 and not aimed.best(trials).empty


def test_no_model_is_made_twice_where_pressure_alone_makes_it_smaller_than_asked():
    """At the highest pressure that is tried first, requests of 16x and 32x would both end at 91x."""
    within = Strategy("macs", 1e5, None, True, 8, **{**SIX, "errors": [2.0, 2.0, 2.1, 9.0, 9.0, 9.0]}, allowed=0.5, press=2.5)
    trials = []
    while (ask := within.next(trials)) is not None:
        ratio = math.log2(1e5 / ask[1])
        size = min(ask[1], 1e5 / 2 ** (ask[0] + 4))
        made = trial(len(trials) + 1, ask[0], 0.005 * 1e5 / size, size, ratio=ratio)
        trials.append(dataclasses.replace(made, costs={"macs": size}))
    made = [(one.pressure, one.costs["macs"]) for one in trials]
    assert len(made) > 2 and len(set(made)) == len(made)
    assert any(one.met for one in trials) and not all(one.met for one in trials)


def test_where_nothing_is_left_of_any_trial_the_least_pressure_is_the_best():
    assert better_pressure([nothing_left(1, 3.0), nothing_left(2, 2.0)], 2.0, 6) == 1.5


@pytest.mark.parametrize("goal", [None, 60.0])
def test_what_comes_next_does_not_depend_on_who_asks(goal):
    """At most as many as allowed, and without hidden state: the answer depends only on the list of trials."""
    trials, asked = [], []
    while (ask := strategy(goal).next(trials)) is not None:
        asked.append(ask)
        pressure, size = ask
        drop = 0.0004 * 1000 / size * 60 + 0.1 * abs(pressure - 2.5)
        made = trial(len(trials) + 1, pressure, drop, size, ratio=math.log2(1000 / size))
        trials.append(dataclasses.replace(made, natural=2.0 ** (pressure + 0.8)))
    assert 1 < len(trials) <= 8
    one = strategy(goal)
    for count in reversed(range(len(trials))):
        assert one.next(trials[:count]) == asked[count]
    assert strategy(goal, trials=len(trials)).next(trials) is None


def asked_for(one):
    """All requested trials; more pressure and smaller sizes lose more, and the budget is 0.5 points."""
    trials = []
    while (ask := one.next(trials)) is not None:
        pressure, size = ask
        drop = 0.0004 * 1000 / size * 60 + 0.01 * max(pressure, 0)
        trials.append(trial(len(trials) + 1, pressure, drop, size, ratio=math.log2(1000 / size)))
    return [(each.pressure, each.costs["nonzero"]) for each in trials]


def test_where_pressure_removes_nothing_a_goal_is_tried_without_it_and_then_as_usual():
    plain = dataclasses.replace(strategy(goal=400.0, budget=False), press=2.5)
    free = dataclasses.replace(plain, unpressed=-7.0)
    assert asked_for(free) == [(-7.0, 400.0), *asked_for(plain)[: len(asked_for(free)) - 1]]
    assert len(asked_for(free)) > 3


def test_without_a_path_there_is_one_trial_for_a_goal():
    alone = dataclasses.replace(strategy(goal=25.0, budget=False), press=2.5, unpressed=-7.0, ratios=[], errors=[])
    assert asked_for(alone) == asked_for(alone.unbounded()) == [(-7.0, 25.0)]


def test_where_pressure_removes_nothing_a_budget_is_looked_for_without_it_and_the_last_trial_has_it():
    within = dataclasses.replace(strategy(), press=2.5, unpressed=-7.0)
    *first, last = asked_for(within)
    assert len(first) > 2 and {pressure for pressure, _ in first} == {-7.0} and 1 <= last[0] <= 2.5
    assert len({*first, last}) == len(first) + 1
    kept = min(size for _, size in first if 0.0004 * 1000 / size * 60 <= 0.5)
    assert last[1] == pytest.approx(0.85 * kept)
