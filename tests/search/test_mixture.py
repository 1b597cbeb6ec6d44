"""Which of several ways is chosen: the best, unless chance explains its lead over the usual one."""

import math

import pytest
import torch

from svdcompress.search import Option, best_option, record


def option(name, rows, size=10.0):
    return Option(name, size, float(rows.mean()), rows)


def by_hand(options):
    """The same with plain loops: the lowest mean among those at least 1.96 standard errors below the first."""
    first, taken = options[0].rows.tolist(), options[0]
    for one in options[1:]:
        each = [b - a for a, b in zip(first, one.rows.tolist(), strict=True)]
        mean = sum(each) / len(each)
        error = math.sqrt(sum((d - mean) ** 2 for d in each) / (len(each) - 1) / len(each))
        if mean + 1.959964 * error < 0 and sum(one.rows.tolist()) < sum(taken.rows.tolist()):
            taken = one
    return taken.name


@pytest.mark.parametrize("seed", range(20))
def test_it_is_the_best_that_is_surely_better(seed):
    torch.manual_seed(seed)
    rows = torch.rand(200).double()
    options = [option("usual", rows), *(option(str(n), rows + 0.3 * torch.randn(200) - 0.03 * n) for n in range(4))]
    assert best_option(options).name == by_hand(options)


def test_losses_that_are_not_finite_count_only_without_others():
    rows = torch.rand(50)
    broken, worse = option("broken", rows.where(rows > 0.1, torch.nan)), option("worse", rows + 1)
    infinite = option("infinite", rows.where(rows > 0.1, torch.inf))
    assert best_option([broken, worse]).name == best_option([infinite, worse, broken]).name == "worse"
    assert best_option([option("usual", rows), broken, infinite]).name == "usual"
    assert best_option([broken, infinite]).name == "broken"


def test_chance_keeps_the_usual_way():
    rows, noise = torch.rand(100), torch.randn(100)
    noise -= noise.mean()
    lucky = option("lucky", rows + noise - 0.01)  # a hundredth below, plus or minus a tenth
    surely = option("surely", rows - 0.005)
    assert best_option([option("usual", rows), lucky]).name == "usual"
    assert best_option([option("usual", rows), lucky, surely]).name == "surely"
    assert best_option([option("usual", rows), option("same", rows)]).name == "usual"


def test_what_is_no_number_is_not_taken():
    rows = torch.rand(50)
    assert best_option([option("usual", rows), option("broken", rows * math.nan)]).name == "usual"
    assert best_option([option("usual", rows * math.nan), option("other", rows)]).name == "other"
    assert best_option([option("usual", rows[:1]), option("other", rows[:1] - 9)]).name == "usual"  # one example tells nothing


def test_the_record_holds_each_candidate():
    rows = torch.rand(50)
    told = record([option("usual", rows, 12.0), option("other", rows - 1, 11.0)], 50, "other")
    assert told["chosen"] == "other" and told["usual"] == "usual" and told["examples"] == 50
    assert [(one["name"], one["size"]) for one in told["candidates"]] == [("usual", 12.0), ("other", 11.0)]
    assert told["candidates"][1]["nll"] == pytest.approx(float(rows.mean()) - 1)
