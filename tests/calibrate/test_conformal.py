"""Sets and intervals against loops over the papers' definitions, and their coverage on new data."""

import math
import warnings

import numpy as np
import pytest
import torch

from svdcompress.calibrate import conformal_intervals, conformal_sets, from_dict
from svdcompress.calibrate._conformal import least_examples, quantile
from svdcompress.errors import DataError, UsageError


def random_probabilities(n, classes=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    p = (2 * torch.randn(n, classes, generator=generator, dtype=torch.float64)).softmax(1)
    return p, torch.multinomial(p.sqrt() / p.sqrt().sum(1, keepdim=True), 1, generator=generator).squeeze(1)


def slow_score(p, label, penalty=0.0, free=1):
    order = sorted(range(len(p)), key=lambda k: (-p[k], k))
    rank = order.index(label)
    return sum(p[k] for k in order[:rank]) + penalty * max(rank + 1 - free, 0)


@pytest.mark.parametrize(("penalty", "free"), [(0.0, 1), (0.1, 2)])
def test_sets_are_the_papers(penalty, free):
    p, y = random_probabilities(99)
    found = conformal_sets(p, y, 0.9, penalty=penalty, free=free)
    ordered = sorted(slow_score(row.tolist(), int(label), penalty, free) for row, label in zip(p, y, strict=True))
    assert found.limit == pytest.approx(ordered[math.ceil(100 * 0.9) - 1], abs=1e-12)
    fresh, _ = random_probabilities(20, seed=1)
    for row, held in zip(fresh, found.sets(fresh), strict=True):
        wanted = [slow_score(row.tolist(), k, penalty, free) <= found.limit + 1e-12 for k in range(6)]
        assert held.tolist() == wanted and wanted[int(row.argmax())]


def test_classes_along_another_dimension():
    p, y = random_probabilities(99)
    found = conformal_sets(p, y, 0.8)
    maps = p[:12].view(3, 4, 6).permute(0, 2, 1)
    assert torch.equal(found.sets(maps).permute(0, 2, 1).reshape(12, 6), found.sets(p[:12]))


@pytest.mark.parametrize("coverage", [0.8, 0.95])
def test_the_coverage_is_kept_on_average_by_a_wrong_model(coverage):
    rates = []
    for seed in range(60):
        p, y = random_probabilities(700, seed=seed)
        found = conformal_sets(p[:200], y[:200], coverage)
        rates.append(float(found.sets(p[200:]).gather(1, y[200:, None]).double().mean()))
    assert np.mean(rates) >= coverage - 0.006  # three standard errors
    assert np.mean(rates) <= coverage + 0.06


def test_intervals_cover_and_follow_the_deviation():
    rates = []
    for seed in range(60):
        generator = torch.Generator().manual_seed(seed)
        deviation = torch.rand(600, generator=generator, dtype=torch.float64) + 0.1
        y = 3 * deviation * torch.randn(600, generator=generator, dtype=torch.float64)
        found = conformal_intervals(torch.zeros(200), deviation[:200], y[:200], 0.9)
        low, high = found.intervals(torch.zeros(400), deviation[200:])
        rates.append(float(((low <= y[200:]) & (y[200:] <= high)).double().mean()))
        assert torch.allclose((high - low) / deviation[200:], torch.tensor(2 * found.width, dtype=torch.float64))
    assert np.mean(rates) == pytest.approx(0.9, abs=0.012)


def test_the_quantile_is_of_n_plus_one():
    values = torch.arange(1.0, 10.0)  # 1 to 9
    assert quantile(values, 0.9) == 9.0
    assert quantile(values, 0.5) == 5.0
    with pytest.raises(DataError, match="takes 9"):
        quantile(values[:8], 0.9)


@pytest.mark.parametrize(("coverage", "count"), [(0.9, 9), (0.95, 19), (0.99, 99), (0.5, 1), (0.999, 999)])
def test_how_many_examples_it_takes(coverage, count):
    assert least_examples(coverage) == count
    assert math.ceil((count + 1) * coverage - 1e-9) <= count
    assert count == 1 or math.ceil(count * coverage - 1e-9) > count - 1


@pytest.mark.parametrize("coverage", [0, 1, 1.5, -0.1, True, "0.9", float("nan")])
def test_impossible_coverages(coverage):
    p, y = random_probabilities(50)
    with pytest.raises(UsageError, match="coverage"):
        conformal_sets(p, y, coverage)


def test_missing_classes_are_told():
    p, y = random_probabilities(200)
    keep = y != 2
    with pytest.warns(UserWarning, match="class 2"):
        found = conformal_sets(p[keep], y[keep], 0.9)
    assert found.missing == (2,)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert conformal_sets(p, y, 0.9).missing == ()


def test_stored_and_read_again():
    p, y = random_probabilities(200)
    for found in (conformal_sets(p, y, 0.9), conformal_intervals(p[:, 0], p[:, 1], y, 0.9)):
        assert from_dict(found.to_dict()) == found


@pytest.mark.parametrize("shape", [(60,), (60, 1)])
def test_columns_are_not_spread_over_rows(shape):
    torch.manual_seed(0)
    mean, deviation, targets = torch.randn(60), torch.rand(60) + 0.1, torch.randn(60)
    ratios = sorted(abs(t - m) / d for t, m, d in zip(targets.tolist(), mean.tolist(), deviation.tolist(), strict=True))
    for other in [(60,), (60, 1)]:
        found = conformal_intervals(mean.view(shape), deviation.view(other), targets.view(other), 0.9)
        assert found.width == pytest.approx(ratios[math.ceil(61 * 0.9) - 1])
        low, high = found.intervals(mean.view(shape), deviation.view(other))
        assert low.shape == high.shape == torch.Size(shape)
        torch.testing.assert_close((high - low).flatten() / 2, found.width * deviation)
    low, _ = found.intervals(mean.view(shape), torch.tensor(2.0))  # one deviation for all
    torch.testing.assert_close(low, mean.view(shape) - 2 * found.width)
    with pytest.raises(UsageError, match=r"deviation: of shape \(7,\); the mean is of shape \(60"):
        found.intervals(mean.view(shape), deviation[:7])
    with pytest.raises(UsageError, match=r"deviation: of shape \(2, 30\)"):
        found.intervals(mean.view(30, 2), deviation.view(2, 30))  # as many, but others
    with pytest.raises(UsageError, match="targets: of shape"):
        conformal_intervals(mean.view(shape), deviation.view(shape), targets[:59], 0.9)


def test_nan_promises_nothing():
    p, y = random_probabilities(100)
    few, many = p.clone(), p.clone()
    few[:2], many[:30] = math.nan, math.nan
    assert conformal_sets(few, y, 0.9).limit >= conformal_sets(p, y, 0.9).limit  # as if these were never covered
    with pytest.raises(DataError, match=r"0\.9 cannot be promised: 30 of 100 validation scores are NaN"):
        conformal_sets(many, y, 0.9)
    with pytest.raises(DataError, match="are NaN"):
        conformal_intervals(many[:, 0], p[:, 1], p[:, 2], 0.9)


def test_labels_of_sets_fit_or_are_refused():
    p = torch.rand(60, 3, generator=torch.Generator().manual_seed(0))
    p = p / p.sum(1, keepdim=True)
    labels = torch.arange(60) % 3
    assert conformal_sets(p, labels[:, None], 0.8) == conformal_sets(p, labels, 0.8)
    for wrong in (labels - 1, labels + 1, labels[:50]):
        with pytest.raises(DataError, match="labels"):
            conformal_sets(p, wrong, 0.8)
    for odd in (p[:, 0], p[:, :1], p.view(60, 3, 1)):
        with pytest.raises(UsageError, match="classes"):
            conformal_sets(odd, labels, 0.8)


def test_each_width_is_of_one_target():
    mean, deviation = torch.randn(60, 2), torch.ones(60, 2)
    found = conformal_intervals(mean, deviation, mean + torch.tensor([0.1, 3.0]), 0.8)
    lower, upper = found.intervals(mean, deviation)
    assert lower.shape == mean.shape and len(found.widths) == 2 and bool((upper - lower)[0, 0] < (upper - lower)[0, 1])
    for other in (mean[:, :1], mean[0], torch.randn(5, 3)):
        with pytest.raises(UsageError, match="2 targets"):
            found.intervals(other, torch.ones_like(other))
    with pytest.raises(UsageError, match="targets: of shape"):
        conformal_intervals(mean, deviation, mean[:1], 0.8)
