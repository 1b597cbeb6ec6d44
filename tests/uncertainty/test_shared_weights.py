"""Draws are from the posterior even if a weight is used at several positions: against dense copies with drawn weights."""

import pytest
import torch
from shared_models import MODELS, Tokens, made
from small_models import mlp, weight_draws, widen
from torch import nn

import svdcompress as svdc
from svdcompress.batch import call, main_output
from svdcompress.layers import shared_over_positions, stochastic_layers
from svdcompress.uncertainty import mc_predict
from svdcompress.uncertainty._look import look

N = 1500
WAYS = {
    "default": {},
    "antithetic": {"antithetic": True},
    "chunks": {"chunk": 7},
    "antithetic chunks": {"chunk": 8, "antithetic": True},
    "members": {"members": True},
}


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def run(model, x):
    return main_output(call(model, x))


def z_scores(ours, oracle):
    """The largest differences, in standard errors, of means and of (co)variances between all numbers of an input.

    ours, oracle: draws, (n, inputs, numbers).
    """
    found = []
    for moment in (lambda d: d, lambda d: (d - d.mean(0)).unsqueeze(-1) * (d - d.mean(0)).unsqueeze(-2)):
        one, other = moment(ours), moment(oracle)
        error = (one.var(0) / len(one) + other.var(0) / len(other)).sqrt()
        found.append(float(((one.mean(0) - other.mean(0)).abs() / (error + 1e-9)).max()))
    return found


def recorded(monkeypatch):
    """The outputs passed to the sums, (draws, inputs, ...)."""
    from svdcompress.likelihoods import _regression

    seen = {}
    original = _regression.RegressionSums.add

    def add(self, output, start):
        seen.setdefault(start, []).append(output)
        original(self, output, start)

    monkeypatch.setattr(_regression.RegressionSums, "add", add)
    return lambda: torch.cat([torch.cat(seen[start]) for start in sorted(seen)], 1).double()


QUICK = [
    pytest.param(
        name, way, marks=() if (way == "default" and name != "bert") or name == "tied" else pytest.mark.slow, id=f"{name}-{way}"
    )
    for name in MODELS
    for way in WAYS
]


def draws_of(name):
    return 300 if name in ("bert", "vit") else N


@pytest.mark.parametrize(("name", "way"), QUICK)
def test_draws_are_those_of_the_weights(name, way, monkeypatch):
    model, x = made(name)
    n = draws_of(name) if "chunks" not in way else 300
    outputs = recorded(monkeypatch)
    got = mc_predict(model, x, n, task="regression", generator=seeded(1), **WAYS[way])
    ours, oracle = outputs().flatten(2), weight_draws(model, x, draws_of(name), 2, run).flatten(2)
    assert ours.shape == (n, *oracle.shape[1:])
    mean, covariance = z_scores(ours, oracle)
    covariance /= 2**0.5 if "antithetic" in way else 1  # the mirrored half of the draws adds no information about it
    assert mean < 4.5 and covariance < 5, (mean, covariance)
    torch.testing.assert_close(got.epistemic.flatten(), ours.var(0, correction=0).flatten())


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n == "bert" else n for n in MODELS])
def test_sampling_draws_the_weights_anew_at_each_call(name):
    model, x = made(name)
    with torch.no_grad(), svdc.sampling(model, generator=seeded(1)):
        ours = torch.stack([run(model, x) for _ in range(300)]).double()
    oracle = weight_draws(model, x, draws_of(name), 2, run).flatten(2)
    mean, covariance = z_scores(ours.flatten(2), oracle)
    assert mean < 4.5 and covariance < 5, (mean, covariance)


@pytest.mark.parametrize("name", ["tokens", "folded", "twice", "tied"])
def test_local_draws_are_others(name):
    """Training's estimator, on request: the tests above can tell it from the posterior."""
    model, x = made(name)
    oracle = weight_draws(model, x, N, 2, run).flatten(2)
    got = mc_predict(model, x, N, task="regression", generator=seeded(1), local=True)
    assert (got.epistemic.flatten() / oracle.var(0).flatten()).log().abs().max() > 0.4
    with torch.no_grad(), svdc.sampling(model, generator=seeded(1), local=True):
        ours = torch.stack([run(model, x) for _ in range(500)]).double()
    assert torch.allclose(ours.var(0), got.epistemic, rtol=0.5, atol=1e-4)


def test_the_mean_of_64_tokens():
    """N(0, 1/8) weights, inputs of size 1 whose mean over the tokens is 1: a standard deviation of 1; with separate noise for
    each token, an eighth of that."""
    model = svdc.convert(Tokens(), log_sigma2=-torch.tensor(8.0).log().item()).eval()
    model.linear.weight.data.fill_(3.0)
    x = torch.ones(5, 64, 8)
    posterior = mc_predict(model, x, 4000, task="regression", generator=seeded()).std
    local = mc_predict(model, x, 4000, task="regression", generator=seeded(), local=True).std
    torch.testing.assert_close(posterior, torch.ones(5, 2).double(), rtol=0.06, atol=0)
    torch.testing.assert_close(local, torch.full((5, 2), 1 / 8).double(), rtol=0.06, atol=0)


def test_one_draw_has_one_set_of_weights_for_all_inputs(monkeypatch):
    model, x = made("cnn")
    model[8].log_sigma2.data.fill_(-60.0)  # otherwise the head would have noise for each row
    model[8].bias_sigma2 = None
    outputs = recorded(monkeypatch)
    mc_predict(model, torch.cat([x, x, x]), 20, task="regression", generator=seeded(), chunk=12)
    draws = outputs()
    torch.testing.assert_close(draws[:, :3], draws[:, 3:6])
    torch.testing.assert_close(draws[:, :3], draws[:, 6:])
    assert (draws[0] - draws[1]).abs().min() > 1e-5
    model, x = widen(svdc.convert(mlp(4, 3)), dead=0), torch.randn(3, 4)
    monkeypatch.undo()
    outputs = recorded(monkeypatch)
    mc_predict(model, torch.cat([x, x]), 20, task="regression", generator=seeded())
    assert (outputs()[:, :3] - outputs()[:, 3:]).abs().min() > 1e-6  # rows get separate noise where that is equivalent


@pytest.mark.parametrize("name", MODELS)
def test_which_weights_are_shared(name):
    model, x = made(name)
    names = {layer: name for name, layer in reversed(list(model.named_modules()))}
    once = {"cnn": {"8"}, "vit": {"head"}, "sequence": {"head"}, "twice": {"head"}, "tied": {"head"}}
    once["bert"] = {"bert.pooler.dense", "classifier"}
    every = {names[layer] for layer in stochastic_layers(model)}
    size = MODELS[name][1][0]
    found = look(model, lambda x: run(model, x), x, size, stochastic_layers(model)).shared
    assert {names[layer] for layer in found} == every - once.get(name, set())

    def batch(size, backwards):
        rows = lambda tensor: tensor[:1].expand(size, *tensor.shape[1:])  # noqa: E731
        return run(model, {key: rows(value) for key, value in x.items()} if isinstance(x, dict) else rows(x))

    assert shared_over_positions(model, batch) == found
    assert not model.training and all(layer.sampler is None for layer in stochastic_layers(model))


def test_a_layer_that_is_not_called_or_a_batch_that_cannot_change():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x):
            return self.used(x.view(2, 2, 4).flatten(0, 1))  # only works with a batch of 4

    model, x = widen(svdc.convert(Odd())).eval(), torch.randn(4, 4)
    got = mc_predict(model, x, 2000, task="regression", generator=seeded())
    draws = weight_draws(model, x, 4000, 1)
    assert (got.epistemic / draws.var(0)).log().abs().max() < 0.3
    layers = stochastic_layers(model)
    assert look(model, model, x, 4, layers).shared == set(layers)
    with torch.no_grad(), svdc.sampling(model):
        assert not torch.equal(model(x), model(x))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_precisions_have_the_same_spread(dtype):
    model, x = made("cnn", low=-18, high=-16)  # float16 cannot represent variances this small
    want = mc_predict(model, x, 2000, task="regression", generator=seeded(1)).epistemic
    half = model.to(dtype)
    for layer in stochastic_layers(half):
        layer.bias_sigma2 = None
    for layer in stochastic_layers(model):
        layer.bias_sigma2 = None
    got = mc_predict(half, x.to(dtype), 2000, task="regression", generator=seeded(1)).epistemic
    if dtype == torch.float64:
        assert (got > 0).all() and (got < want).all()
    assert got.isfinite().all()


@pytest.mark.parametrize("name", ["cnn", "twice"])
def test_gradients_pass_through_drawn_weights(name):
    model, x = made(name)
    with svdc.sampling(model, generator=seeded()):
        run(model, x).square().sum().backward()
    for layer in stochastic_layers(model):
        assert layer.weight.grad.any() and layer.log_sigma2.grad.any()
        assert layer.weight.grad.isfinite().all() and layer.log_sigma2.grad.isfinite().all()


def test_calls_of_a_part_are_draws_by_themselves():
    """A layer that is called twice within one call of a part has one weight; two calls of the part have two."""
    model, x = made("twice")
    whole = nn.ModuleDict({"part": model})
    with torch.no_grad(), svdc.sampling(whole, generator=seeded(1)):
        ours = torch.stack([whole["part"](x) for _ in range(500)]).double()
    assert max(z_scores(ours, weight_draws(model, x, N, 2))) < 5
    with torch.no_grad(), svdc.sampling(whole):
        single = model.body(x), model.body(x)
        assert not torch.equal(*single)


def test_members_share_tied_weights():
    model, x = made("tied")
    with torch.no_grad(), svdc.sampling(model, generator=seeded(1), members=True) as sampler:
        draws = []
        for _ in range(500):
            sampler.resample()
            draws.append(model(x))
    assert max(z_scores(torch.stack(draws).double(), weight_draws(model, x, N, 2))) < 5


def test_training_keeps_the_local_reparameterisation():
    model = svdc.convert(Tokens(), log_sigma2=-2.0).train()
    x = torch.ones(2000, 64, 8)
    with torch.no_grad():
        spread = model(x).std(0)
        torch.testing.assert_close(spread, torch.full((2,), (8 * 0.1353 / 64) ** 0.5), rtol=0.1, atol=0)
        with svdc.sampling(model):
            torch.testing.assert_close(model(x).std(0), spread, rtol=0.1, atol=0)


def test_members_and_local_exclude_each_other():
    model, x = made("twice")
    with pytest.raises(svdc.errors.UsageError, match="members"), svdc.sampling(model, members=True, local=True):
        pass
    with pytest.raises(svdc.errors.UsageError, match="members"):
        mc_predict(model, x, members=True, local=True)
