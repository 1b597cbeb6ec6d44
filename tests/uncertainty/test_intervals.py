"""Intervals against explicit samples of the data, exact binomial sums, and bootstraps."""

import math
from statistics import NormalDist

import pytest
import torch
from torch.distributions import Binomial

from svdcompress.uncertainty import paired_means, paired_parts, paired_rmse, paired_shares, regression_quality, wilson


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def test_coverage_is_that_of_the_central_95_percent():
    """Targets just inside and outside 1.96 standard deviations; the quantile is from the normal's inverse, not our code."""
    edge = float(torch.distributions.Normal(0.0, 1.0).icdf(torch.tensor(0.975, dtype=torch.float64)))
    target = torch.tensor([edge - 1e-3, -edge + 1e-3, edge + 1e-3, -edge - 1e-3, 1.7, 0.0], dtype=torch.float64)
    mean, variance = torch.full_like(target, 3.0), torch.full_like(target, 4.0)
    assert regression_quality(mean, variance, 3 + 2 * target)["coverage"] == pytest.approx(4 / 6)
    noise = torch.randn(200_000, generator=seeded(), dtype=torch.float64)
    got = regression_quality(torch.zeros_like(noise), torch.ones_like(noise), noise)["coverage"]
    assert got == pytest.approx(0.95, abs=0.002)


@pytest.mark.parametrize(("share", "total"), [(0.02, 400), (0.1, 50), (0.5, 30), (0.0166, 10_000)])
def test_wilson_holds_the_true_share_in_about_95_of_100(share, total):
    """From the exact sum over all counts."""
    p = Binomial(total, torch.tensor(share, dtype=torch.float64)).log_prob(torch.arange(total + 1)).exp()
    inside = torch.tensor([low <= share <= high for low, high in (wilson(k, total) for k in range(total + 1))])
    assert 0.93 < float(p[inside].sum()) < 0.98


def test_wilson_is_the_published_formula_and_stays_within_0_and_1():
    low, high = wilson(166, 10_000)
    assert low == pytest.approx(0.014272, abs=1e-5) and high == pytest.approx(0.019301, abs=1e-5)  # Wilson 1927, by hand
    assert wilson(0, 100)[0] == 0 and wilson(100, 100)[1] == 1 and 0.03 < wilson(0, 100)[1] < 0.04
    assert wilson(0, 0) == (0.0, 1.0)


@pytest.mark.parametrize(
    "cells", [(0.9, 0.03, 0.05, 0.02), (0.95, 0.01, 0.0, 0.04), (0.97, 0.01, 0.01, 0.01), (0.95, 0.0, 0.03, 0.02)]
)
def test_paired_shares_hold_the_true_change(cells):
    """Many test sets of 400 examples drawn with known probabilities of (both right, first wrong, second wrong, both wrong)."""
    truth = cells[2] - cells[1]
    draws = torch.multinomial(torch.tensor(cells), 400 * 1500, replacement=True, generator=seeded()).view(1500, 400)
    spans = [paired_shares((draw == 1) | (draw == 3), (draw == 2) | (draw == 3)) for draw in draws]
    assert 0.915 < sum(low <= truth <= high for low, high in spans) / 1500 < 0.995


def test_one_example_of_359_is_no_change_and_many_are():
    """From 2.51% to 2.23% of 359 digits: the README once credited compression with that."""
    before, after = torch.zeros(359).bool(), torch.zeros(359).bool()
    before[:9], after[:8] = True, True
    low, high = paired_shares(before, after)
    assert low < 0 < high
    before[:40], after[:10] = True, True
    low, high = paired_shares(before, after)
    assert low < -30 / 359 < high < 0
    first, second = torch.zeros(200).bool(), torch.zeros(200).bool()  # 0 is outside if McNemar's chi-square exceeds 3.84
    for lost, gained in ((30, 12), (12, 30), (30, 25), (7, 1), (4, 0), (3, 0)):
        first[:], second[:] = False, False
        first[:lost], second[lost : lost + gained] = True, True
        low, high = paired_shares(first, second)
        assert (low <= 0 <= high) == ((gained - lost) ** 2 / (gained + lost) < 3.8415)
    low, high = paired_shares(after, after)  # they differ on no example
    assert low < 0 < high < 0.015


def test_paired_means_are_the_bootstraps():
    difference = torch.randn(500, generator=seeded()).square() - 1.2
    again = difference[torch.randint(500, (4000, 500), generator=seeded(1))].mean(1)
    low, high = paired_means(difference)
    assert low == pytest.approx(float(again.quantile(0.025)), abs=0.03)
    assert high == pytest.approx(float(again.quantile(0.975)), abs=0.03)
    assert paired_means(torch.ones(1)) == (-math.inf, math.inf)


def test_paired_parts_of_no_difference_are_those_of_clopper_and_pearson():
    for count in (10, 100, 1000):
        low, high = paired_parts(torch.zeros(count))
        assert high == -low == pytest.approx(1 - 0.025 ** (1 / count), rel=0.03)
    assert paired_parts(torch.zeros(1)) == (-math.inf, math.inf)


@pytest.mark.parametrize("rate", [0.01, 0.05, 0.2])
@pytest.mark.parametrize("count", [10, 40, 200])
def test_paired_parts_hold_where_few_examples_differ_much(rate, count):
    """At most one in 40 upper edges lies below the mean, where normal ones are too low in up to seven of ten."""
    misses, normal = 0, 0
    generator = seeded()
    for _ in range(400):
        lost = torch.rand(count, generator=generator) < rate
        difference = 0.01 * torch.randn(count, generator=generator) + lost
        misses += paired_parts(difference)[1] < rate
        normal += paired_means(difference)[1] < rate
    assert misses <= 0.025 * 400 + 3 * (0.025 * 400) ** 0.5
    if rate * count < 2.1:
        assert normal > 40


def test_paired_parts_that_can_be_further_off():
    difference = 0.2 * torch.randn(60, generator=seeded()).clamp(-1, 1)
    one, other = paired_parts(difference), paired_parts(3 * difference, far=3.0)
    assert other == pytest.approx((3 * one[0], 3 * one[1]))
    assert paired_parts(torch.zeros(50), far=3.0)[1] == pytest.approx(3 * paired_parts(torch.zeros(50))[1])


def test_paired_parts_of_many_examples_are_the_normal_ones():
    difference = 0.2 * torch.randn(5000, generator=seeded()).clamp(-1, 1)
    for many in (difference, torch.cat([difference, difference])):
        normal, found = paired_means(many), paired_parts(many)
        assert found == pytest.approx(normal, abs=6 / len(many))


def test_paired_rmse_is_a_little_wider_than_the_bootstraps():
    """By one example; the more there are, the less that is."""
    for count, more in ((400, 0.03), (4000, 0.004)):
        before = torch.randn(count, generator=seeded())
        after = 0.6 * before + 0.9 * torch.randn(count, generator=seeded(1))
        picks = (torch.randint(count, (count,), generator=seeded(seed)) for seed in range(2, 1002))
        again = torch.stack([after[pick].square().mean().sqrt() - before[pick].square().mean().sqrt() for pick in picks])
        low, high = paired_rmse(before.square(), after.square())
        assert low == pytest.approx(float(again.quantile(0.025)) - more / 2, abs=more / 2)
        assert high == pytest.approx(float(again.quantile(0.975)) + more / 2, abs=more / 2)
    low, high = paired_rmse(torch.zeros(5), torch.zeros(5))
    assert low == high == 0
    assert paired_rmse(torch.ones(1), torch.ones(1)) == (-math.inf, math.inf)


@pytest.mark.parametrize(("freedom", "count"), [(3, 30), (3, 100), (5, 30)])
def test_paired_rmse_holds_what_it_says_where_errors_have_heavy_tails(freedom, count):
    """The upper edge of 90%, of the changes in RMSE between errors with a Student distribution and noisier ones. The normal
    approximation misses in 15% to 20% of cases."""
    student = torch.distributions.StudentT(float(freedom))
    torch.manual_seed(0)
    before = student.sample((2000, count))
    after = before + 0.3 * student.sample((2000, count))
    true = (math.sqrt(1 + 0.3**2) - 1) * math.sqrt(freedom / (freedom - 2))
    z = NormalDist().inv_cdf(0.9)
    missed = [paired_rmse(*squares, z)[1] < true for squares in zip(before.square(), after.square(), strict=True)]
    assert 0.03 < sum(missed) / 2000 < 0.1
    roots = [errors.square().mean(1, keepdim=True).sqrt() for errors in (before, after)]
    parts = after.square() / (2 * roots[1]) - before.square() / (2 * roots[0])
    plain = (roots[1] - roots[0]).squeeze(1) + z * parts.std(1) / math.sqrt(count)
    assert 0.15 < float((plain < true).float().mean()) < 0.205
