"""Temperature and noise precision against scipy's minimizers and loops over plain formulas."""

import math

import numpy as np
import pytest
import torch
from calibration_data import examples_of, mlp_classifier
from scipy import optimize, stats

from svdcompress.calibrate import Draws, calibrate, draws_of, fit_tempering, nll_rows
from svdcompress.errors import ModelError
from svdcompress.likelihoods import likelihood_for
from svdcompress.uncertainty import mc_predict, mean_predict

CLASSES = likelihood_for("classification")


def overconfident(factor=3.0, n=400, samples=1, classes=4, seed=0):
    """Draws of logits that are `factor` times those that the labels were drawn from."""
    generator = torch.Generator().manual_seed(seed)
    true = torch.randn(n, classes, generator=generator)
    labels = torch.multinomial(true.softmax(1), 1, generator=generator).squeeze(1)
    noise = 0.3 * torch.randn(samples, n, classes, generator=generator)
    return Draws(factor * (true + noise), labels, torch.arange(n))


def slow_nll(draws, temperature):
    total = 0.0
    for row in range(len(draws.targets)):
        p = np.mean(
            [np.exp(z / temperature) / np.exp(z / temperature).sum() for z in draws.outputs[:, row].double().numpy()], 0
        )
        total -= math.log(p[int(draws.targets[row])])
    return total


@pytest.mark.parametrize("samples", [1, 7])
def test_the_temperature_is_scipys(samples):
    draws = overconfident(samples=samples, n=120)
    found = fit_tempering(CLASSES, draws)
    wanted = optimize.minimize_scalar(
        lambda log_t: slow_nll(draws, math.exp(log_t)) + log_t**2 / 2, bounds=(-2, 2), method="bounded", options={"xatol": 1e-6}
    )
    assert found.taken
    assert math.log(found.value) == pytest.approx(wanted.x, abs=1e-3)
    assert float(nll_rows(CLASSES, draws, 0.4).sum()) == pytest.approx(slow_nll(draws, math.exp(0.4)), rel=1e-5)
    assert found.after < found.before == pytest.approx(slow_nll(draws, 1.0) / 120, rel=1e-5)


@pytest.mark.parametrize("factor", [0.02, 50.0])
def test_a_temperature_far_from_1_is_scipys(factor):
    """Logits that are 50 times too small or too large; the first grid ends at a factor of 7.4."""
    draws = overconfident(factor=factor, n=300)
    near = (math.log(factor) - 1, math.log(factor) + 1)
    wanted = optimize.minimize_scalar(
        lambda log_t: slow_nll(draws, math.exp(log_t)) + log_t**2 / 2, bounds=near, method="bounded", options={"xatol": 1e-6}
    )
    found = fit_tempering(CLASSES, draws)
    assert found.taken and math.log(found.value) == pytest.approx(wanted.x, abs=1e-3)
    assert found.value == pytest.approx(factor, rel=0.3)
    best = slow_nll(draws, math.exp(wanted.x)) / 300
    assert best < found.after < best + 0.01  # cross-validation, too, reaches such temperatures


@pytest.mark.parametrize("log_variance", [-12.0, -6.0, 9.0])
def test_a_noise_that_the_model_names_far_too_small_is_made_large_enough(log_variance):
    """As of a network that has memorized its training data: the true variance is 1."""
    y = torch.randn(500, generator=torch.Generator().manual_seed(4))
    draws = Draws(torch.stack([torch.zeros(1, 500), torch.full((1, 500), log_variance)], -1), y, torch.arange(500))
    found = fit_tempering(likelihood_for("gaussian"), draws)
    assert found.taken and math.log(found.value) + log_variance == pytest.approx(math.log(float(y.square().mean())), abs=0.06)
    assert found.after == pytest.approx(-stats.norm.logpdf(y.numpy()).mean(), abs=0.02)


def test_a_temperature_that_does_not_help_is_left_out_and_said():
    draws = overconfident(factor=1.0, n=60, seed=3)
    found = fit_tempering(CLASSES, draws)
    assert not found.taken and found.value == 1.0 and "does not improve the NLL on held-out data" in found.note


def test_few_examples_are_said():
    found = fit_tempering(CLASSES, overconfident(n=29))
    assert not found.taken and "29" in found.note and "30" in found.note


def test_no_mistake_in_the_validation_data_makes_no_certainty():
    labels = torch.arange(100) % 4
    draws = Draws(torch.nn.functional.one_hot(labels, 4).float().unsqueeze(0) * 4, labels, torch.arange(100))
    found = fit_tempering(CLASSES, draws)
    assert 0.2 < found.value < 1


def test_folds_keep_an_example_together():
    from svdcompress.calibrate._tempering import folds_of

    owner = torch.arange(40).repeat_interleave(3)
    folds = folds_of(Draws(torch.zeros(1, 120, 2), torch.zeros(120), owner))
    for example in range(40):
        assert len(set(folds[owner == example].tolist())) == 1
    assert sorted(set(folds.tolist())) == [0, 1, 2, 3, 4]


def test_binary_is_two_classes():
    generator = torch.Generator().manual_seed(1)
    z = 4 * torch.randn(5, 200, generator=generator)
    y = (torch.rand(200, generator=generator) < torch.sigmoid(z[0] / 4)).float()
    two = Draws(torch.stack([torch.zeros_like(z), z], -1), y.long(), torch.arange(200))
    assert torch.allclose(
        nll_rows(likelihood_for("binary"), Draws(z, y, torch.arange(200)), 0.7), nll_rows(CLASSES, two, 0.7), atol=1e-6
    )


def test_the_noise_of_a_regression_is_scipys():
    generator = torch.Generator().manual_seed(2)
    values = torch.randn(50, 300, generator=generator) * 0.5 + torch.linspace(-1, 1, 300)
    y = torch.linspace(-1, 1, 300) + 0.8 * torch.randn(300, generator=generator)
    mean, spread = values.double().mean(0).numpy(), values.double().numpy().var(0)
    wanted = optimize.minimize_scalar(
        lambda v: -stats.norm.logpdf(y.numpy(), mean, np.sqrt(spread + math.exp(v))).mean(), bounds=(-6, 3), method="bounded"
    )
    draws = Draws(values, y, torch.arange(300))
    found = fit_tempering(likelihood_for("regression"), draws)
    assert -math.log(found.value) == pytest.approx(wanted.x, abs=1e-3)
    fitted = nll_rows(likelihood_for("regression"), draws, -math.log(found.value)).mean()
    assert float(fitted) == pytest.approx(wanted.fun, abs=1e-6)
    assert wanted.fun < found.after < wanted.fun + 0.01  # judged on examples that it was not fitted on


@pytest.mark.parametrize("samples", [1, 5])
def test_the_temperature_of_a_noise_that_the_model_names_is_scipys(samples):
    """The true noise is 2.5 times the variance that the model gives; with 5 samples, the means differ."""
    generator = torch.Generator().manual_seed(3)
    log_variance = torch.linspace(-2, 1, 200)
    means = 0.1 * torch.randn(samples, 200, generator=generator)
    y = (2.5 * log_variance.exp()).sqrt() * torch.randn(200, generator=generator)
    draws = Draws(torch.stack([means, log_variance.expand_as(means)], -1), y, torch.arange(200))

    def slow(log_t):
        std = np.sqrt(np.exp(log_t + log_variance.double().numpy()))
        return -np.log(np.mean([stats.norm.pdf(y.numpy(), mean, std) for mean in means.double().numpy()], 0)).sum()

    wanted = optimize.minimize_scalar(lambda log_t: slow(log_t) + log_t**2 / 2, bounds=(-2, 2), method="bounded")
    found = fit_tempering(likelihood_for("gaussian"), draws)
    assert found.taken and math.log(found.value) == pytest.approx(wanted.x, abs=1e-3)
    assert math.log(found.value) == pytest.approx(math.log(2.5), abs=0.3)
    assert found.after < found.before == pytest.approx(slow(0.0) / 200, rel=1e-5)


def test_draws_are_those_of_mc_predict_and_of_the_mean():
    model, data = mlp_classifier()
    x, y = data
    draws = draws_of(model, examples_of(x, y), CLASSES, 60, seed=4)
    wanted = mc_predict(model, x, 60, generator=torch.Generator().manual_seed(4))
    assert draws.outputs.shape == (60, len(y), 3)
    assert torch.allclose(draws.outputs.double().softmax(-1).mean(0), wanted.mean, atol=1e-6)
    assert torch.equal(draws.targets, y)
    alone = draws_of(model, examples_of(x, y), CLASSES)
    assert torch.allclose(alone.outputs[0].double().softmax(-1), mean_predict(model, x).mean, atol=1e-6)


def test_positions_that_do_not_count_have_no_rows():
    model = torch.nn.Conv1d(2, 3, 1)
    x, y = torch.randn(4, 2, 5), torch.randint(0, 3, (4, 5))
    y[1, 2:] = -100
    draws = draws_of(model, examples_of(x, y), CLASSES)
    assert len(draws) == 17 and draws.owner.tolist() == [0] * 5 + [1] * 2 + [2] * 5 + [3] * 5
    assert torch.allclose(draws.outputs[0, 5], model(x)[1, :, 0])


def test_a_class_that_the_model_rules_out_is_as_if_it_were_not_there():
    model, (x, y) = mlp_classifier(200)

    class Without(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            z = self.inner(x)
            return torch.cat([z, torch.full_like(z[:, :1], -torch.inf)], 1)

    data, masked = examples_of(x, y), Without().eval()
    found, wanted = (calibrate(one, data, data, CLASSES) for one in (masked, model))
    for own, other in ((found.samples, wanted.samples), (found.mean, wanted.mean)):
        assert own.value == pytest.approx(other.value, rel=1e-5) and own.after == pytest.approx(other.after, rel=1e-5)
    with torch.no_grad():
        model[2].bias[0] = torch.nan
    with pytest.raises(ModelError, match="not finite"):
        calibrate(masked, data, data, CLASSES)


def test_the_noise_of_a_regression_is_judged_on_what_it_was_not_fitted_on():
    """Against variances fitted on the other four folds, written out."""
    generator = torch.Generator().manual_seed(3)
    targets = torch.randn(40, generator=generator)
    draws = Draws(torch.zeros(1, 40), targets, torch.arange(40))
    found = fit_tempering(likelihood_for("regression"), draws)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    rows = []
    for fold in range(5):
        held = order % 5 == fold
        variance = float(targets[~held].double().square().mean())
        rows += stats.norm.logpdf(targets[held].double(), scale=math.sqrt(variance)).tolist()
    assert found.taken and not found.note and 1 / found.value == pytest.approx(float(targets.square().mean()), rel=1e-2)
    assert found.after == pytest.approx(-np.mean(rows), abs=0.02)  # the grid has steps of 0.25
    fitted = -float(stats.norm.logpdf(targets, scale=1 / math.sqrt(found.value)).mean())
    assert found.after > fitted + 0.005  # the error on the fitted examples is optimistic


@pytest.mark.parametrize("count", [1, 8])
def test_the_noise_of_few_examples_is_fitted_and_doubted(count):
    draws = Draws(torch.zeros(1, count), torch.linspace(1, 2, count), torch.arange(count))
    found = fit_tempering(likelihood_for("regression"), draws)
    assert found.taken and "validation example" in found.note and math.isfinite(found.after)
