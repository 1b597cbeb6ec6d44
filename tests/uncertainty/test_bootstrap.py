"""The paired bootstrap against figures recomputed for each drawn test set."""

import numpy as np
import pytest
import torch

from svdcompress.errors import UsageError
from svdcompress.uncertainty import paired_bootstrap, quality, regression_quality, significant
from svdcompress.uncertainty._bootstrap import totals_of_probabilities, totals_of_values

ALONE = torch.arange


def predicted(n, seed, sharp=2.0, classes=4):
    """Labels, and probabilities that are informative about them."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (n,), generator=generator)
    logits = torch.randn(n, classes, generator=generator)
    logits[torch.arange(n), labels] += sharp
    return logits.softmax(1), labels


def test_totals_give_the_figures_of_the_set():
    p, labels = predicted(500, 0)
    found = totals_of_probabilities(p, labels, ALONE(500), 500).figures()
    assert {name: float(value) for name, value in found.items()} == pytest.approx(quality(p, labels), rel=1e-5)
    yes, answers = p[:, 0], (labels == 0).long()
    found = totals_of_probabilities(yes, answers, ALONE(500), 500).figures()
    assert {name: float(value) for name, value in found.items()} == pytest.approx(quality(yes, answers), rel=1e-5)
    mean, variance, target = torch.randn(3, 300, generator=torch.Generator().manual_seed(1))
    found = totals_of_values(mean, variance.abs(), target, ALONE(300), 300).figures()
    assert {k: float(v) for k, v in found.items()} == pytest.approx(regression_quality(mean, variance.abs(), target), rel=1e-6)


def test_weights_count_an_input_as_often_as_they_say():
    p, labels = predicted(90, 3)
    owner = torch.arange(30).repeat_interleave(3)  # three labels for each input
    drawn = torch.tensor([4, 4, 7, 29, 0, 4])
    weights = torch.bincount(drawn, minlength=30).double()[None]
    found = totals_of_probabilities(p, labels, owner, 30).figures(weights)
    rows = torch.cat([(owner == input_).nonzero().flatten() for input_ in drawn])
    assert {k: float(v) for k, v in found.items()} == pytest.approx(quality(p[rows], labels[rows]), rel=1e-5)


def test_intervals_are_those_of_test_sets_drawn_one_by_one():
    p, labels = predicted(200, 0)
    q, _ = predicted(200, 0, sharp=1.0)
    totals = {name: [totals_of_probabilities(each, labels, ALONE(200), 200)] for name, each in (("a", p), ("b", q))}
    found = paired_bootstrap(totals, "a", 2000)
    rng, slow = np.random.default_rng(1), {name: [] for name in quality(p, labels)}
    for _ in range(2000):
        index = torch.from_numpy(rng.integers(0, 200, 200))
        a, b = quality(p[index], labels[index]), quality(q[index], labels[index])
        for name, values in slow.items():
            values.append(b[name] - a[name])
    a, b = quality(p, labels), quality(q, labels)
    for name, values in slow.items():
        low, high = np.quantile(values, [0.025, 0.975])
        assert found["b"][name]["value"] == pytest.approx(b[name] - a[name], abs=1e-5)
        assert found["b"][name]["low"] == pytest.approx(low, abs=0.12 * (high - low)), name
        assert found["b"][name]["high"] == pytest.approx(high, abs=0.12 * (high - low)), name
    assert all(entry == {"value": 0, "low": 0, "high": 0} for entry in found["a"].values())


def test_models_that_are_equally_good_are_seldom_told_apart():
    false, sets = 0, 120
    for seed in range(sets):
        labels = predicted(150, seed)[1]
        noise = torch.Generator().manual_seed(1000 + seed)
        totals = {}
        for name in ("a", "b"):
            logits = torch.randn(150, 4, generator=noise)
            logits[torch.arange(150), labels] += 2
            totals[name] = [totals_of_probabilities(logits.softmax(1), labels, ALONE(150), 150)]
        false += significant(paired_bootstrap(totals, "a", 200)["b"]["nll"]) != 0
    assert false / sets < 0.12  # 0.05 expected


def test_several_sets_of_the_same_inputs_are_averaged():
    (p, labels), (q, _) = predicted(80, 0), predicted(80, 5)
    one, other = (totals_of_probabilities(each, labels, ALONE(80), 80) for each in (p, q))
    found = paired_bootstrap({"a": [one, other], "b": [other, other]}, "a", 100)
    want = quality(q, labels)["nll"] - (quality(p, labels)["nll"] + quality(q, labels)["nll"]) / 2
    assert found["b"]["nll"]["value"] == pytest.approx(want)


def test_what_cannot_be_compared_is_refused():
    p, labels = predicted(60, 0)
    totals = totals_of_probabilities(p, labels, ALONE(60), 60)
    fewer = totals_of_probabilities(p[:50], labels[:50], ALONE(50), 50)
    with pytest.raises(UsageError, match="50, 60 inputs"):
        paired_bootstrap({"a": [totals], "b": [fewer]}, "a")
    with pytest.raises(UsageError, match="replicates: 10"):
        paired_bootstrap({"a": [totals]}, "a", 10)


def test_a_sign_is_known_where_the_interval_leaves_out_0():
    assert significant({"value": 1, "low": 0.1, "high": 2}) == 1
    assert significant({"value": -1, "low": -2, "high": -0.1}) == -1
    assert significant({"value": 1, "low": -0.1, "high": 2}) == 0
