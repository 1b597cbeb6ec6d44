"""Step sizes, against trying every size one weight at a time."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import nn

import svdcompress as svdc
from svdcompress.errors import UsageError
from svdcompress.export import importance, round_weights
from svdcompress.export._rounding import codes, steps


def slow(channel, bits, counts):
    """(step, error) of the best step for one channel, given lists of floats."""
    last = 2 ** (bits - 1) - 1
    best = None
    for hundredths in range(100, 49, -2):
        step = max(abs(w) for w in channel) * hundredths / 100 / last
        if step == 0:
            return 0.0, 0.0
        error = 0.0
        for w, count in zip(channel, counts, strict=True):
            level = min(range(-last, last + 1), key=lambda k: abs(k * step - w))
            error += count * (level * step - w) ** 2
        if best is None or error < best[1] * (1 - 1e-9):
            best = (step, error)
    return best


@pytest.mark.parametrize("bits", [2, 3, 4, 5])
@pytest.mark.parametrize("axis", [0, 1])
def test_steps_are_the_best_of_those_tried(bits, axis):
    random = np.random.default_rng(bits)
    array, counts = random.normal(size=(5, 7)).astype(np.float32), random.uniform(0.1, 5, (5, 7))
    array[2, :] = array[:, 3] = 0
    for given in (None, counts):
        found = steps(array, bits, axis, given)
        assert found.shape == ((5, 1) if axis == 0 else (1, 7))
        for place in range(array.shape[axis]):
            channel = [float(w) for w in array.take(place, axis)]
            told = [1.0] * len(channel) if given is None else [float(c) for c in given.take(place, axis)]
            step, error = slow(channel, bits, told)
            ours = float(found.reshape(-1)[place])
            off = codes(np.array(channel), np.array(ours), bits) * ours - channel
            assert (np.array(told) * off**2).sum() == pytest.approx(error, rel=1e-6, abs=1e-12)
            assert ours == pytest.approx(step, rel=1e-6)


def test_many_bits_reach_to_the_largest_weight():
    array = np.random.default_rng(0).normal(size=(4, 50))
    assert np.allclose(steps(array, 8)[:, 0] * 127, np.abs(array).max(1))
    assert np.abs(codes(array, steps(array, 4), 4)).max() <= 7


def test_importance_is_one_over_the_variance():
    torch.manual_seed(0)
    model = svdc.convert(nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Conv1d(5, 3, 1)))
    with torch.no_grad():
        model[0].log_sigma2.uniform_(-9, -3)
        model[2].log_sigma2.fill_(-torch.inf)
    found = importance(model)
    assert set(found) == {"0.weight", "2.weight"} and np.isfinite(found["2.weight"]).all()
    for i, j in itertools.product(range(5), range(6)):
        assert found["0.weight"][i, j] == pytest.approx(float(np.exp(-model[0].log_sigma2[i, j].item())), rel=1e-5)
    assert importance(nn.Linear(2, 2)) == {}


def test_weights_that_the_data_know_well_are_rounded_better():
    def rounded(by):
        torch.manual_seed(0)
        model = svdc.convert(nn.Sequential(nn.Linear(40, 6)))
        with torch.no_grad():
            model[0].weight.normal_()
            model[0].log_sigma2[:, :10] = -12.0
            model[0].log_sigma2[:, 10:] = -6.0
        before = model[0].weight.detach().clone()
        after = round_weights(model, 3, by=by)[0].weight.detach()
        return (after - before) ** 2

    off = {by: rounded(by) for by in ("posterior", "errors", "largest")}
    sure = {by: float(each[:, :10].sum()) for by, each in off.items()}
    assert sure["posterior"] < sure["errors"] and float(off["errors"].sum()) < float(off["largest"].sum())
    with pytest.raises(UsageError, match="by: 'luck' is unknown; one of posterior"):
        round_weights(svdc.convert(nn.Sequential(nn.Linear(2, 2))), 3, by="luck")
