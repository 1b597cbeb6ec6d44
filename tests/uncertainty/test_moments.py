"""One-pass moments against 10,000 samples: exact where they should be, close elsewhere."""

import numpy as np
import pytest
import torch
from small_models import convnet, mlp, plain_draws, widen
from torch import nn
from torch.nn import functional as F

import svdcompress as svdc
from svdcompress.errors import DataError, ModelError, UsageError
from svdcompress.uncertainty import _moments, mc_predict
from svdcompress.uncertainty._rules import Moments, adaptive_avg_pool, avg_pool, max_pool, maximum, relu

SAMPLES = 10_000


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def moments(model, x, task="regression", **kwargs):
    return mc_predict(model, x, kwargs.pop("samples", 100), task=task, method="moments", **kwargs)


def check_exact(model, x):
    """Check that mean and variance agree within the error of 10,000 samples."""
    got = moments(model, x)
    draws = plain_draws(model, x, SAMPLES, seed=1)
    variance, fourth = draws.var(0), (draws - draws.mean(0)).pow(4).mean(0)
    error = (torch.maximum(variance, got.variance) / SAMPLES).sqrt()  # a rare event may not have occurred at all
    assert ((got.mean - draws.mean(0)) / error.clamp_min(1e-6)).abs().max() < 4.5
    noise = ((fourth - variance**2) / SAMPLES).clamp_min(0).sqrt()
    assert ((got.variance - variance) / (noise + 1e-5)).abs().max() < 4.5


def check_near(model, x, mean=0.15, std=0.2):
    """Check the mean to within a fraction of a standard deviation, and the standard deviation to a fraction of itself."""
    got = moments(model, x)
    draws = plain_draws(model, x, SAMPLES, seed=1)
    assert ((got.mean - draws.mean(0)).abs() / draws.std(0)).max() < mean
    assert (got.std / draws.std(0) - 1).abs().max() < std


@pytest.mark.parametrize(
    "layers, shape",
    [
        ([nn.Linear(4, 5)], (3, 4)),
        ([nn.Linear(4, 5), nn.Linear(5, 2)], (3, 4)),
        ([nn.Linear(4, 5), nn.ReLU()], (3, 4)),
        ([nn.Conv2d(2, 3, 3, stride=2, padding=1, groups=1)], (2, 2, 6, 6)),
        ([nn.ConvTranspose1d(2, 3, 3, stride=2)], (2, 2, 5)),
        ([nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3)], (2, 1, 6, 6)),
        ([nn.Conv2d(1, 3, 3), nn.AvgPool2d(2)], (2, 1, 6, 6)),
        ([nn.Conv1d(1, 3, 3), nn.AvgPool1d(3, 2, 1)], (2, 1, 9)),
        ([nn.Conv2d(1, 3, 3), nn.AdaptiveAvgPool2d((2, 3)), nn.Flatten()], (2, 1, 7, 7)),
    ],
    ids=lambda value: "-".join(type(layer).__name__ for layer in value) if isinstance(value, list) else "",
)
def test_exact_in_what_is_linear_or_one_relu(layers, shape):
    torch.manual_seed(0)
    model = nn.Sequential(*layers)
    for layer in layers:  # they are made when tests are collected, before any seed
        getattr(layer, "reset_parameters", lambda: None)()
    model = widen(svdc.convert(model))
    if isinstance(layers[-1], nn.BatchNorm2d):
        layers[-1].running_var.uniform_(0.5, 2)
        layers[-1].running_mean.normal_()
        layers[-1].weight.data.normal_()
    check_exact(model, torch.randn(shape, generator=seeded(2)))


@pytest.mark.parametrize("gaussian", [False, True])
@pytest.mark.parametrize("dropout", [nn.Dropout, nn.Dropout2d])
def test_exact_in_dropout(gaussian, dropout):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), dropout(0.3), nn.Conv2d(3, 2, 1))
    svdc.convert_dropout(model, gaussian=gaussian)
    check_exact(model, torch.randn(2, 1, 5, 5, generator=seeded(2)))
    widen(svdc.convert(model), low=-6, high=-4, dead=0.0)
    check_exact(model, torch.randn(2, 1, 5, 5, generator=seeded(2)))


def test_near_in_an_mlp():
    check_near(widen(svdc.convert(mlp(4, 30, 20, 3)), high=-2, dead=0.1), torch.randn(5, 4, generator=seeded(2)))


def test_near_in_a_convnet():
    check_near(widen(svdc.convert(convnet()), high=-2, dead=0.1), torch.randn(3, 1, 8, 8, generator=seeded(2)), 0.3, 0.3)


def test_masked_weights_have_neither_mean_nor_variance():
    model = widen(svdc.convert(mlp(4, 3)), dead=0.5)
    x = torch.randn(2, 4)
    keep = model[0].relevant()
    want = (x**2) @ (model[0].log_sigma2.exp() * keep).T
    torch.testing.assert_close(moments(model, x).variance, want.double().detach())


def test_relu_of_a_normal_variable():
    mean, variance = torch.tensor([-3.0, -0.5, 0.0, 0.5, 3.0]), torch.tensor([1.0, 4.0, 0.25, 1.0, 1e-30])
    got = relu(Moments(mean.double(), variance.double()))
    draws = (mean + variance.sqrt() * torch.randn(1_000_000, 5, generator=seeded(0), dtype=torch.float64)).relu()
    torch.testing.assert_close(got.mean, draws.mean(0), rtol=0, atol=4e-3)
    torch.testing.assert_close(got.variance, draws.var(0), rtol=0, atol=1.5e-2)


def test_the_larger_of_two_and_of_a_window():
    a, b = Moments(torch.tensor([0.3]), torch.tensor([1.0])), Moments(torch.tensor([0.0]), torch.tensor([0.25]))
    got = maximum(a, b)
    draws = torch.stack(
        [m.mean + m.variance.sqrt() * torch.randn(1_000_000, generator=seeded(k)) for k, m in enumerate((a, b))]
    )
    assert got.mean.item() == pytest.approx(draws.amax(0).mean().item(), abs=4e-3)
    assert got.variance.item() == pytest.approx(draws.amax(0).var().item(), abs=6e-3)
    x = Moments(torch.randn(1, 2, 5, 5, generator=seeded(0)), torch.rand(1, 2, 5, 5, generator=seeded(1)))
    pooled = max_pool(x, 3, 2, 1)
    noise = torch.randn(50_000, 2, 5, 5, generator=seeded(2))
    draws = F.max_pool2d(x.mean + x.variance.sqrt() * noise, 3, 2, 1)
    assert (pooled.mean - draws.mean(0)).abs().max() < 0.05  # Clark's approximation for a maximum of more than two
    assert (pooled.variance.sqrt() / draws.std(0) - 1).abs().max() < 0.15
    certain = max_pool(Moments(x.mean, x.variance * 0), 3, 2, 1)
    torch.testing.assert_close(certain.mean, F.max_pool2d(x.mean, 3, 2, 1))


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("ceil", [True, False])
def test_average_pooling_weighs_its_windows(padded, ceil):
    x = Moments(torch.zeros(1, 1, 5, 6, dtype=torch.float64), torch.rand(1, 1, 5, 6, dtype=torch.float64))
    got = avg_pool(x, (2, 3), 2, (1, 1), ceil, padded)
    pool = lambda t: F.avg_pool2d(t, (2, 3), 2, (1, 1), ceil, padded)  # noqa: E731
    weights = torch.func.jacrev(pool)(x.mean).flatten(-4).flatten(0, 3)
    torch.testing.assert_close(got.variance.flatten(), weights.square() @ x.variance.flatten())
    got = adaptive_avg_pool(x, (3, 4))
    weights = torch.func.jacrev(lambda t: F.adaptive_avg_pool2d(t, (3, 4)))(x.mean).flatten(-4).flatten(0, 3)
    torch.testing.assert_close(got.variance.flatten(), weights.square() @ x.variance.flatten())


class Functional(nn.Module):
    """Like LeNet, written with functions and methods, with a residual sum around a dense layer."""

    def __init__(self):
        super().__init__()
        self.conv, self.mix, self.dense, self.head = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 1), nn.Linear(16, 6), nn.Linear(6, 3)
        self.drop = nn.Dropout(0.2)

    def forward(self, x, scale=2.0):
        h = F.max_pool2d(F.relu(self.conv(x)), 3)
        h = h + self.mix(h).relu()
        h = self.dense(self.drop(h.view(h.size(0), -1)))
        return self.head(torch.relu(h) * scale)


def test_functions_methods_sums_and_dense_layers():
    torch.manual_seed(0)
    model = widen(svdc.convert(Functional(), exclude=["dense"]), low=-6, high=-4, dead=0.0)
    check_near(model, torch.randn(3, 1, 8, 8, generator=seeded(2)), 0.25, 0.3)


@pytest.mark.parametrize("task", ["classification", "binary"])
def test_probabilities(task):
    model = widen(svdc.convert(mlp(4, 30, 3)), high=-2, dead=0.1)
    x = torch.randn(5, 4, generator=seeded(2))
    got = moments(model, x, task, samples=SAMPLES, generator=seeded(1))
    want = mc_predict(model, x, SAMPLES, task=task, generator=seeded(2))
    torch.testing.assert_close(got.mean, want.mean, rtol=0, atol=0.02)
    torch.testing.assert_close(got.epistemic_std, want.epistemic_std, rtol=0.15, atol=0.01)
    torch.testing.assert_close(got.mutual_information, want.mutual_information, rtol=0.25, atol=2e-3)


@pytest.mark.parametrize(
    "layer, shape", [(nn.Linear(4, 3), (5, 4)), (nn.Conv2d(2, 3, 3), (2, 2, 6, 6))], ids=["Linear", "Conv2d"]
)
def test_a_layer_by_itself(layer, shape):
    model, x = widen(svdc.convert(layer)), torch.randn(shape, generator=seeded(2))
    got, want = moments(model, x), moments(nn.Sequential(model), x)
    torch.testing.assert_close([got.mean, got.variance], [want.mean, want.variance])
    torch.testing.assert_close(moments(model, {"input": x}).mean, got.mean)


@pytest.mark.parametrize("task", ["classification", "binary", "regression", "gaussian"])
def test_the_batch_goes_through_in_slices(task, monkeypatch):
    model = widen(svdc.convert(mlp(4, 30, 4)), high=-3, dead=0.1)
    x = torch.randn(11, 4, generator=seeded(2))
    rows = []
    model.register_forward_pre_hook(lambda module, args: rows.append(len(args[0])))  # the probe
    monkeypatch.setattr(
        _moments, "propagate", lambda follow, x, old=_moments.propagate: (rows.append(len(x)), old(follow, x))[1]
    )
    whole, sliced = (moments(model, x, task, samples=4000, generator=seeded(1), chunk=chunk) for chunk in (None, 4))
    assert rows == [8, 11, 8, *(8, 3), 4, 4, 3]  # in parentheses: whether it may be cut
    probabilities = task in ("classification", "binary")
    tolerance = {"rtol": 0.05, "atol": 0.02} if probabilities else {"rtol": 1e-5, "atol": 1e-6}  # other draws of the logits
    for name, value in whole.numpy().items():
        np.testing.assert_allclose(sliced.numpy()[name], value, **tolerance)


class Optional(nn.Module):
    """Default arguments, keyword calls, and sums with a factor."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.relu = nn.Linear(4, 3), nn.Linear(4, 3), nn.ReLU()

    def forward(self, x, scale=None, shift=1.5):
        y = torch.sub(torch.add(self.one(x), self.two(x), alpha=2), x[:, :3], alpha=0.5)
        y = x[:, 1:] - y + shift
        return self.relu(input=y if scale is None else y * scale)


def test_defaults_keywords_and_factors_of_sums():
    torch.manual_seed(0)
    model = widen(svdc.convert(Optional()), dead=0.0)
    x = torch.randn(3, 4, generator=seeded(2))
    check_exact(model, x)
    named, scaled = moments(model, {"x": x}), moments(model, (x, torch.tensor(2.0)))
    torch.testing.assert_close(named.mean, moments(model, x).mean)
    torch.testing.assert_close(scaled.mean, 2 * named.mean)
    torch.testing.assert_close(scaled.variance, 4 * named.variance)


def test_a_variance_head():
    model = widen(svdc.convert(mlp(4, 30, 4)), high=-3, dead=0.1)
    x = torch.randn(5, 4, generator=seeded(2))
    got, want = moments(model, x, "gaussian"), mc_predict(model, x, SAMPLES, task="gaussian", generator=seeded(1))
    torch.testing.assert_close(got.aleatoric, want.aleatoric, rtol=0.15, atol=0)
    torch.testing.assert_close(got.epistemic, want.epistemic, rtol=0.2, atol=0)
    with_noise = moments(widen(svdc.convert(mlp(4, 3))), x, tau=4.0, full=True)
    assert with_noise.aleatoric.shape == (5, 3, 3) and with_noise.aleatoric[0, 0, 0] == 0.25


def test_the_mean_noise_is_that_of_a_log_normal_variable():
    model = svdc.convert(nn.Sequential(nn.Linear(1, 2)), log_sigma2=0.3)
    model[0].mask = torch.ones(2, 1, dtype=torch.bool)
    got = moments(model, torch.tensor([[1.0], [2.0]]), "gaussian")
    with torch.no_grad():
        mean = model.eval()(torch.tensor([[1.0], [2.0]]))[:, 1]
    want = (mean + 0.5 * torch.tensor([1.0, 4.0]) * np.exp(0.3)).exp()
    torch.testing.assert_close(got.aleatoric[:, 0], want.double(), rtol=1e-5, atol=0)


def test_what_cannot_be_followed():
    x = torch.randn(2, 4)
    for layer in (nn.Tanh(), nn.Softmax(1), nn.LayerNorm(5)):
        with pytest.raises(ModelError, match=f"no rule for {type(layer).__name__}"):
            moments(widen(svdc.convert(nn.Sequential(nn.Linear(4, 5), layer))), x)

    class Branch(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 2)

        def forward(self, x):
            return self.linear(x) if x.sum() > 0 else x

    with pytest.raises(ModelError, match="cannot follow Branch"):
        moments(svdc.convert(Branch()), x)
    with pytest.raises(DataError, match="does not fit Sequential") as caught:
        moments(svdc.convert(mlp(4, 3)), torch.randn(2, 5))
    assert "While executing" not in str(caught.value)
    with pytest.raises(UsageError, match="method"):
        mc_predict(svdc.convert(mlp(4, 3)), x, method="moment")


def test_the_model_is_left_as_it_was():
    model = widen(svdc.convert(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5)))).train()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    assert not moments(model, torch.randn(3, 4)).mean.requires_grad
    assert model.training and model[1].training
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
