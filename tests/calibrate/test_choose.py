"""Which posterior is chosen, what is reported about the others, and how the work is bounded."""

import copy
import math

import pytest
import torch
from calibration_data import examples_of, mlp_classifier
from torch import nn

from svdcompress import convert
from svdcompress.calibrate import POSTERIORS, _choose, calibrate, log_variances, promises_of, refit, with_scales
from svdcompress.calibrate._choose import EXAMPLES, _best, _bounded
from svdcompress.calibrate._draws import draws_of
from svdcompress.calibrate._fit import Fitted
from svdcompress.errors import DataError, ModelError, UsageError
from svdcompress.layers import set_posterior
from svdcompress.likelihoods import Classification, Gaussian, Regression
from svdcompress.uncertainty import mc_predict, mean_predict


def wide(factor=60.0, n=300):
    """A model and labels drawn from a copy whose variances are `factor` times as large."""
    model, _ = mlp_classifier()
    for layer in (model[0], model[2]):
        layer.weight.data *= 3
    truth = copy.deepcopy(model)
    for layer in (truth[0], truth[2]):
        layer.log_sigma2.data += math.log(factor)
    x = 2 * torch.randn(n, 4, generator=torch.Generator().manual_seed(0))
    p = mc_predict(truth, x, 3000, generator=torch.Generator().manual_seed(1)).mean
    y = torch.multinomial(p, 1, generator=torch.Generator().manual_seed(2)).squeeze(1)
    return model, examples_of(x, y)


def test_a_posterior_that_is_too_narrow_is_scaled_where_a_temperature_alone_is_not_enough():
    model, data = wide(n=1200)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = calibrate(model, data, data, Classification(), posterior="scaled", temperature=False)
    assert found.posterior == "scaled" and found.likelihood.temperature == 1
    moved = float((found.model[0].log_sigma2 - model[0].log_sigma2).detach().mean())
    assert moved > 1.5
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert {one.name for one in found.tried} == {"variational", "scaled"}


@pytest.mark.parametrize(("log_sigma2", "noise"), [(3.0, 0.1), (6.0, 0.01)])
def test_a_posterior_that_is_far_too_wide_is_narrowed_as_far_as_it_takes(log_sigma2, noise):
    """The variances of a posterior that was never trained can be thousands of times too large; the first grid ends at 20. The
    noise gets smaller with them."""
    torch.manual_seed(0)
    x = torch.rand(400, 1) * 2 - 1
    y = (2 * x).squeeze(1) + noise * torch.randn(400)
    model = convert(nn.Linear(1, 1), log_sigma2=log_sigma2, threshold=50.0).eval()
    with torch.no_grad():
        model.weight.fill_(2.0)
        model.bias.zero_()
    data = examples_of(x, y)
    found = calibrate(model, data, data, Regression(), posterior="scaled")
    assert found.posterior == "scaled" and float((found.model.log_sigma2 - model.log_sigma2).detach()) < -5
    (judged,) = (one.nll for one in found.tried if one.name == "scaled")
    assert judged < math.log(noise) + 0.5 * math.log(2 * math.pi * math.e) + 0.1  # that of the noise in the data


def test_one_that_does_not_help_is_left_out_and_said():
    model, (x, y) = mlp_classifier(150)
    found = calibrate(model, examples_of(x, y), examples_of(x, y), Classification(), posterior="laplace-diagonal")
    if found.posterior == "variational":
        assert any("not used, because it does not improve the NLL" in note for note in found.notes)
    assert found.to_dict()["tried"][0]["name"] == "variational"


def test_auto_tries_all_and_what_has_no_rule_is_told():
    model, (x, y) = mlp_classifier(60)
    found = calibrate(model, examples_of(x, y), examples_of(x, y), Classification(), posterior="auto", epochs=1)
    assert tuple(one.name for one in found.tried) == POSTERIORS
    assert all(one.nll is not None for one in found.tried)
    for layer in (model[0], model[2]):
        layer.mask.zero_()
    found = calibrate(model, examples_of(x, y), examples_of(x, y), Classification(), posterior="laplace-diagonal")
    assert found.posterior == "variational" and "no weight is left" in found.tried[1].note


def test_targets_of_one_example_are_not_counted_as_independent():
    generator = torch.Generator().manual_seed(0)
    owner = torch.randint(30, (600,), generator=generator).sort().values
    shared = torch.randn(30, generator=generator, dtype=torch.float64)
    difference = shared[owner] + 0.1 * torch.randn(600, generator=generator, dtype=torch.float64)
    means = torch.stack(
        [
            difference[torch.cat([(owner == c).nonzero()[:, 0] for c in torch.randint(30, (30,)).tolist()])].mean()
            for _ in range(2000)
        ]
    )
    assert _choose._standard_error(difference, owner) == pytest.approx(float(means.std()), rel=0.1)
    alone = torch.arange(600)
    assert _choose._standard_error(difference, alone) == pytest.approx(float(difference.std()) / math.sqrt(600))
    rows = difference - difference.mean() - 0.1  # its lead is within what 30 examples show by chance, not 600
    models = {
        name: (nn.Identity(), Fitted(0.0, 0.0, 0.0, each, owner))
        for name, each in (("variational", 0 * rows), ("scaled", rows))
    }
    assert _best(models) == "variational"
    models = {name: (model, Fitted(0.0, 0.0, 0.0, fitted.rows, alone)) for name, (model, fitted) in models.items()}
    assert _best(models) == "scaled"


@pytest.mark.parametrize("deviation", [0.02, 50.0])
def test_a_refit_weighs_the_data_by_the_noise_of_a_regression(deviation):
    """The bound with the noise's own precision, as an explicit loop would minimize it, leaves a good network good."""
    torch.manual_seed(0)
    x = torch.randn(400, 4)
    truth = x @ torch.tensor([1.0, -2.0, 0.5, 0.0])
    scale = 1.0 if deviation < 1 else 1000.0
    y = (scale * truth + deviation * torch.randn(400)).unsqueeze(1)
    model = nn.Sequential(nn.Linear(4, 1))
    model[0].weight.data = scale * torch.tensor([[1.0, -2.0, 0.5, 0.0]])
    model[0].bias.data.zero_()
    convert(model, log_alpha=-8.0)
    model.eval()
    train, validation = examples_of(x[:200], y[:200]), examples_of(x[200:], y[200:])
    seen = []

    def noted(network, examples, likelihood, **options):
        seen.append(likelihood.tau)
        return refit(network, examples, likelihood, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_choose, "refit", noted)
        calibrate(model, train, validation, "regression", posterior="refit", epochs=2)
    square = (model(x[200:]) - y[200:]).detach().square().mean()
    assert seen == [pytest.approx(float(1 / square), rel=0.02)]


def test_the_simplest_within_a_standard_error_is_taken():
    rows = torch.randn(100, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    nothing = nn.Identity()

    def fitted(change):
        return nothing, Fitted(0.0, 0.0, 0.0, rows + change, torch.arange(100))

    noise = torch.randn(100, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert _best({"variational": fitted(0.0), "scaled": fitted(noise - noise.mean() - 0.01)}) == "variational"
    assert _best({"variational": fitted(0.0), "scaled": fitted(0.1 * (noise - noise.mean()) - 0.05)}) == "scaled"
    worse = fitted(3 * (noise - noise.mean()) + 0.02)  # its large error reaches the best, but it is worse than the simplest
    assert _best({"variational": fitted(0.0), "scaled": worse, "refit": fitted(-0.05)}) == "refit"


def test_too_few_validation_examples():
    model, (x, y) = mlp_classifier(20)
    found = calibrate(model, examples_of(x, y), examples_of(x, y), Classification(), posterior="auto")
    assert found.posterior == "variational" and found.likelihood.temperature == 1
    assert any("too few" in note and "30" in note for note in found.notes)
    with pytest.raises(DataError, match="no target"):
        calibrate(model, examples_of(x, y), examples_of(x, torch.full_like(y, -100)), Classification())
    with pytest.raises(UsageError, match="posterior"):
        calibrate(model, examples_of(x, y), examples_of(x, y), Classification(), posterior="exact")


def test_a_network_that_names_too_little_noise_is_made_to_name_more():
    from calibration_data import sparse

    torch.manual_seed(0)
    model = sparse(nn.Sequential(nn.Linear(4, 2)))
    x = torch.randn(300, 4)
    mean, log_variance = model.eval()(x).detach().chunk(2, 1)
    y = mean + 2 * (0.5 * log_variance).exp() * torch.randn(300, 1)
    found = calibrate(model, examples_of(x, y), examples_of(x, y), Gaussian())
    square = float(((y - mean).square() / log_variance.exp()).mean())  # the optimum, ignoring draws and the prior
    assert found.likelihood.mean_temperature == pytest.approx(square, rel=0.02) and square > 3
    assert found.mean.taken and found.samples.taken and found.samples.after < found.samples.before
    told = mean_predict(found.model, x, task=found.likelihood)
    assert float(((y - told.mean).square() / told.variance).mean()) == pytest.approx(1, rel=0.02)
    as_it_is = calibrate(model, examples_of(x, y), examples_of(x, y), Gaussian(), temperature=False)
    assert as_it_is.likelihood.settings() == {"dim": 1}


def test_without_a_temperature_the_better_predictor_is_judged_without():
    g = torch.Generator().manual_seed(0)
    x, model = torch.randn(400, 6, generator=g), nn.Sequential(nn.Linear(6, 3))
    with torch.no_grad():
        model[0].weight.copy_(1.5 * torch.randn(3, 6, generator=g))
        y = torch.multinomial(model(x).softmax(1), 1, generator=g).squeeze(1)
        model[0].weight.mul_(2.5)  # makes the mean far too confident, which a temperature corrects; draws are less so
    model = convert(model, log_sigma2=-1.0).eval()
    data = examples_of(x, y)
    assert calibrate(model, data, data, Classification()).better == "mean"
    found = calibrate(model, data, data, Classification(), temperature=False)
    drawn = mc_predict(model, x, 2000, generator=g).mean
    nll = [float(-p.gather(1, y.view(-1, 1)).log().mean()) for p in (drawn, mean_predict(model, x).mean)]
    assert nll[0] < nll[1] - 0.05 and found.better == "samples"
    for one, expected in zip((found.samples, found.mean), nll, strict=True):
        assert one.before == one.after == pytest.approx(expected, rel=0.05) and one.value == 1 and not one.taken
    assert found.likelihood.settings() == {"dim": 1}


@pytest.mark.parametrize("most", [100, 5000])
def test_draws_that_are_the_mean_are_no_better_than_it(monkeypatch, most):
    """They must not win on any subset, even when they are judged on fewer examples than the mean."""
    monkeypatch.setattr(_choose, "EXAMPLES", most)
    for seed in range(4):
        model, (x, y) = mlp_classifier(400, seed=seed)
        for layer in (model[0], model[2]):
            layer.log_sigma2.data.fill_(-40.0)
        found = calibrate(model, examples_of(x, y), examples_of(x, y), Classification())
        assert (found.samples.examples, found.mean.examples) == (min(most, 400), 400)
        assert found.better == found.to_dict()["better"] == "mean"
        assert ("mean_on_same" in found.to_dict()) == (most == 100)


def test_draws_that_are_better_on_a_part_of_the_examples_win(monkeypatch):
    monkeypatch.setattr(_choose, "EXAMPLES", 100)
    model, (x, y) = mlp_classifier(400)
    model[2].weight.data *= 8  # far too confident; draws are less so
    model[2].log_sigma2.data.fill_(2.0)
    found = calibrate(model, examples_of(x, y), examples_of(x, y), Classification(), temperature=False)
    drawn = mc_predict(model, x, 500).mean
    nll = [float(-p.gather(1, y.view(-1, 1)).log().mean()) for p in (drawn, mean_predict(model, x).mean)]
    assert nll[0] < nll[1] - 0.2 and found.better == "samples"
    assert found.mean_on_same.examples == 100 and found.mean_on_same.value == 1


@pytest.mark.parametrize(("factor", "told"), [(1.0, True), (100.0, False)])
def test_a_regression_that_is_as_sure_of_every_input_says_so(factor, told):
    from calibration_data import sparse

    torch.manual_seed(0)
    model = sparse(nn.Sequential(nn.Linear(4, 1)))
    model[0].log_sigma2.data.fill_(math.log(0.001 * factor))
    x = torch.randn(200, 4)
    y = model.eval()(x).detach() + 0.5 * torch.randn(200, 1)
    found = calibrate(model, examples_of(x, y), examples_of(x, y), Regression())
    notes = [note for note in found.notes if "--loss gaussian-nll" in note]
    deviation = mc_predict(found.model, x, 4000, task=found.likelihood).std.flatten().sort().values
    spread = float(deviation[189] / deviation[9]) - 1  # the 5th and 95th percentiles (200 examples)
    assert bool(notes) == told == (spread < 0.1)
    if told:
        assert float(notes[0].split("lie within ")[1].split("%")[0]) == pytest.approx(100 * spread, abs=1)


def test_variances_of_rank_one_are_scaled_as_ones_of_each_weight():
    model, (x, y) = mlp_classifier(60)
    set_posterior(model, "rank-one")
    logs = model[0].log_sigma2.detach().clone()
    found = calibrate(model, examples_of(x, y), examples_of(x, y), Classification(), posterior="auto", epochs=1)
    assert all(one.nll is not None for one in found.tried) and model[0].posterior == "rank-one"
    with pytest.raises(ModelError, match="set_posterior"):
        with_scales(model, log_variances(model), {"0": 1.0, "2": 1.0})
    assert torch.equal(model[0].log_sigma2, logs)
    trained = refit(model, examples_of(x, y), Classification(), epochs=1, means=False)
    assert not torch.equal(trained[0].log_sigma2, logs)


def test_the_work_is_bounded():
    model, (x, y) = mlp_classifier(80)
    data = examples_of(x.repeat(100, 1), y.repeat(100))
    first = draws_of(model, data, Classification())
    some, samples = _bounded(data, first, macs=0)
    assert len(some) == EXAMPLES and samples == 50
    some, samples = _bounded(data, first, macs=10**8)
    assert len(some) * samples * 10**8 <= 2.1 * 10**12 and samples >= 10


def test_promises_are_of_the_predictor():
    model, (x, y) = mlp_classifier(80)
    found = promises_of(lambda inputs: mean_predict(model, inputs), lambda: [(x, y)], Classification())
    p = model(x).detach().double().softmax(1)
    assert torch.allclose(found.confidence, p.max(1).values, atol=1e-6)
    assert torch.equal(found.right, p.argmax(1) == y)
    regression = Regression(tau=4.0)
    values = torch.randn(50, 1)
    seen = promises_of(
        lambda inputs: mean_predict(model[:1], inputs, task=Regression(tau=4.0)),
        lambda: [(x[:50], values.expand(50, 7))],
        regression,
    )
    wanted = (values - model[0](x[:50])).abs().double() / 0.5  # one column for each target
    assert torch.allclose(seen.scores, wanted, atol=1e-5)
    with pytest.raises(UsageError, match="right and wrong"):
        seen.answer_above(0.9)


def test_pairs_and_names_of_tasks_do():
    model, (x, y) = mlp_classifier(80)
    named = calibrate(model, (x, y), (x, y), "classification")
    assert named.to_dict()["mean"] == calibrate(model, examples_of(x, y), examples_of(x, y), Classification()).to_dict()["mean"]


@pytest.mark.parametrize(("count", "told"), [(8, False), (60, True)])
def test_a_few_examples_say_nothing_of_how_even_a_deviation_is(count, told):
    model, _ = mlp_classifier(80)
    x = torch.randn(count, 4)
    notes = calibrate(model[:1], (x, torch.zeros(count, 7)), (x, 9 * torch.randn(count, 7)), "regression").notes
    assert any("hardly depends on the input" in note for note in notes) is told
