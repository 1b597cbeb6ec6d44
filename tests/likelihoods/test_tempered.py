"""Temperatures and noise of the mean, as stored in likelihoods, against plain arithmetic."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import svdcompress as svdc
from svdcompress.errors import UsageError
from svdcompress.export import export_onnx
from svdcompress.likelihoods import (
    Binary,
    Classification,
    Gaussian,
    Regression,
    as_stored,
    from_stored,
    likelihood_for,
    likelihood_of,
    own_likelihood,
    set_likelihood,
)
from svdcompress.uncertainty import mc_predict, mean_predict


def network(outputs=3):
    torch.manual_seed(0)
    model = svdc.convert(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, outputs)))
    for layer in (model[0], model[2]):
        layer.log_sigma2.data.fill_(-3.0)
    return model.eval()


def test_probabilities_of_the_mean_and_of_draws_have_their_own_temperature():
    model, x = network(), torch.randn(5, 4)
    set_likelihood(model, Classification(temperature=2.5, mean_temperature=0.5))
    assert torch.allclose(mean_predict(model, x).mean, (model(x).double() / 0.5).softmax(1), atol=1e-6)
    draws = []
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        draws.append(mc_predict(model, x, 1, generator=generator, task="regression").mean)
    for seed, logits in enumerate(draws):
        generator = torch.Generator().manual_seed(seed)
        assert torch.allclose(mc_predict(model, x, 1, generator=generator).mean, (logits / 2.5).softmax(1), atol=1e-6)


def test_binary_too():
    model, x = network(1), torch.randn(5, 4)
    set_likelihood(model, Binary(temperature=3.0))
    assert torch.allclose(mean_predict(model, x).mean, torch.sigmoid(model(x).double() / 3), atol=1e-6)


def test_a_task_that_is_given_forgets_it():
    model, x = network(), torch.randn(5, 4)
    set_likelihood(model, Classification(temperature=2.5))
    assert torch.allclose(mean_predict(model, x, task="classification").mean, model(x).double().softmax(1), atol=1e-6)
    assert own_likelihood(model, "classification").temperature == 2.5
    assert own_likelihood(model, "regression").name == "regression"
    assert own_likelihood(network(), "classification", 1).temperature == 1


def test_moments_spread_with_the_square():
    model, x = network(), torch.randn(5, 4)
    halved = network()
    with torch.no_grad():  # dividing the last layer by 2 equals a temperature of 2
        halved[2].weight.div_(2), halved[2].bias.div_(2), halved[2].log_sigma2.sub_(2 * torch.tensor(2.0).log())
    set_likelihood(model, Classification(temperature=2.0))
    ours, theirs = (
        mc_predict(m, x, 4000, method="moments", generator=torch.Generator().manual_seed(0)) for m in (model, halved)
    )
    assert torch.allclose(ours.mean, theirs.mean, atol=1e-5)


def test_losses_and_figures():
    z, y = torch.randn(6, 3), torch.tensor([0, 1, 2, 0, -100, 1])
    likelihood = Classification(temperature=2.0)
    assert torch.allclose(likelihood.loss(z, y), F.cross_entropy(z / 2, y))
    assert torch.allclose(likelihood.figures(z, y)[1], F.cross_entropy(z / 2, y, reduction="none"))


@pytest.mark.parametrize(
    "likelihood",
    [
        Classification(temperature=2.0, mean_temperature=0.5),
        Binary(temperature=0.3),
        Gaussian(temperature=1.5, mean_temperature=2.5),
        Regression(tau=4.0, mean_tau=2.0),
    ],
)
def test_stored_and_read_again(likelihood, tmp_path):
    model = set_likelihood(network(), likelihood)
    svdc.save(model, tmp_path / "m.safetensors")
    found = likelihood_of(svdc.load(tmp_path / "m.safetensors", network()))
    assert as_stored(found) == as_stored(likelihood) == as_stored(from_stored(as_stored(likelihood)))
    plain = type(likelihood)()
    assert likelihood.plain().settings() == plain.settings()


def test_files_before_know_nothing_of_it():
    assert Classification().settings() == {"dim": 1} and Regression(tau=2.0).settings() == {"dim": 1, "tau": 2.0}


def test_noise_in_other_units_and_of_the_mean():
    found = Regression(tau=4.0, mean_tau=1.0).rescaled(2.0)
    assert found.tau == 1.0 and found.of_mean().tau == 0.25 and found.of_mean().of_mean().tau == 0.25
    model, x = network(1), torch.randn(5, 4)
    set_likelihood(model, Regression(tau=4.0, mean_tau=1.0))
    assert torch.allclose(mc_predict(model, x, 2).aleatoric, torch.tensor(0.25, dtype=torch.float64))
    assert torch.allclose(mean_predict(model, x).aleatoric, torch.tensor(1.0, dtype=torch.float64))
    assert likelihood_for(Classification(temperature=2.0), 2).temperature == 2.0


@pytest.mark.parametrize("value", [0, -1.0, float("inf"), float("nan"), "2", True])
def test_impossible_temperatures(value):
    with pytest.raises(UsageError, match="temperature"):
        Classification(temperature=value)


def test_both_files_hold_it(tmp_path):
    import numpy as np
    import onnxruntime

    model, x = network(), torch.randn(5, 4)
    set_likelihood(model, Classification(temperature=2.5, mean_temperature=0.5))
    written = export_onnx(model, tmp_path / "model.onnx", x)
    assert written.metadata["temperature"] == 0.5
    (logits,) = onnxruntime.InferenceSession(str(tmp_path / "model.onnx")).run(None, {"input": x.numpy()})
    assert np.allclose(logits, model(x).detach().numpy() / 0.5, atol=1e-5)
    written = export_onnx(model, tmp_path / "mc.onnx", x, monte_carlo=True)
    assert written.metadata["temperature"] == 2.5
    feed = {"input": x.numpy(), "samples": np.array(20000)}
    found = onnxruntime.InferenceSession(str(tmp_path / "mc.onnx")).run(["mean"], feed)[0]
    logits = torch.cat([mc_predict(model, x, 1, task="regression").mean.unsqueeze(0) for _ in range(3000)])
    assert np.allclose(found, (logits / 2.5).softmax(-1).mean(0).numpy(), atol=0.02)
    assert not np.allclose(found, logits.softmax(-1).mean(0).numpy(), atol=0.02)


def test_further_outputs_are_part_of_both_graphs(tmp_path):
    import numpy as np
    import onnxruntime

    model, x = network(), torch.randn(5, 4)
    further = lambda found: {"sure": found.get("mean", found.get("output")).amax(1)}  # noqa: E731
    export_onnx(model, tmp_path / "model.onnx", x, further=further)
    logits, sure = onnxruntime.InferenceSession(str(tmp_path / "model.onnx")).run(["output", "sure"], {"input": x.numpy()})
    assert np.array_equal(logits.max(1), sure)
    export_onnx(model, tmp_path / "mc.onnx", x, monte_carlo=True, further=further)
    session = onnxruntime.InferenceSession(str(tmp_path / "mc.onnx"))
    mean, sure = session.run(["mean", "sure"], {"input": x.numpy(), "samples": np.array(7)})
    assert np.array_equal(mean.max(1), sure)


def test_an_output_with_a_name_keeps_it(tmp_path):
    import onnxruntime

    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = network()

        def forward(self, x):
            return {"logits": self.inner(x), "twice": 2 * x}

    model, x = Named().eval(), torch.randn(5, 4)
    set_likelihood(model, Classification(temperature=4.0))
    written = export_onnx(model, tmp_path / "model.onnx", x)
    assert written.outputs == ["output", "twice"]
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"))
    assert torch.allclose(torch.from_numpy(session.run(["output"], {"input": x.numpy()})[0]), model(x)["logits"] / 4, atol=1e-5)


# Means and log variances: a temperature multiplies the variances


class Pair(nn.Module):
    """A network that returns means and log variances as two outputs."""

    def __init__(self):
        super().__init__()
        self.inner = network(4)

    def forward(self, x):
        return tuple(self.inner(x).chunk(2, 1))


@pytest.mark.parametrize("make", [lambda: network(4), lambda: Pair().eval()], ids=["tensor", "pair"])
def test_the_noise_that_a_network_names_is_multiplied(make, tmp_path):
    import numpy as np
    import onnxruntime

    model, x = make(), torch.randn(5, 4)
    plain = mc_predict(model, x, 50, generator=torch.Generator().manual_seed(0), task="gaussian")
    set_likelihood(model, Gaussian(temperature=3.0, mean_temperature=0.5))
    drawn = mc_predict(model, x, 50, generator=torch.Generator().manual_seed(0))
    assert torch.equal(drawn.mean, plain.mean) and torch.equal(drawn.epistemic, plain.epistemic)
    torch.testing.assert_close(drawn.aleatoric, 3 * plain.aleatoric)
    torch.testing.assert_close(drawn.variance, 3 * plain.aleatoric + plain.epistemic)
    output = model(x)
    mean, log_variance = output if isinstance(output, tuple) else output.chunk(2, 1)
    torch.testing.assert_close(mean_predict(model, x).aleatoric, 0.5 * log_variance.double().exp())
    written = export_onnx(model, tmp_path / "model.onnx", x)
    assert written.metadata["temperature"] == 0.5
    found = np.concatenate(onnxruntime.InferenceSession(str(tmp_path / "model.onnx")).run(None, {"input": x.numpy()}), 1)
    assert np.allclose(found[:, :2], mean.detach().numpy(), atol=1e-5)
    assert np.allclose(np.exp(found[:, 2:]), 0.5 * log_variance.exp().detach().numpy(), rtol=1e-4)
    written = export_onnx(model, tmp_path / "mc.onnx", x, monte_carlo=True)
    assert written.metadata["temperature"] == 3.0
    feed = {"input": x.numpy(), "samples": np.array(20000)}
    noise = onnxruntime.InferenceSession(str(tmp_path / "mc.onnx")).run(["aleatoric"], feed)[0]
    many = mc_predict(model, x, 20000, generator=torch.Generator().manual_seed(1), task="gaussian").aleatoric
    assert np.allclose(noise, 3 * many.numpy(), rtol=0.1)


def test_moments_of_a_tempered_noise():
    model, x = network(4), torch.randn(5, 4)
    plain = mc_predict(model, x, method="moments", task="gaussian")
    found = mc_predict(model, x, method="moments", task=Gaussian(temperature=3.0))
    torch.testing.assert_close(found.mean, plain.mean)
    torch.testing.assert_close(found.epistemic, plain.epistemic)
    torch.testing.assert_close(found.aleatoric, 3 * plain.aleatoric)


def test_the_loss_of_a_tempered_noise_is_that_of_the_wider_distribution():
    output, y = torch.randn(6, 2), torch.randn(6, 1)
    density = torch.distributions.Normal(output[:, :1], (4.0 * output[:, 1:].exp()).sqrt())
    likelihood = Gaussian(temperature=4.0)
    torch.testing.assert_close(likelihood.figures(output, y)[1], -density.log_prob(y).double(), rtol=1e-6, atol=1e-6)
    wanted = -density.log_prob(y).mean() - 0.5 * torch.log(torch.tensor(2 * torch.pi))
    torch.testing.assert_close(likelihood.loss(output, y), wanted)


def test_units_are_changed_before_the_temperature_comes():
    """A model in the target's own units carries the likelihood, which then tempers its outputs once."""
    output = torch.randn(6, 2)
    likelihood = Gaussian(temperature=4.0)
    once = likelihood.moments(likelihood.heads(likelihood.in_units(output, 7.0, 3.0)))
    torch.testing.assert_close(once[0], 7 + 3 * output[:, :1])
    torch.testing.assert_close(once[1], 9 * 4 * output[:, 1:].exp())


class Shifted(Classification):
    name = "shifted in test_tempered"

    def __init__(self, dim=1, temperature=1.0, mean_temperature=None, shift=0.0):
        super().__init__(dim, temperature, mean_temperature)
        self.shift = shift

    def settings(self):
        return {**super().settings(), "shift": self.shift}


class Floored(Regression):
    name = "floored in test_tempered"

    def __init__(self, floor=0.0, dim=1, tau=None, mean_tau=None):
        super().__init__(dim, tau, mean_tau)
        self.floor = floor

    def settings(self):
        return {**super().settings(), "floor": self.floor}


def test_a_subclass_keeps_its_own_settings():
    logits = Shifted(2, 1.5, 2.5, shift=5.0)
    assert type(logits.of_mean()) is type(logits.plain()) is Shifted
    assert logits.of_mean().settings() == {"dim": 2, "temperature": 2.5, "shift": 5.0}
    assert logits.plain().settings() == {"dim": 2, "shift": 5.0}
    values = Floored(7.0, 2, 4.0, 16.0)
    assert values.of_mean().settings() == {"dim": 2, "tau": 16.0, "mean_tau": 16.0, "floor": 7.0}
    assert values.plain().settings() == {"dim": 2, "tau": None, "floor": 7.0}
    assert values.rescaled(2.0).settings() == {"dim": 2, "tau": 1.0, "mean_tau": 4.0, "floor": 7.0}
    outputs = Floored(tau=torch.tensor([4.0, 8.0]), mean_tau=torch.tensor([1.0, 2.0])).rescaled(2.0)
    assert type(outputs) is Floored and outputs.settings()["tau"] == [1.0, 2.0]


@pytest.mark.parametrize("wrap", [torch.optim.swa_utils.AveragedModel, nn.DataParallel])
def test_a_wrapped_model_keeps_its_likelihood(wrap):
    model, x = network(), torch.randn(5, 4)
    set_likelihood(model, "regression", tau=4.0)
    wrapped = wrap(model)
    assert likelihood_of(wrapped).settings()["tau"] == 4.0
    assert mc_predict(wrapped, x, 5).task == mean_predict(wrapped, x).task == "regression"
    set_likelihood(wrapped, "gaussian")
    assert likelihood_of(wrapped).name == "gaussian"
