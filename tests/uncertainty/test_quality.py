"""Scores and calibration against loops, torchmetrics, scikit-learn and closed forms."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from svdcompress.errors import DataError, UsageError
from svdcompress.uncertainty import (
    auroc,
    fit_tau,
    fit_temperature,
    paired_rmse,
    paired_shares,
    quality,
    r2,
    regression_quality,
    rejection,
    reliability,
    selective,
)
from svdcompress.uncertainty._bootstrap import totals_of_probabilities


def random_predictions(n=400, classes=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(n, classes, generator=generator, dtype=torch.float64)
    return logits, torch.multinomial((0.7 * logits).softmax(1), 1, generator=generator).squeeze(1)


def ece_by_hand(p, labels, bins=15):
    total = 0.0
    for k in range(bins):
        inside = [
            (float(row.max()), int(row.argmax()) == int(label))
            for row, label in zip(p, labels, strict=True)
            if k / bins <= row.max() < (k + 1) / bins or (k == bins - 1 and row.max() == 1)
        ]
        if inside:
            total += abs(np.mean([c for c, _ in inside]) - np.mean([r for _, r in inside])) * len(inside) / len(p)
    return total


def test_scores_by_hand():
    logits, labels = random_predictions()
    p = logits.softmax(1)
    p[:20] = F.one_hot(torch.arange(20) % 5, 5).double()  # confidences of exactly 1 belong to the last bin
    labels[:20] = torch.arange(20) // 2 % 5
    p[:20] = 0.999 * p[:20] + 0.001 / 5
    p[:10] = F.one_hot(labels[:10], 5).double()
    got = quality(p, labels)
    one_hot = F.one_hot(labels, 5)
    assert got["error"] == pytest.approx(100 * np.mean([int(r.argmax()) != int(y) for r, y in zip(p, labels, strict=True)]))
    assert got["nll"] == pytest.approx(-np.mean([math.log(r[y]) for r, y in zip(p, labels, strict=True)]))
    assert got["brier"] == pytest.approx(float(((p - one_hot) ** 2).sum(1).mean()))
    assert got["ece"] == pytest.approx(ece_by_hand(p, labels), abs=1e-6)


def test_the_diagram_adds_up_to_the_error():
    logits, labels = random_predictions()
    p = logits.softmax(1)
    diagram = reliability(p, labels)
    assert sum(diagram["count"]) == len(p) and len(diagram["edges"]) == 16
    gaps = [
        n * abs(right - sure)
        for n, sure, right in zip(diagram["count"], diagram["confidence"], diagram["accuracy"], strict=True)
        if n
    ]
    assert sum(gaps) / len(p) == pytest.approx(quality(p, labels)["ece"], abs=1e-6)
    assert all((c is None) == (n == 0) for c, n in zip(diagram["confidence"], diagram["count"], strict=True))


def test_one_probability_means_yes():
    p, labels = torch.tensor([0.9, 0.2, 0.6, 0.3]).double(), torch.tensor([1, 0, 0, 1])
    both = quality(torch.stack([1 - p, p], 1), labels)
    assert quality(p, labels) == both == quality(p[:, None], labels[:, None])
    assert both["error"] == 50


@pytest.mark.parametrize("labels", [[0, 3], [-1, 0], [0], []])
def test_labels_that_do_not_fit(labels):
    with pytest.raises(DataError, match="labels"):
        quality(torch.full((2, 3), 1 / 3), torch.tensor(labels, dtype=torch.long))


def test_rejection_by_hand():
    score = torch.tensor([0.1, 0.9, 0.5, 0.3, 0.7])
    wrong = torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0])
    curve = rejection(score, wrong, steps=5)
    assert curve["rejected"] == [0.0, 0.2, 0.4, 0.6, 0.8]
    assert curve["loss"] == pytest.approx([3 / 5, 2 / 4, 1 / 3, 1 / 2, 0.0])


def test_auroc_is_the_share_of_pairs_in_order():
    generator = torch.Generator().manual_seed(0)
    inside = torch.randint(0, 40, (30,), generator=generator) * 1e-9  # scores are compared at full precision
    outside = torch.randint(20, 60, (50,), generator=generator) * 1e-9
    pairs = [(1.0 if b > a else 0.5 if a == b else 0.0) for a in inside.tolist() for b in outside.tolist()]
    assert auroc(inside, outside) == pytest.approx(np.mean(pairs), abs=1e-6)
    assert auroc(1000 + inside, 1000 - 1e-3 + outside) < 0.01


def test_temperature_against_a_fine_grid():
    logits, labels = random_predictions(2000)
    fitted = fit_temperature(logits, labels)
    grid = torch.linspace(0.5, 4, 3501, dtype=torch.float64)
    losses = torch.stack([F.cross_entropy(logits / t, labels) for t in grid])
    assert fitted == pytest.approx(float(grid[losses.argmin()]), abs=2e-3)
    assert fitted == pytest.approx(1 / 0.7, rel=0.1)  # the labels were drawn with this


def test_temperature_of_one_logit_and_of_a_perfect_network():
    generator = torch.Generator().manual_seed(0)
    z = 3 * torch.randn(5000, 1, generator=generator, dtype=torch.float64)
    labels = (torch.rand(5000, 1, generator=generator) < (z / 2).sigmoid()).long()
    assert fit_temperature(z, labels) == pytest.approx(2, rel=0.1)
    assert fit_temperature(z, labels) == pytest.approx(fit_temperature(torch.cat([0 * z, z], 1), labels))
    assert fit_temperature(z, (z > 0).long()) == pytest.approx(0.01, rel=1e-6)


def test_the_temperature_of_logits_that_rule_classes_out():
    """An impossible class has no effect: the temperature is that of the others."""
    logits, labels = random_predictions(2000)
    gone = torch.full((len(logits), 1), -math.inf, dtype=logits.dtype)
    assert fit_temperature(torch.cat([logits, gone], 1), labels) == pytest.approx(fit_temperature(logits, labels), rel=1e-9)


@pytest.mark.parametrize(
    ("value", "message"), [(math.nan, "NaN or"), (math.inf, "NaN or"), (-math.inf, "1 of them belong to a class")]
)
def test_logits_that_no_temperature_fits(value, message):
    logits, labels = random_predictions(50)
    logits[3, labels[3]] = value
    with pytest.raises(DataError, match=message):
        fit_temperature(logits, labels)


def test_regression_scores_by_hand():
    mean, variance, target = torch.tensor([0.0, 1.0, 2.0]), torch.tensor([1.0, 4.0, 0.25]), torch.tensor([1.0, 1.0, 4.0])
    got = regression_quality(mean, variance, target)
    assert got["rmse"] == pytest.approx(math.sqrt(5 / 3))
    normal = torch.distributions.Normal(mean.double(), variance.double().sqrt())
    assert got["nll"] == pytest.approx(float(-normal.log_prob(target.double()).mean()))
    assert got["coverage"] == pytest.approx(2 / 3)


def test_tau_is_the_precision_of_the_noise():
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(20_000, generator=generator, dtype=torch.float64)
    epistemic = torch.rand(20_000, generator=generator, dtype=torch.float64)
    noise = torch.randn(20_000, generator=generator, dtype=torch.float64)
    assert fit_tau(mean, epistemic * 0, mean + 0.5 * noise) == pytest.approx(4, rel=0.05)
    assert 1 / fit_tau(mean, 0 * mean, mean + noise) == pytest.approx(float(noise.square().mean()), rel=1e-5)
    assert fit_tau(mean, epistemic, mean + (epistemic + 0.25).sqrt() * noise) == pytest.approx(4, rel=0.1)


@pytest.mark.parametrize("error", [0.0, 1e-160, 1e-149, 1e-140])
def test_a_regression_without_errors_has_a_noise_precision(error):
    zeros = torch.zeros(5, dtype=torch.float64)
    assert 1e270 < fit_tau(zeros, zeros, zeros + error) < 1e300


def test_scores_of_nan_have_no_rank():
    with pytest.raises(DataError, match="outside: 1 of 3 scores are NaN"):
        auroc(torch.rand(4), torch.tensor([0.1, torch.nan, 0.3]))


def test_columns_are_rows():
    """A network with one output predicts (N, 1), beside targets (N,): spread over (N, N), figures would be of other pairs."""
    draw = torch.Generator().manual_seed(0)
    mean, variance, target = (torch.randn(60, generator=draw) for _ in range(3))
    variance = variance.exp()
    squares = (target - mean).square()
    figures, curve = regression_quality(mean, variance, target), rejection(variance, squares)
    answered, taus = selective(variance, squares, [0.5]), fit_tau(mean, variance, target)
    moved = paired_rmse(squares, variance)
    column = lambda values: values[:, None]  # noqa: E731
    for a, b, c in itertools.product((column, torch.clone), repeat=3):
        assert regression_quality(a(mean), b(variance), c(target)) == figures
        assert rejection(a(variance), b(squares)) == curve and selective(a(variance), b(squares), [0.5]) == answered
        assert fit_tau(a(mean), b(variance), c(target)) == taus
        assert paired_rmse(a(squares), b(variance)) == moved
    for work in (
        lambda: regression_quality(mean, variance[:7], target),
        lambda: regression_quality(mean.view(6, 10), variance.view(6, 10), target.view(10, 6)),
        lambda: regression_quality(mean, variance, target[:1]),
        lambda: rejection(variance, squares[:7]),
        lambda: fit_tau(mean, variance, target[:7]),
        lambda: r2(mean, target[:1]),
        lambda: r2(mean, torch.stack([target, target], 1)),
        lambda: selective(variance, squares[:7]),
        lambda: paired_rmse(squares, variance[:7]),
        lambda: paired_shares(squares > 1, variance[:7] > 1),
    ):
        with pytest.raises(UsageError, match="of shape"):
            work()


def test_a_prediction_of_nan_has_no_figures():
    """The largest number of a row with NaN is NaN's place: an error counted by it would look like one."""
    p = torch.tensor([[0.9, 0.1], [math.nan, math.nan], [0.2, 0.8]])
    found = quality(p, torch.tensor([0, 0, 1]))
    assert set(found) == {"error", "nll", "brier", "ece"} and all(math.isnan(value) for value in found.values())
    resampled = totals_of_probabilities(p, torch.tensor([0, 0, 1]), torch.arange(3), 3).figures()
    assert all(bool(value.isnan().all()) for value in resampled.values())
    diagram = reliability(p, torch.tensor([0, 0, 1]))
    assert math.isnan(diagram["confidence"][-1]) and math.isnan(diagram["accuracy"][-1])


def test_labels_that_do_not_fit_the_logits_are_refused():
    logits = torch.randn(100, 3)
    for labels in (torch.zeros(1), torch.zeros(50), torch.full((100,), 3), torch.full((100,), -1)):
        with pytest.raises(DataError, match="labels"):
            fit_temperature(logits, labels)
