"""Minimizing an expensive function of one number: the minimum is found with few evaluations."""

import math

import pytest

from svdcompress.calibrate._search import WORTH, outward, refined, widened


class Counted:
    """A function that records the places where it was evaluated."""

    def __init__(self, function):
        self.function, self.asked = function, []

    def __call__(self, place):
        self.asked.append(place)
        return self.function(place)


@pytest.mark.parametrize("centre", [-0.83, -0.3, 0.0, 0.41, 0.97])
@pytest.mark.parametrize(
    "shape",
    [
        lambda d: d * d,
        lambda d: math.exp(d) - d,  # steeper above, like the noise of variances that are too large
        lambda d: math.exp(-1.5 * d) + 1.5 * d,
        lambda d: 1000 * math.log(math.cosh(d)),
    ],
)
def test_a_least_between_neighbours_is_found_by_few_looks(centre, shape):
    asked = Counted(lambda place: shape(place - centre))
    found = refined(asked, [-1.0, 0.0, 1.0], 4, 0.05)
    assert found == pytest.approx(centre, abs=0.1) and len(asked.asked) <= 3 + 4
    assert asked.function(found) == min(asked.function(place) for place in asked.asked)


def test_a_parabola_is_asked_no_further_once_its_vertex_is_known():
    asked = Counted(lambda place: (place - 0.41) ** 2)
    assert refined(asked, [-1.0, 0.0, 1.0], 4, 0.05) == pytest.approx(0.41) and len(asked.asked) == 4


@pytest.mark.parametrize("best", [0.0, 0.25])
def test_a_least_at_an_end_or_near_it(best):
    assert refined(lambda place: (place - best) ** 2, [0.0, 1.0], 4, 0.05) == pytest.approx(best, abs=0.06)
    assert refined(lambda place: 3.0, [2.0], 4, 0.05) == 2.0


def test_a_grid_is_left_where_there_is_no_hope():
    grid = [float(place) for place in range(-3, 10)]
    asked = Counted(lambda place: 100 * (place - 1) ** 2)
    assert outward(asked, grid, 0.0, 250.0) == [-2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 4.0]  # two on each side that exceed 250
    assert len(asked.asked) == 7


def test_a_plateau_and_a_hill_before_the_least_are_crossed():
    """As with the variances of an untrained network: thousands of times too small, with no effect until they matter."""
    grid = [float(place) for place in range(-3, 10)]
    costs = dict.fromkeys(grid, 10.0) | {4.0: 900.0, 5.0: 10.0, 7.0: -200.0, 8.0: 900.0, 9.0: 2000.0}
    assert outward(costs.__getitem__, grid, 0.0, 100.0) == grid
    assert outward(costs.__getitem__, grid, 9.0, 100.0) == [5.0, 6.0, 7.0, 8.0, 9.0]  # two beyond the minimum are far worse


@pytest.mark.parametrize("best", [-7.0, 14.0])
def test_a_search_goes_on_beyond_an_end_that_is_the_best(best):
    grid = [float(place) for place in range(-3, 10)]
    asked = Counted(lambda place: 10 * (place - best) ** 2)
    found = outward(asked, grid, 0.0, 1e9, farther=12)
    assert min(found, key=asked.function) == best and len(asked.asked) == len(grid) + abs(best) - (3 if best < 0 else 9) + 1
    assert min(outward(asked, grid, 0.0, 1e9), key=asked.function) in (-3.0, 9.0)  # not, unless asked to
    assert outward(lambda place: -0.9 * WORTH * abs(place), grid, 0.0, 1e9, farther=12) == grid  # not worth a look
    assert len(outward(lambda place: -place, grid, 0.0, 1e9, farther=12)) == len(grid) + 12


def test_a_grid_is_widened_until_neither_end_is_the_best():
    assert widened(abs, [-1.0, 0.0, 1.0], 0.5, 40.0) == [-1.0, 0.0, 1.0]
    assert widened(lambda place: abs(place - 2.6), [-1.0, 0.0, 1.0], 0.5, 40.0) == [-1.0, 0.0, 1.0, 1.5, 2.0, 2.5, 3.0]
    assert widened(lambda place: abs(place + 2.0), [-1.0, 0.0], 1.0, 40.0) == [-3.0, -2.0, -1.0, 0.0]
    assert widened(lambda place: place, [0.0, 1.0], 1.0, 3.5) == [-3.0, -2.0, -1.0, 0.0, 1.0]
    assert widened(lambda place: math.nan, [0.0, 1.0], 1.0, 3.5) == [0.0, 1.0]


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_cost_that_is_not_finite_leads_nowhere(value):
    """Such as the NLL of a label whose class a network rules out."""
    grid = [-1.0, 0.0, 1.0]
    assert widened(lambda place: value, grid, 0.5, 40.0) == grid
    assert outward(lambda place: value, grid, 0.0, 1e9, farther=12) == grid
