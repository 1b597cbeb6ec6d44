"""The scale of the variances and the refit, against scipy on closed forms."""

import math

import numpy as np
import pytest
import torch
from calibration_data import examples_of, mlp_classifier, sparse
from scipy import optimize
from torch import nn

from svdcompress import batch
from svdcompress.calibrate import fit_scale, held, log_variances, refit
from svdcompress.likelihoods import likelihood_for
from svdcompress.train import evaluate


def test_the_scale_of_a_linear_model_is_that_of_the_closed_form():
    generator = torch.Generator().manual_seed(0)
    model = sparse(nn.Sequential(nn.Linear(2, 1, bias=False)), keep=1.1)
    model[0].log_sigma2.data.fill_(math.log(0.01))
    x = 2 * torch.randn(600, 2, generator=generator)
    wide = (0.09 * x.square().sum(1)).sqrt()
    y = model(x).detach().squeeze(1) + torch.randn(600, generator=generator) * (wide.square() + 0.25).sqrt()

    def nll(numbers):
        variance = math.exp(numbers[0]) * 0.01 * x.square().sum(1).double().numpy() + math.exp(numbers[1])
        square = (y.double() - model(x).detach().squeeze(1).double()).square().numpy()
        return 0.5 * np.sum(square / variance + np.log(2 * math.pi * variance)) + 0.5 * (numbers[0] / 3) ** 2

    wanted = optimize.minimize(nll, [0.0, 0.0], method="Nelder-Mead", options={"xatol": 1e-4}).x
    assert wanted[0] > 1.5  # the unscaled posterior is far too narrow
    with held(model):
        scales, fitted = fit_scale(model, examples_of(x, y.unsqueeze(1)), likelihood_for("regression"), 100)
    assert scales["0"] == pytest.approx(wanted[0], abs=0.25)
    assert fitted.log_knob == pytest.approx(wanted[1], abs=0.15)
    assert fitted.nll * 600 == pytest.approx(nll(wanted) - 0.5 * (wanted[0] / 3) ** 2, rel=0.01)
    assert float(model[0].log_sigma2.detach()[0, 0]) == pytest.approx(math.log(0.01)), "the model is left as it was"


def test_one_scale_for_each_layer_finds_the_layer_that_is_too_narrow():
    model, (x, _) = mlp_classifier(150)
    base = log_variances(model)
    model[2].log_sigma2.data += 5.0
    from svdcompress.uncertainty import mc_predict

    p = mc_predict(model, x, 2000, generator=torch.Generator().manual_seed(0)).mean
    y = torch.multinomial(p, 1, generator=torch.Generator().manual_seed(1)).squeeze(1)
    model[2].log_sigma2.data.copy_(base["2"])
    with held(model):
        one, fitted = fit_scale(model, examples_of(x, y), likelihood_for("classification"), 20)
        each, layered = fit_scale(model, examples_of(x, y), likelihood_for("classification"), 20, by_layer=True)
    assert one["0"] == one["2"]
    assert layered.nll <= fitted.nll + 1e-9
    assert each["0"] != each["2"]


def test_variances_alone_go_where_the_bound_has_its_least():
    generator = torch.Generator().manual_seed(0)
    n = 4000
    x = torch.randn(n, 3, generator=generator)
    x = torch.linalg.qr(x)[0] * math.sqrt(n)  # orthogonal columns of mean square 1
    model = sparse(nn.Sequential(nn.Linear(3, 1, bias=False)), keep=1.1)
    model[0].weight.data = torch.tensor([[1.0, 0.1, 0.03]])
    model[0].log_sigma2.data.fill_(-6.5)
    y = model(x).detach() + torch.randn(n, 1, generator=generator)
    found = refit(
        model, examples_of(x, y), likelihood_for("regression"), means=False, epochs=200, lr_log_sigma2=0.05, batch_size=4000
    )
    assert torch.equal(found[0].weight, model[0].weight) and not torch.equal(found[0].log_sigma2, model[0].log_sigma2)
    for weight, log_sigma2 in zip([1.0, 0.1, 0.03], found[0].log_sigma2[0].tolist(), strict=True):
        bound = lambda s, w=weight: n * 0.5 * math.exp(s) + 0.5 * math.log1p(w * w / math.exp(s))  # noqa: E731
        wanted = optimize.minimize_scalar(bound, bounds=(-20, 5), method="bounded").x
        assert bound(log_sigma2) == pytest.approx(bound(wanted), abs=0.02)


def test_masks_and_the_given_model_stay_and_a_fit_of_the_callers_is_used():
    model, (x, y) = mlp_classifier(60)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = refit(model, examples_of(x, y), likelihood_for("classification"), epochs=2)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(found[0].mask, model[0].mask) and not torch.equal(found[0].weight, model[0].weight)
    assert not found.training
    seen = []
    refit(model, examples_of(x, y), likelihood_for("classification"), fit=seen.append)
    assert len(seen) == 1 and seen[0] is not model


def test_the_same_seed_gives_the_same_refit():
    model, (x, y) = mlp_classifier(60)
    state = torch.get_rng_state()
    one, two = (refit(model, examples_of(x, y), likelihood_for("classification"), epochs=2, seed=5) for _ in range(2))
    assert torch.equal(one[0].weight, two[0].weight) and torch.equal(state, torch.get_rng_state())


def test_parts_of_a_model_that_stand_in_eval_stay_there():
    """For example frozen batch normalization while the rest trains."""
    model, (x, y) = mlp_classifier()
    model.train()
    model[1].eval()
    before = [module.training for module in model.modules()]
    with held(model):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == before
    evaluate(model, examples_of(x, y), "classification")
    assert [module.training for module in model.modules()] == before


@pytest.mark.parametrize(("widest", "size"), [(10**6, 100), (8 * 7 * 40, 40), (8 * 7 * 10, 10), (3, 1)])
def test_large_examples_go_in_smaller_batches(monkeypatch, widest, size):
    """The widest layer has 7 outputs; with gradients, a batch counts 8 times."""
    monkeypatch.setattr(batch, "WIDEST", widest)
    model, pair = mlp_classifier(n=120)
    examples = examples_of(*pair)
    sizes, batches = [], examples.batches

    def noted(count, **how):
        sizes.append(count)
        return batches(count, **how)

    monkeypatch.setattr(examples, "batches", noted)
    refit(model, examples, likelihood_for("classification"), epochs=1)
    assert sizes == [size]
