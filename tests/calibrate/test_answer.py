"""The threshold for answering, against scipy's exact binomial tests; whether the promise holds over many validation sets."""

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from svdcompress.calibrate import AnswerAbove, answer_above, measured
from svdcompress.calibrate._answer import least_answered, lower_bound, tail
from svdcompress.errors import DataError, UsageError
from svdcompress.likelihoods import Classification
from svdcompress.report._certainty import certainty
from svdcompress.uncertainty import mean_predict


def population(n, seed):
    """Confidences of an overconfident model: it is right with probability `confidence ** 2`."""
    generator = torch.Generator().manual_seed(seed)
    confidence = 1 - 0.5 * torch.rand(n, generator=generator) ** 3
    return confidence, torch.rand(n, generator=generator) < confidence**2


@pytest.mark.parametrize(("errors", "count", "rate"), [(0, 10, 0.1), (3, 200, 0.01), (40, 1000, 0.05), (999, 1000, 0.9)])
def test_the_tail_is_scipys(errors, count, rate):
    assert tail(errors, count, rate) == pytest.approx(stats.binom.cdf(errors, count, rate), rel=1e-9)


@pytest.mark.parametrize(("errors", "count"), [(0, 300), (1, 300), (20, 1000), (5, 5)])
def test_the_bound_is_clopper_and_pearsons(errors, count):
    wanted = 0.0 if errors == count else 1 - stats.beta.ppf(0.95, errors + 1, count - errors)
    assert lower_bound(errors, count, 0.05) == pytest.approx(wanted, abs=1e-9)


def test_the_threshold_answers_as_told():
    confidence, right = population(3000, 0)
    found = answer_above(confidence, right, 0.97)
    answered = confidence.double() >= found.threshold
    assert found.answered == pytest.approx(float(answered.double().mean())) and found.examples == 3000
    assert found.measured == pytest.approx(float(right[answered].double().mean())) and found.measured > 0.97
    assert 0.97 <= found.bound <= found.measured
    errors, count = int((~right[answered]).sum()), int(answered.sum())
    assert stats.binom.cdf(errors, count, 0.03) <= 0.05 / 5 + 1e-12


def test_the_promise_holds_as_often_as_it_says():
    wanted, kept, shares = 0.97, 0, []
    grid = torch.linspace(0.5, 1, 20001, dtype=torch.float64)
    weight = 2 / 3 * (2 * (1 - grid)).clamp_min(1e-9) ** (-2 / 3)  # the density of the confidence
    for seed in range(60):
        found = answer_above(*population(1500, seed), wanted)
        above = grid >= found.threshold
        true = float((grid**2 * weight)[above].sum() / weight[above].sum())
        kept += true >= wanted
        shares.append(found.answered)
    assert kept / 60 >= 0.87  # 0.95, less three standard errors
    assert 0.35 < np.mean(shares) < 0.49  # 0.49 is the largest share that reaches 0.97: 1 - s^3 / 4


def test_a_threshold_that_does_not_exist():
    confidence, _ = population(2000, 0)
    with pytest.raises(DataError, match=r"no confidence reaches .* 0\.99"):
        answer_above(confidence, torch.arange(2000) % 5 > 0, 0.99)


def test_too_few_examples_say_how_many():
    needed = least_answered(0.99, 0.05)
    assert 0.99**needed <= 0.05 < 0.99 ** (needed - 1)
    with pytest.raises(DataError, match=f"takes {needed}"):
        answer_above(torch.rand(100), torch.ones(100, dtype=torch.bool), 0.99)
    assert answer_above(torch.rand(needed), torch.ones(needed, dtype=torch.bool), 0.99).answered == 1


def test_equal_confidences_are_answered_together():
    confidence = torch.cat([torch.full((600,), 0.9), torch.full((400,), 0.6)])
    right = torch.cat([torch.ones(600), torch.arange(400) % 2]).bool()
    found = answer_above(confidence, right, 0.98)
    assert found.answered == 0.6 and 0.9 - 2e-6 < found.threshold < 0.9


@pytest.mark.parametrize(("threshold", "answered"), [(0.6, 2), (0.99, 0)])
def test_where_nothing_is_answered_nothing_is_right(threshold, answered):
    p, y = torch.tensor([[0.9, 0.1], [0.3, 0.7], [0.5, 0.5]]), torch.tensor([0, 0, 1])
    promise = AnswerAbove(0.95, threshold, measured=0.97, answered=0.8, bound=0.96, confidence=0.95, examples=100)
    found = measured(lambda x: mean_predict(nn.Identity(), x), lambda: [(p.log(), y)], Classification(), promise)
    assert found == {"accuracy": 0.5 if answered else None, "answered": pytest.approx(answered / 3)}
    row = certainty({"promises": {"answer_above": {"mean": {**promise.to_dict(), "test": found}}}}, None)
    assert ("50 %" in row, "–" in row, "100 %" in row) == (bool(answered), not answered, False)


@pytest.mark.parametrize("accuracy", [0, 1, 1.2])
def test_impossible_accuracies(accuracy):
    with pytest.raises(UsageError, match="accuracy"):
        answer_above(torch.rand(10), torch.ones(10).bool(), accuracy)


def test_a_confidence_of_nan_is_refused():
    """Sorted, NaN would be above all confidences; compared with a threshold, below."""
    confidence, right = torch.rand(200), torch.ones(200, dtype=torch.bool)
    confidence[:60] = torch.nan
    with pytest.raises(DataError, match="confidence: 60 of 200 values are NaN"):
        answer_above(confidence, right, 0.9)


def test_what_float32_cannot_tell_apart_is_answered_together():
    """The outputs of a file are float32: all confidences above 1 - 3e-8 are 1 there."""
    generator = torch.Generator().manual_seed(0)

    def drawn():
        gap = torch.cat([19 + torch.rand(1000, generator=generator), 24 + torch.rand(1000, generator=generator)]).double()
        right = torch.cat([torch.rand(1000, generator=generator) < 0.8, torch.ones(1000, dtype=torch.bool)])
        return gap.sigmoid(), right

    with pytest.raises(DataError, match="no confidence reaches"):
        answer_above(*drawn(), 0.95)
    found = answer_above(*drawn(), 0.85)
    confidence, right = drawn()
    for seen in (confidence, confidence.float().double()):
        answered = seen >= found.threshold
        assert bool(answered.all()) and float(right[answered].double().mean()) > 0.85


def test_rounding_moves_no_example_across_the_threshold():
    """Few distinct inputs, as in a table of categories: each has many examples, with one confidence up to rounding."""
    generator = torch.Generator().manual_seed(0)
    groups = torch.linspace(0.4, 0.999, 24, dtype=torch.float64)
    confidence = groups.repeat_interleave(100)
    right = torch.rand(2400, generator=generator) < confidence
    for accuracy in (0.7, 0.8, 0.9):
        found = answer_above(confidence, right, accuracy)
        for factor in (1 - 1e-6, 1 + 1e-6):
            doubt = (1 - confidence) * factor
            assert float(((1 - doubt).float() >= found.threshold).double().mean()) == found.answered


def test_many_distinct_confidences_are_still_told_apart():
    generator = torch.Generator().manual_seed(0)
    confidence = 1 - 0.1 * torch.rand(10_000, generator=generator, dtype=torch.float64) ** 2
    right = torch.rand(10_000, generator=generator) < confidence
    found = answer_above(confidence, right, 0.98)
    exact = (confidence > found.threshold).double().mean()
    assert found.answered == pytest.approx(float(exact)) and 0.5 < found.answered < 0.95
