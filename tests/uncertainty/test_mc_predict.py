"""mc_predict against a loop over draws with the textbook formulas, written out."""

import numpy as np
import pytest
import torch
from small_models import convnet, mlp, plain_draws, weight_draws, widen
from torch import nn

import svdcompress as svdc
from svdcompress.uncertainty import mc_predict

WAYS = [{}, {"members": True}, {"antithetic": True}, {"antithetic": True, "members": True}]


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def z_score(mean, draws):
    """The largest difference between two means of equally many draws, in standard deviations."""
    return ((mean - draws.mean(0)) / (2 * draws.var(0) / len(draws)).sqrt()).abs().max()


def recorded(monkeypatch):
    """The outputs passed to the sums, (draws, inputs, ...), collected in the order of the inputs."""
    from svdcompress.likelihoods import _binary, _classification, _regression, _sums

    seen = {}
    kinds = (_classification.ClassificationSums, _binary.BinarySums, _regression.RegressionSums, _sums.MomentSums)
    for kind in kinds:
        original = kind.__dict__["add"]

        def add(self, output, start, original=original):
            seen.setdefault(start, []).append(output)
            original(self, output, start)

        monkeypatch.setattr(kind, "add", add)
    return lambda: torch.cat([torch.cat(seen[start]) for start in sorted(seen)], 1).double()


@pytest.mark.parametrize("chunk", [None, 1, 7, 40])
def test_classification_after_kwon(classifier, x, monkeypatch, chunk):
    outputs = recorded(monkeypatch)
    got = mc_predict(classifier, x, 12, generator=seeded(), chunk=chunk)
    draws = outputs().softmax(-1)
    assert draws.shape == (12, 5, 3)
    mean = sum(draws) / 12
    aleatoric = sum(torch.diag_embed(p) - p[:, :, None] * p[:, None, :] for p in draws) / 12
    epistemic = sum((p - mean)[:, :, None] * (p - mean)[:, None, :] for p in draws) / 12
    entropy = -(mean * mean.log()).sum(-1)
    expected = sum(-(p * p.log()).sum(-1) for p in draws) / 12
    torch.testing.assert_close(got.mean, mean)
    torch.testing.assert_close(got.aleatoric, aleatoric.diagonal(dim1=1, dim2=2))
    torch.testing.assert_close(got.epistemic, epistemic.diagonal(dim1=1, dim2=2))
    torch.testing.assert_close(got.variance, mean - mean**2)
    torch.testing.assert_close(got.entropy, entropy)
    torch.testing.assert_close(got.expected_entropy, expected)
    torch.testing.assert_close(got.mutual_information, entropy - expected)
    full = mc_predict(classifier, x, 12, generator=seeded(), chunk=chunk, full=True)
    torch.testing.assert_close(full.aleatoric, aleatoric)
    torch.testing.assert_close(full.epistemic, epistemic)
    torch.testing.assert_close(full.std, (mean - mean**2).sqrt())


def test_binary_has_the_probabilitys_standard_deviation(x, monkeypatch):
    outputs = recorded(monkeypatch)
    model = widen(svdc.convert(mlp(4, 6, 2)))
    got = mc_predict(model, x, 10, task="binary", generator=seeded())
    draws = outputs().sigmoid()
    torch.testing.assert_close(got.mean, draws.mean(0))
    torch.testing.assert_close(got.epistemic_std, draws.std(0, correction=0))
    torch.testing.assert_close(got.aleatoric, (draws * (1 - draws)).mean(0))
    torch.testing.assert_close(got.variance, got.mean * (1 - got.mean))
    entropy = torch.distributions.Bernoulli(got.mean).entropy()
    expected = torch.distributions.Bernoulli(draws).entropy().mean(0)
    torch.testing.assert_close(got.entropy, entropy, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(got.mutual_information, entropy - expected, rtol=1e-5, atol=1e-6)


def test_regression_with_constant_noise(x, monkeypatch):
    outputs = recorded(monkeypatch)
    model = widen(svdc.convert(mlp(4, 6, 2)))
    got = mc_predict(model, x, 10, task="regression", tau=4.0, generator=seeded())
    draws = outputs()
    torch.testing.assert_close(got.mean, draws.mean(0))
    torch.testing.assert_close(got.epistemic, draws.var(0, correction=0))
    torch.testing.assert_close(got.variance, 0.25 + draws.var(0, correction=0))
    assert got.entropy is None and got.mutual_information is None
    full = mc_predict(model, x, 10, task="regression", tau=torch.tensor([4.0, 2.0]), generator=seeded(), full=True)
    centred = draws - draws.mean(0)
    torch.testing.assert_close(full.epistemic, torch.einsum("tbi,tbj->bij", centred, centred) / 10)
    torch.testing.assert_close(full.aleatoric, torch.diag(torch.tensor([0.25, 0.5])).double().expand(5, 2, 2))


@pytest.mark.parametrize("pair", [False, True])
def test_regression_with_a_variance_head(x, pair):
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.mean, self.log_variance = mlp(4, 6, 6), nn.Linear(6, 2), nn.Linear(6, 2)

        def forward(self, x):
            h = self.body(x)
            heads = self.mean(h), self.log_variance(h)
            return heads if pair else torch.cat(heads, 1)

    torch.manual_seed(0)
    model = widen(svdc.convert(Heads()))
    n = 5000
    got = mc_predict(model, x, n, task="gaussian", generator=seeded())
    with torch.no_grad(), svdc.sampling(model.eval(), generator=seeded(1)):
        output = model(x.repeat(n, 1))
    means, log_variances = output if pair else output.chunk(2, 1)
    means, variances = means.double().view(n, 5, 2), log_variances.double().exp().view(n, 5, 2)
    assert z_score(got.mean, means) < 4.5
    assert z_score(got.aleatoric, variances) < 4.5
    torch.testing.assert_close(got.epistemic, means.var(0), rtol=0.15, atol=0)
    torch.testing.assert_close(got.variance, got.aleatoric + got.epistemic)


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("make", [lambda: mlp(4, 6, 6, 3), convnet], ids=["mlp", "convnet"])
def test_every_way_draws_from_the_same_marginals(make, way):
    model = widen(svdc.convert(make()))
    inputs = torch.randn(3, 4, generator=seeded(1)) if make is not convnet else torch.randn(3, 1, 8, 8, generator=seeded(1))
    n = 4000
    got = mc_predict(model, inputs, n, task="regression", generator=seeded(2), **way)
    draws = weight_draws(model, inputs, n, seed=3)
    assert z_score(got.mean, draws) < 4.5
    assert (got.epistemic / draws.var(0) - 1).abs().max() < 0.2
    if not way.get("members"):  # training's estimator too, on request
        got = mc_predict(model, inputs, n, task="regression", generator=seeded(2), local=True, **way)
        draws = plain_draws(model, inputs, n, seed=3)
        assert z_score(got.mean, draws) < 4.5
        assert (got.epistemic / draws.var(0) - 1).abs().max() < 0.2


def test_members_are_the_same_weights_for_all_inputs(classifier, x, monkeypatch):
    outputs = recorded(monkeypatch)
    inputs = torch.cat([x, x, x])
    mc_predict(classifier, inputs, 6, generator=seeded(), members=True, chunk=5)
    draws = outputs()
    torch.testing.assert_close(draws[:, :5], draws[:, 5:10])
    torch.testing.assert_close(draws[:, :5], draws[:, 10:])
    assert not torch.allclose(draws[0], draws[1], atol=1e-3)
    monkeypatch.undo()
    outputs = recorded(monkeypatch)
    mc_predict(classifier, inputs, 6, generator=seeded(), chunk=5)
    draws = outputs()
    assert not torch.allclose(draws[:, :5], draws[:, 5:10], atol=1e-3)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_antithetic_pairs_are_opposite_in_a_linear_model(way, x, monkeypatch):
    outputs = recorded(monkeypatch)
    model = widen(svdc.convert(nn.Sequential(nn.Linear(4, 2))))
    mc_predict(model, x, 6, task="regression", generator=seeded(), chunk=4, **way)
    noise = (outputs() - model.eval()(x).double()).sort(0).values
    opposite = torch.allclose(noise, -noise.flip(0), atol=1e-5)
    assert opposite == bool(way.get("antithetic"))


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_the_generator_makes_it_reproducible(classifier, x, way):
    first = mc_predict(classifier, x, 8, generator=seeded(5), **way)
    again = mc_predict(classifier, x, 8, generator=seeded(5), **way)
    other = mc_predict(classifier, x, 8, generator=seeded(6), **way)
    assert torch.equal(first.mean, again.mean) and torch.equal(first.epistemic, again.epistemic)
    assert not torch.equal(first.mean, other.mean)
    torch.manual_seed(0)
    first = mc_predict(classifier, x, 8, **way)
    torch.manual_seed(0)
    assert torch.equal(first.mean, mc_predict(classifier, x, 8, **way).mean)


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions(classifier, x, dtype, way):
    want = mc_predict(classifier, x, 4000, generator=seeded(1))
    got = mc_predict(classifier.to(dtype), x.to(dtype), 4000, generator=seeded(2), **way)
    assert got.mean.dtype == torch.float64
    torch.testing.assert_close(got.mean, want.mean, rtol=0, atol=0.03)


def test_a_given_generator_leaves_the_default_one_alone(classifier, x):
    before = torch.get_rng_state()
    mc_predict(classifier, x, 8, generator=seeded())
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("dropout", [nn.Dropout, nn.Dropout2d])
@pytest.mark.parametrize("gaussian", [False, True])
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_mc_dropout(way, gaussian, dropout):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), dropout(0.3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2))
    svdc.convert_dropout(model, gaussian=gaussian)
    inputs = torch.randn(3, 1, 4, 4)
    n = 4000
    got = mc_predict(model, inputs, n, task="regression", generator=seeded(1), **way)
    draws = plain_draws(model, inputs, n, seed=2)
    assert z_score(got.mean, draws) < 4.5
    assert (got.epistemic / draws.var(0) - 1).abs().max() < 0.2


class Branching(nn.Module):
    """Branches on random values, which vmap refuses."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)
        self.calls = 0

    def forward(self, x):
        h = self.first(x)
        self.calls += 1
        if h.sum() > 1e9:
            h = h * 0
        return self.second(h.tanh())


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_model_that_branches_on_values_is_run_draw_by_draw(way, x, monkeypatch):
    torch.manual_seed(0)
    model = widen(svdc.convert(Branching()), dead=0.0)
    plain = nn.Sequential(model.first, nn.Tanh(), model.second)
    outputs = recorded(monkeypatch)
    got = mc_predict(model, torch.cat([x, x]), 400, task="regression", generator=seeded(1), chunk=5000, **way)
    assert model.calls >= 400
    draws = outputs()
    assert torch.allclose(draws[:, :5], draws[:, 5:]) == bool(way.get("members"))
    monkeypatch.undo()
    want = mc_predict(plain, torch.cat([x, x]), 2000, task="regression", generator=seeded(2))
    assert ((got.mean - want.mean) / (2 * want.epistemic / 400).sqrt()).abs().max() < 4.5
    assert (got.epistemic / want.epistemic - 1).abs().max() < 0.35


def test_what_depends_on_no_noise_is_computed_once(x):
    class Count(nn.Module):
        rows = 0

        def forward(self, x):
            Count.rows += x.shape[0]
            assert x.dim() == 2
            return x

    model = widen(svdc.convert(nn.Sequential(nn.Linear(4, 5), Count(), nn.ReLU(), nn.Linear(5, 3)), exclude=["0"]))
    mc_predict(model, x, 50)
    assert Count.rows == 5 + 3 + 5  # a probe with two numbers of inputs, then the pass


def test_residual_models_mix_both_kinds_of_rows(x):
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x):
            return self.head(x + self.inner(x).tanh())

    torch.manual_seed(0)
    model = widen(svdc.convert(Residual()))
    n = 4000
    got = mc_predict(model, x, n, task="regression", generator=seeded(1))
    draws = plain_draws(model, x, n, seed=2)
    assert z_score(got.mean, draws) < 4.5


def test_one_sample_has_no_epistemic_variance(classifier, x):
    got = mc_predict(classifier, x, 1)
    assert (got.epistemic == 0).all() and (got.mutual_information < 1e-15).all()
    assert (mc_predict(classifier, x, 1, task="regression").epistemic == 0).all()


def test_large_values_keep_their_small_variance(x):
    model = svdc.convert(nn.Sequential(nn.Linear(4, 1)), log_sigma2=-14.0).double()
    model[0].bias.data.fill_(1e6)
    inputs = x.double()
    got = mc_predict(model, inputs, 5000, task="regression", generator=seeded())
    exact = np.exp(-14.0) * (inputs.square().sum(1, keepdim=True)).double()
    torch.testing.assert_close(got.epistemic, exact, rtol=0.1, atol=0)


def test_small_mutual_information_survives_many_samples():
    model = svdc.convert(nn.Sequential(nn.Linear(2, 2, bias=False)), log_sigma2=-16.0)
    model[0].weight.data.zero_().add_(torch.tensor([[1.0, 0.5], [0.5, 1.0]]))
    got = mc_predict(model, torch.tensor([[0.3, 0.2]]), 20_000, generator=seeded())
    # To second order MI = var(logit difference) p (1 - p) / 2, here for a difference of variance 2 e^-16 |x|^2.
    p = torch.tensor(0.05).sigmoid().item()
    assert got.mutual_information.item() == pytest.approx(np.exp(-16) * 0.13 * p * (1 - p), rel=0.05)


def test_before_and_after_holding_masks(classifier, x):
    before = mc_predict(classifier, x, 50, generator=seeded())
    svdc.hold(classifier, svdc.relevance(classifier))
    after = mc_predict(classifier, x, 50, generator=seeded())
    assert torch.equal(before.mean, after.mean) and torch.equal(before.mutual_information, after.mutual_information)


def test_the_model_is_left_as_it_was(x):
    model = widen(svdc.convert(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))))
    model.train()
    model[2].eval()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    got = mc_predict(model, x, 5)
    assert model.training and model[1].training and not model[2].training
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert model[0].sampler is None and not got.mean.requires_grad


@pytest.mark.parametrize("form", ["dict", "tuple"])
def test_inputs_by_name_or_position_and_named_outputs(form, x):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, left, right, scale=None):
            return {"hidden": left, "logits": self.linear(left + right) * (1 if scale is None else scale)}

    torch.manual_seed(0)
    model = widen(svdc.convert(Two()))
    inputs = {"left": x, "right": x, "scale": torch.tensor(2.0)} if form == "dict" else (x, x, torch.tensor(2.0))
    got = mc_predict(model, inputs, 7, chunk=7, generator=seeded())
    assert got.mean.shape == (5, 3)
    torch.testing.assert_close(got.mean.sum(1), torch.ones(5).double())


def test_one_number_for_each_input_and_maps_of_classes():
    model = widen(svdc.convert(nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))))
    got = mc_predict(model, torch.randn(5, 4), 6, task="regression")
    assert got.mean.shape == got.variance.shape == (5,)
    model = widen(svdc.convert(nn.Sequential(nn.Conv2d(1, 3, 3))))
    inputs = torch.randn(2, 1, 6, 5)
    got = mc_predict(model, inputs, 6)
    assert got.mean.shape == got.variance.shape == (2, 3, 4, 3) and got.entropy.shape == (2, 4, 3)
    torch.testing.assert_close(got.mean.sum(1), torch.ones(2, 4, 3).double())
    full = mc_predict(model, inputs, 6, full=True)
    assert full.epistemic.shape == (2, 4, 3, 3, 3) and full.mean.shape == (2, 3, 4, 3)
