"""An error budget, against resampling and by hand."""

import math

import pytest
import torch

from svdcompress.search import Budget, Losses


def answers(wrong):
    wrong = torch.as_tensor(wrong, dtype=torch.float64)
    return Losses(wrong, torch.ones_like(wrong), True)


def squares(values):
    values = torch.as_tensor(values, dtype=torch.float64)
    return Losses(values, torch.ones_like(values), False)


def test_errors_are_per_cent_and_rmse():
    assert answers([1, 0, 0, 0]).error == 25.0
    assert squares([4.0, 0.0]).error == pytest.approx(math.sqrt(2))
    several = Losses(torch.tensor([2.0, 0.0]), torch.tensor([4.0, 1.0]), True)  # two of five positions
    assert several.error == pytest.approx(40.0)


def test_what_is_allowed_is_the_nearer_of_two_bounds():
    assert Budget(max_drop=0.5).allowed(2.0) == 0.5
    assert Budget(max_error=2.3).allowed(2.0) == pytest.approx(0.3)
    assert Budget(max_drop=0.5, max_error=2.3).allowed(2.0) == pytest.approx(0.3)
    assert Budget(max_error=1.1).allowed(1.0, probabilities=False) == pytest.approx(10.0)  # percent of the RMSE
    assert Budget().allowed(2.0) == math.inf and not Budget().given and Budget(max_drop=0.0).given


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_regression_without_any_error_is_judged(dtype):
    """For example one that is compared with its own answers: a limit on the RMSE works, and any drop is infinite."""

    def near(rmse):
        return Losses(torch.full((50,), rmse**2, dtype=dtype), torch.ones(50, dtype=dtype), False)

    dense = near(0.0)
    assert Budget(max_error=0.5).judge(dense, near(0.4)).met and not Budget(max_error=0.5).judge(dense, near(0.6)).met
    assert Budget(max_drop=3.0).judge(dense, dense).met and not Budget(max_drop=3.0).judge(dense, near(1e-6)).met
    assert Budget(max_drop=3.0, max_error=0.5).allowed(0.0, probabilities=False) == 3.0
    assert all(math.isfinite(x) for x in Budget().judge(dense, near(0.4)).to_dict().values() if x is not None)


@pytest.mark.parametrize("one", [squares([4.0]), Losses(torch.tensor([3.0]), torch.tensor([9.0]), True)])
def test_a_single_example_bounds_nothing(one):
    assert Budget(max_drop=1.0).judge(one, one).upper is None


def test_the_upper_bound_is_what_resampling_gives():
    """One-sided, for the paired difference: 10% of resampled drops are above it."""
    generator = torch.Generator().manual_seed(0)
    n = 5000
    dense = (torch.rand(n, generator=generator) < 0.02).double()
    flips = torch.rand(n, generator=generator) < 0.01
    small = torch.where(flips, 1 - dense, dense)
    verdict = Budget(max_drop=1.5).judge(answers(dense), answers(small))
    draws = torch.randint(n, (4000, n), generator=generator)
    drops = 100 * (small - dense)[draws].mean(1)
    assert verdict.drop == pytest.approx(float(100 * (small - dense).mean()))
    assert verdict.upper == pytest.approx(float(drops.quantile(0.9)), abs=0.03)
    assert verdict.met is (verdict.upper <= 1.5)


def test_a_drop_within_but_not_surely_is_not_met():
    dense, small = torch.zeros(10_000), torch.zeros(10_000)
    dense[:200], small[:240] = 1, 1  # 2.0% and 2.4%, on the same examples
    judged = Budget(max_drop=0.45).judge(answers(dense), answers(small))
    assert judged.drop == pytest.approx(0.4) and judged.upper > 0.45 and not judged.met
    assert Budget(max_drop=0.6).judge(answers(dense), answers(small)).met
    lenient = Budget(max_drop=0.45, confidence=0.6).judge(answers(dense), answers(small))
    assert lenient.upper < judged.upper and lenient.met


def test_few_examples_are_judged_by_the_drop_itself_in_whole_ones():
    dense, small = torch.zeros(144), torch.zeros(144)
    dense[:3], small[:4] = 1, 1
    budget = Budget(max_drop=0.5)  # less than one example in 144
    assert len(dense) < budget.needed(answers(dense))
    assert budget.judge(answers(dense), answers(small)).met  # one more is the smallest possible difference
    small[:5] = 1
    assert not budget.judge(answers(dense), answers(small)).met


def with_nll(wrong, nll):
    wrong = torch.as_tensor(wrong, dtype=torch.float64)
    return Losses(wrong, torch.ones_like(wrong), True, torch.as_tensor(nll, dtype=torch.float64))


def test_few_examples_with_an_nll_are_judged_by_its_rise():
    """By hand: a rise of 0.9 nats over 144 examples, at 0.45 errors per nat."""
    dense = with_nll([1, 1, 1] + [0] * 141, [4.0, 3.0, 3.0] + [2 / 141] * 141)
    worse = with_nll([1, 1, 1] + [0] * 141, [4.3, 3.3, 3.3] + [2 / 141] * 141)  # as many errors, but further off
    verdict = Budget(max_drop=0.5).judge(dense, worse)
    assert verdict.drop == 0 and verdict.estimate == pytest.approx(45 * 0.9 / 144) and verdict.met
    variance = (3 * (0.3 - 0.9 / 144) ** 2 + 141 * (0.9 / 144) ** 2) / 143
    assert verdict.at_most == pytest.approx(45 * (0.9 / 144 + 1.2815515655446004 * (variance / 144) ** 0.5))
    assert Budget(max_drop=0.5).judge(dense, worse).met and not Budget(max_drop=0.4).judge(dense, worse).met


def test_an_nll_that_did_not_rise_does_not_excuse_errors_that_surely_did():
    dense = with_nll([1, 1] + [0] * 98, [0.05] * 100)
    small = with_nll([1] * 20 + [0] * 80, [0.05] * 100)
    verdict = Budget(max_drop=0.5).judge(dense, small)
    assert verdict.estimate == pytest.approx(0.0) and not verdict.met


def test_an_nll_is_not_asked_where_errors_tell():
    wrong = torch.arange(20_000) < 400
    dense, small = with_nll(wrong, [0.05] * 20_000), with_nll(wrong, [0.5] * 20_000)
    verdict = Budget(max_drop=0.5).judge(dense, small)
    assert verdict.estimate is None and verdict.met


def test_a_dense_model_without_an_error_says_something_all_the_same():
    dense, small = with_nll([0] * 50, [0.01] * 50), with_nll([0] * 50, [0.02] * 50)
    assert 0 < Budget(max_drop=0.5).judge(dense, small).estimate < 1


def test_how_many_examples_it_takes():
    """With that many examples, an equal model with as many differences as the dense one has errors is distinguished from one at
    the limit."""
    dense = answers(torch.arange(10_000) < 200)
    budget = Budget(max_drop=0.5, confidence=0.9)
    z = 1.2815515655446004
    assert budget.needed(dense) == math.ceil(0.02 / (0.005 / z) ** 2)
    assert Budget(max_drop=0.25).needed(dense) == pytest.approx(4 * budget.needed(dense), rel=0.01)
    assert Budget(max_drop=0.0).needed(dense) == 10**9 and Budget().needed(dense) == 2
    assert Budget(max_drop=0.0).judge(dense, dense).met  # as good as the dense model on every example


def maps(shares, positions=16_384):
    """Examples with several positions each, given the fraction of positions that are wrong."""
    shares = torch.as_tensor(shares, dtype=torch.float64)
    return Losses(shares * positions, torch.full_like(shares, positions), True)


def test_examples_with_many_positions_are_no_coin_tosses():
    """A fraction of 8% (+-3) does not take 1.28^2 * 8% / 0.5%^2 examples, nor only (1.28 * 3 / 0.5)^2, from the spread: an
    example of a rare kind may be lost as a whole."""
    shares = torch.tensor([0.05, 0.11] * 20, dtype=torch.float64)
    budget, dense = Budget(max_drop=0.5), maps(shares)
    z, needed = 1.2815515655446004, budget.needed(dense)
    assert (z * 3 / 0.5) ** 2 < 1 / 0.005 < needed < z**2 * 0.08 / 0.005**2 / 5

    def judged(count):
        """A model that loses nothing on average, with differences as large as those between examples."""
        before = shares.repeat(count)[:count]
        after = before + 0.03 * torch.tensor([1.0, -1.0] * count)[:count]
        return budget.judge(maps(before), maps(after))

    assert judged(2 * (needed // 2) + 40).met and not judged(2 * (needed // 2) - 40).met
    assert not Budget(max_drop=10.0).few(dense) and budget.few(dense)
    lengths = torch.tensor([100.0, 300.0] * 10, dtype=torch.float64)
    alike = Losses(0.1 * lengths, lengths, True)  # one fraction for all: different lengths are not noise
    assert budget.needed(alike) == pytest.approx(1.5 * (1 + z) / 0.005, rel=0.02)  # the longest are 1.5 times the average
    assert budget.needed(maps([0.08])) > 1000 and not budget.judge(maps([0.08]), maps([0.08])).met  # one tells nothing


def test_examples_with_many_positions_have_to_keep_the_bound_however_few_they_are():
    """Models that really lose 1.0 point; one in ten measures less than 0.5 by chance."""
    generator = torch.Generator().manual_seed(0)
    shares = (0.08 + 0.03 * torch.randn(40, generator=generator)).clamp(0.01).double()
    budget, dense = Budget(max_drop=0.5), maps(shares)
    assert budget.needed(dense) > 40
    verdicts = []
    for _ in range(500):
        lost = 0.010 + 0.025 * torch.randn(40, generator=generator)
        verdicts.append(budget.judge(dense, maps((shares + lost).clamp(0, 1))))
    assert sum(verdict.drop <= 0.5 for verdict in verdicts) > 30
    assert sum(verdict.met for verdict in verdicts) < 10
    assert all(verdict.met is (verdict.upper <= 0.5) for verdict in verdicts)
    same = [budget.judge(maps(shares.repeat(times)), maps(shares.repeat(times) + 0.001)).met for times in (1, 50)]
    assert same == [False, True]  # the same drop on all of them, but 40 examples may miss a kind that one in 40 is of


def test_long_examples_that_are_lost_are_not_missed():
    """One example in 500 is ten times as long as the others, and lost as a whole: a drop of about 2 points."""
    generator = torch.Generator().manual_seed(2)
    budget, met = Budget(max_drop=1.5), []
    for _ in range(300):
        long = torch.rand(400, generator=generator) < 0.002
        long[0] = True  # such lengths are known, if not such losses
        lengths = torch.where(long, 200.0, 20.0).double()
        lost = lengths.where(long & (torch.arange(400) > 0), 0.0)
        met.append(budget.judge(Losses(0 * lengths, lengths, True), Losses(lost, lengths, True)).met)
    assert sum(met) <= 0.1 * len(met)


@pytest.mark.parametrize("perfect", [True, False])
def test_whole_examples_that_are_lost_are_not_missed(perfect):
    """One example in a hundred is of a kind that the small model gets wrong throughout: a drop of about 0.9 points."""
    generator = torch.Generator().manual_seed(1)
    budget, met = Budget(max_drop=0.5), []
    for count in (30, 100, 200, 300):
        for _ in range(100):
            shares = 0.0 * torch.ones(count) if perfect else (0.05 + 0.01 * torch.randn(count, generator=generator)).clamp(0)
            lost = torch.rand(count, generator=generator) < 0.01
            met.append(budget.judge(maps(shares), maps(shares.where(~lost, 1.0))).met)
    assert sum(met) <= 0.1 * len(met)
    for confidence in (0.8, 0.9, 0.95, 0.99):  # as many as it takes are enough for a model that is no worse
        budget = Budget(max_drop=0.5, confidence=confidence)
        enough = maps(torch.zeros(budget.needed(maps(torch.zeros(50)))))
        assert budget.judge(enough, enough).met and not budget.judge(maps(torch.zeros(200)), maps(torch.zeros(200))).met
    assert Budget(max_drop=0.5).few(maps(torch.zeros(300))) and not Budget(max_drop=0.5).few(maps(torch.zeros(500)))


def test_regression_is_by_the_relative_rmse():
    generator = torch.Generator().manual_seed(0)
    errors = torch.randn(20_000, generator=generator, dtype=torch.float64)
    dense, small = squares(errors**2), squares((1.03 * errors) ** 2)
    verdict = Budget(max_drop=3.5).judge(dense, small)
    assert verdict.drop == pytest.approx(3.0, abs=1e-6) and 3.0 < verdict.upper < 3.1 and verdict.met
    assert not Budget(max_drop=2.9).judge(dense, small).met
    assert verdict.to_dict()["met"] is True
