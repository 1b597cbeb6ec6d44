"""Predictions of models on a GPU: means, spreads and moments as on the CPU, for all kinds of inputs and outputs."""

import copy

import pytest
import torch
from torch import nn

import svdcompress as svdc
from svdcompress.errors import UsageError
from svdcompress.uncertainty import ensemble_predict

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DRAWS = 2000


class Recurrent(nn.Module):
    """The inputs of the recurrence are already noisy."""

    def __init__(self):
        super().__init__()
        self.first, self.rnn, self.head = nn.Linear(5, 6), nn.LSTM(6, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.rnn(self.first(x))[0][:, -1])


class Attending(nn.Module):
    """Uses torch's own encoder, which has a fused path in eval()."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.1, batch_first=True)
        self.body, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=True), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.body(x).mean(1))


class Two(nn.Module):
    """Two inputs, one of them integers; the outputs are named."""

    def __init__(self):
        super().__init__()
        self.words, self.first, self.head = nn.Embedding(9, 4), nn.Linear(5, 4), nn.Linear(8, 3)

    def forward(self, values, ids):
        found = self.head(torch.cat([self.first(values).tanh(), self.words(ids)], 1))
        return {"hidden": found * 2, "logits": found}


class MeanAndVariance(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.mean, self.log_variance = nn.Linear(5, 8), nn.Linear(8, 2), nn.Linear(8, 2)

    def forward(self, x):
        h = self.body(x).relu()
        return self.mean(h), self.log_variance(h).tanh()


class AcrossTheBatch(nn.Module):
    """Rows depend on each other, so batches are never split."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x):
        h = self.first(x).tanh()
        return self.head(h - h.mean(0))


def convnet():
    head = [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3)]
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), *head)


def volume():
    return nn.Sequential(
        nn.Conv3d(1, 4, 2), nn.BatchNorm3d(4), nn.ReLU(), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(4, 3)
    )


def rows(*shape):
    return torch.randn(7, *shape)


MODELS = {
    "mlp": (
        lambda: nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3)),
        lambda: rows(5),
        "classification",
    ),
    "convnet": (convnet, lambda: rows(2, 8, 8), "classification"),
    "images": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.GELU(), nn.Conv2d(4, 3, 1)),
        lambda: rows(2, 6, 6),
        "classification",
    ),
    "volumes": (volume, lambda: rows(1, 4, 4, 4), "classification"),
    "transposed": (
        lambda: nn.Sequential(nn.ConvTranspose1d(2, 3, 3, 2), nn.Flatten(), nn.Linear(27, 2)),
        lambda: rows(2, 4),
        "regression",
    ),
    "recurrent": (Recurrent, lambda: rows(4, 5), "classification"),
    "attention": (Attending, lambda: rows(4, 8), "classification"),
    "tuple": (Two, lambda: (rows(5), torch.arange(7)), "classification"),
    "dict": (Two, lambda: {"ids": torch.arange(7), "values": rows(5)}, "classification"),
    "several targets": (lambda: nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 4)), lambda: rows(5), "regression"),
    "questions": (lambda: nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 2)), lambda: rows(5), "binary"),
    "two heads": (MeanAndVariance, lambda: rows(5), "gaussian"),
    "rows that meet": (AcrossTheBatch, lambda: rows(5), "classification"),
}
every_model = pytest.mark.parametrize("name", MODELS)
PROPAGATED = ("mlp", "convnet", "volumes", "transposed", "several targets", "questions")


@pytest.fixture(autouse=True)
def exact(monkeypatch):
    """Convolutions in full float32, not in TF32."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def moved(x):
    if isinstance(x, dict):
        return {key: value.cuda() for key, value in x.items()}
    return tuple(value.cuda() for value in x) if isinstance(x, tuple) else x.cuda()


def model_of(name):
    """A model in eval() with some irrelevant weights, its inputs and its task."""
    make, inputs, task = MODELS[name]
    torch.manual_seed(0)
    model = svdc.convert(svdc.convert_dropout(make()) if name in ("mlp", "attention") else make())
    for layer in model.modules():
        if hasattr(layer, "log_sigma2"):
            layer.log_sigma2.data.uniform_(-7, -3)
            layer.log_sigma2.data.view(-1)[::5] = 9.0
        if hasattr(layer, "running_var"):
            layer.running_mean.uniform_(-0.3, 0.3)
            layer.running_var.uniform_(0.5, 2)
    return model.eval(), inputs(), task


def alike(found, expected, samples=DRAWS):
    """Check agreement up to the sampling error of both sides."""
    open_ = (2 * expected.epistemic / samples).sqrt()
    assert found.mean.is_cuda and found.epistemic.is_cuda
    assert ((found.mean.cpu() - expected.mean).abs() < 6 * open_ + 1e-3).all()
    torch.testing.assert_close(found.epistemic.cpu(), expected.epistemic, rtol=0.35, atol=2e-4)
    torch.testing.assert_close(found.aleatoric.cpu(), expected.aleatoric, rtol=0.05, atol=5e-3)


@every_model
def test_the_mean_is_that_of_the_cpu(name):
    model, x, task = model_of(name)
    expected = svdc.mean_predict(model, x, task=task)
    found = svdc.mean_predict(copy.deepcopy(model).cuda(), x, task=task)  # inputs are moved to the model automatically
    torch.testing.assert_close(found.mean.cpu(), expected.mean, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(found.variance.cpu(), expected.variance, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("how", [{}, {"members": True}, {"local": True}, {"antithetic": True}], ids=str)
@every_model
def test_draws_spread_as_on_the_cpu(name, how):
    model, x, task = model_of(name)
    there = copy.deepcopy(model).cuda()
    samples = 600 if name in ("recurrent", "attention", "rows that meet") else DRAWS
    torch.manual_seed(1)
    expected = svdc.mc_predict(model, x, samples, task=task, **how)
    alike(svdc.mc_predict(there, moved(x), samples, task=task, **how), expected, samples / (1 + ("antithetic" in how)))
    assert not any(own.grad is not None for own in there.parameters()) and not there.training


@every_model
def test_a_generator_of_either_device_repeats_the_draws(name):
    model, x, task = model_of(name)
    model = model.cuda()
    for device in ("cpu", "cuda"):
        found = [svdc.mc_predict(model, x, 20, task=task, generator=torch.Generator(device).manual_seed(5)) for _ in range(2)]
        torch.testing.assert_close(found[0].mean, found[1].mean, rtol=1e-4, atol=1e-5)
        other = svdc.mc_predict(model, x, 20, task=task, generator=torch.Generator(device).manual_seed(6))
        assert not torch.allclose(other.mean, found[0].mean, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", PROPAGATED)
def test_moments_are_propagated_as_on_the_cpu(name):
    model, x, task = model_of(name)
    there = copy.deepcopy(model).cuda()
    for full in (False, True) if task == "regression" else (False,):
        expected = svdc.mc_predict(model, x, 4000, task=task, method="moments", full=full)
        found = svdc.mc_predict(there, moved(x), 4000, task=task, method="moments", full=full)
        close = {"rtol": 1e-3, "atol": 1e-4} if task == "regression" else {"rtol": 0.1, "atol": 0.02}
        torch.testing.assert_close(found.mean.cpu(), expected.mean, **close)
        torch.testing.assert_close(found.epistemic.cpu(), expected.epistemic, **close)


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("two heads", "tuple", "dict")])
def test_a_call_under_sampling_is_a_draw_of_the_posterior(name):
    model, x, _ = model_of(name)
    model, x, draws = model.cuda(), moved(x), 300
    expected = svdc.mc_predict(model, x, DRAWS, task="regression", dim=1)
    with torch.no_grad(), svdc.sampling(model, generator=torch.Generator("cuda").manual_seed(0)):
        y = torch.stack([model(x) for _ in range(draws)]).double()
    std = expected.epistemic.sqrt()
    assert y.is_cuda and ((y.mean(0) - expected.mean).abs() < 6 * std * (1 / draws + 1 / DRAWS) ** 0.5 + 1e-3).all()
    assert float((y.std(0) / std).median()) == pytest.approx(1, abs=0.1)


@every_model
def test_a_model_that_draws_is_trained_on_the_device(name):
    """A step in train(), with and without autocast; the gradients are on the device, finite and not all 0."""
    model, x, _ = model_of(name)
    for half in (False, True):
        there = copy.deepcopy(model).cuda().train()
        with torch.autocast("cuda", torch.bfloat16, enabled=half):
            found = there(**moved(x)) if isinstance(x, dict) else there(*moved(x)) if isinstance(x, tuple) else there(moved(x))
            found = found["logits"] if isinstance(found, dict) else torch.cat(found) if isinstance(found, tuple) else found
        (found.float().square().mean() + 1e-4 * svdc.kl_divergence(there)).backward()
        for layer in there.modules():
            if hasattr(layer, "log_sigma2"):
                for own in (layer.weight.grad, layer.log_sigma2.grad):
                    assert own.is_cuda and bool(own.isfinite().all()) and float(own.abs().max()) > 0


@pytest.mark.parametrize("name", ["mlp", "convnet", "dict"])
def test_parts_of_a_batch_are_predicted_as_the_whole(name):
    model, x, task = model_of(name)
    model = model.cuda()
    whole = svdc.mc_predict(model, x, DRAWS, task=task)
    some = svdc.mc_predict(model, x, DRAWS, task=task, chunk=300)
    assert ((some.mean - whole.mean).abs() < 6 * (2 * whole.epistemic / DRAWS).sqrt() + 1e-3).all()


def test_rows_that_meet_are_not_cut():
    model, x, task = model_of("rows that meet")
    with pytest.raises(UsageError, match="the rows of a batch interact"):
        svdc.mc_predict(model.cuda(), x, 10, task=task, chunk=3)


def test_channels_last_models_draw_alike():
    """In the memory format that training leaves on a GPU."""
    model, x, task = model_of("convnet")
    expected = svdc.mc_predict(model, x, DRAWS, task=task)
    there = model.cuda().to(memory_format=torch.channels_last)
    alike(svdc.mc_predict(there, x.cuda().contiguous(memory_format=torch.channels_last), DRAWS, task=task), expected)


def test_an_ensemble_on_the_device_is_that_of_the_cpu():
    models, x = [], rows(5)
    for seed in range(3):
        torch.manual_seed(seed)
        models.append(nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)))
    expected = ensemble_predict(models, x, task="classification")
    found = ensemble_predict([copy.deepcopy(model).cuda() for model in models], x, task="classification")
    assert found.mean.is_cuda and set(found.numpy()) == set(expected.numpy())
    torch.testing.assert_close(found.mean.cpu(), expected.mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.epistemic.cpu(), expected.epistemic, rtol=1e-3, atol=1e-6)


def test_the_covariance_of_several_targets_is_that_of_the_cpu():
    model, x, task = model_of("several targets")
    expected = svdc.mc_predict(model, x, 4000, task=task, full=True, tau=4.0)
    found = svdc.mc_predict(copy.deepcopy(model).cuda(), x, 4000, task=task, full=True, tau=4.0)
    assert found.epistemic.shape == (7, 4, 4)
    scale = expected.epistemic.diagonal(dim1=1, dim2=2).sqrt()
    limit = 0.15 * scale[:, :, None] * scale[:, None] + 1e-4
    assert ((found.epistemic.cpu() - expected.epistemic).abs() < limit).all()
    torch.testing.assert_close(found.aleatoric.cpu(), expected.aleatoric)
