"""What mc_predict and mean_predict refuse, and internal details they keep from the user."""

import math

import numpy as np
import pytest
import torch
from small_models import mlp, widen
from torch import nn

import svdcompress as svdc
from svdcompress.errors import DataError, ModelError, UsageError
from svdcompress.uncertainty import Prediction, mc_predict, mean_predict


def test_both_are_at_the_front():
    assert svdc.mc_predict is mc_predict and svdc.mean_predict is mean_predict


@pytest.mark.parametrize("samples", [0, -3, 2.5, "ten", True, None])
def test_samples_must_be_a_whole_number_above_zero(classifier, x, samples):
    with pytest.raises(UsageError, match="samples"):
        mc_predict(classifier, x, samples)


@pytest.mark.parametrize("method", ["sampling", "moments"])
@pytest.mark.parametrize("samples", [10**20, 10_000_001, 10**5000], ids=["10^20", "limit", "longer than an int prints"])
def test_samples_without_end_are_refused(classifier, x, samples, method):
    with pytest.raises(UsageError, match="at most 10,000,000"):
        mc_predict(classifier, x, samples, method=method)


def test_numpy_integers_are_whole_numbers(classifier, x):
    assert mc_predict(classifier, x, np.int64(3)).samples == 3


def test_a_model_without_noise_is_refused(x):
    with pytest.raises(ModelError, match="no uncertainty to sample"):
        mc_predict(mlp(4, 3), x)
    with pytest.raises(ModelError, match="no uncertainty to sample"):
        mc_predict(nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)), x)


@pytest.mark.parametrize(
    "inputs, message",
    [
        (torch.zeros(0, 4), "batch of 0"),
        (torch.full((2, 4), float("nan")), "8 of the 8 values are not finite"),
        (torch.zeros(2, 5), "does not fit Sequential"),
        (torch.tensor(1.0), "single number"),
        ((torch.zeros(2, 4), torch.zeros(2, 4)), "does not fit Sequential"),
    ],
    ids=["empty", "nan", "shape", "scalar", "too many"],
)
def test_inputs_that_do_not_fit(classifier, inputs, message):
    with pytest.raises(DataError, match=message):
        mc_predict(classifier, inputs)


def test_arguments_that_do_not_go_together(classifier, x):
    for error, kwargs in [
        (UsageError, {"task": "ranking"}),
        (UsageError, {"method": "magic"}),
        (UsageError, {"antithetic": True, "samples": 5}),
        (UsageError, {"tau": 1.0}),
        (UsageError, {"task": "regression", "tau": -1.0}),
        (UsageError, {"chunk": 0}),
        (UsageError, {"chunk": 2.5}),
        (UsageError, {"chunk": True}),
        (UsageError, {"generator": 3}),
        (UsageError, {"task": "regression", "tau": "one"}),
        (UsageError, {"task": "regression", "tau": torch.ones(2)}),
        (UsageError, {"task": "regression", "tau": float("nan")}),
        (ModelError, {"task": "gaussian"}),
    ]:
        with pytest.raises(error):
            mc_predict(classifier, x, **kwargs)
    with pytest.raises(UsageError, match="without a tensor"):
        mc_predict(classifier, [1, 2])
    with pytest.raises(ModelError, match="two logits or more"):
        mc_predict(widen(svdc.convert(mlp(4, 1))), x)
    classifier[0].weight.data.fill_(float("inf"))
    with pytest.raises(ModelError, match="not finite"):
        mc_predict(classifier, x)


@pytest.mark.parametrize("dim", [0, 2, 5, -2, -3])
def test_the_class_dimension_is_one_of_the_outputs_and_not_the_batch(classifier, x, dim):
    with pytest.raises(UsageError, match=r"dim: .* of an output with 2 dimensions is 1 to 1"):
        mc_predict(classifier, x, dim=dim)


def test_a_class_dimension_counted_from_the_end():
    model = widen(svdc.convert(nn.Sequential(nn.Conv2d(1, 3, 3))))
    inputs = torch.randn(2, 1, 6, 5)
    generator = lambda: torch.Generator().manual_seed(0)  # noqa: E731
    got, want = (mc_predict(model, inputs, 6, dim=dim, generator=generator()) for dim in (-3, 1))
    assert torch.equal(got.mean, want.mean) and torch.equal(got.entropy, want.entropy)
    last = mc_predict(model, inputs, 6, dim=-1)
    torch.testing.assert_close(last.mean.sum(-1), torch.ones(2, 3, 4).double())
    for dim in (0, 4, -4):
        with pytest.raises(UsageError, match="dim"):
            mc_predict(model, inputs, 6, dim=dim)


@pytest.mark.parametrize("temperature", [0, -1.0, math.nan, math.inf])
def test_a_temperature_is_above_zero(classifier, x, temperature):
    with pytest.raises(UsageError, match="temperature"):
        mean_predict(classifier, x, temperature=temperature)


@pytest.mark.parametrize("task", ["regression", "gaussian"])
def test_values_have_no_temperature(x, task):
    model = widen(svdc.convert(mlp(4, 2)))
    with pytest.raises(UsageError, match=f"task '{task}' has no logits"):
        mean_predict(model, x, task=task, temperature=2.0)
    assert mean_predict(model, x, task=task, temperature=1).samples == 1


def test_a_variance_that_overflows_is_told(x):
    model = svdc.convert(nn.Sequential(nn.Linear(4, 2)), log_sigma2=-8.0)
    model[0].bias.data[1] = 1e4
    with pytest.raises(ModelError, match="not finite"):
        mc_predict(model, x, 3, task="gaussian")


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("samples", [1, 7, 97])
def test_no_standard_deviation_is_nan(x, full, samples):
    """Rounding makes variances that should be 0 slightly negative: for irrelevant weights, and for certain classes."""
    constant = svdc.convert(nn.Sequential(nn.Linear(4, 3)), log_sigma2=12.0)
    certain = svdc.convert(nn.Sequential(nn.Linear(4, 3)), log_sigma2=-8.0)
    certain[0].weight.data *= 30
    inputs = torch.cat([x * scale for scale in torch.linspace(0.1, 3, 50)])
    for model in (constant, certain):
        got = mc_predict(model, inputs, samples, full=full)
        assert not got.std.isnan().any() and not got.epistemic_std.isnan().any()
        diagonal = (lambda t: t.diagonal(dim1=1, dim2=2)) if full else (lambda t: t)
        assert (diagonal(got.epistemic) >= 0).all() and (got.mutual_information >= 0).all()
        if not full:
            assert (got.aleatoric >= 0).all() and (got.variance >= 0).all()


def test_rounding_below_zero_is_no_deviation():
    matrices = torch.diag_embed(torch.tensor([[-1e-18, 0.25]]).double())
    got = Prediction("classification", 2, torch.zeros(1, 2), matrices, matrices, matrices, full=True)
    assert got.std.tolist() == got.epistemic_std.tolist() == [[0.0, 0.5]]


def test_the_mean_prediction_is_without_noise_under_sampling(classifier, x):
    want = mean_predict(classifier, x).mean
    with svdc.sampling(classifier) as sampler:
        got = mean_predict(classifier, x).mean
        assert classifier[0].sampler is sampler
        assert not torch.equal(classifier(x).softmax(1).double(), want)
    assert torch.equal(got, want)
