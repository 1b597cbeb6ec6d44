"""The contract of every likelihood, including one of the user's own: against torch.distributions and plain numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributions import Bernoulli, Categorical, Normal, Poisson

import svdcompress as svdc
from svdcompress.errors import CheckpointError, UsageError
from svdcompress.likelihoods import Binary, Classification, Gaussian, Likelihood, Regression, likelihood_of


class Counts(Likelihood):
    """Outputs are the log rates of counts."""

    name = "counts-of-the-test"

    def __init__(self, dim: int = 1, exposure: float = 1.0) -> None:
        super().__init__(dim)
        self.exposure = exposure

    def settings(self):
        return {**super().settings(), "exposure": self.exposure}

    def nll(self, output, target):
        log_rate = self.heads(output) + torch.tensor(self.exposure).log()
        return log_rate.exp() - target * log_rate + torch.lgamma(target + 1)

    def moments(self, heads):
        rate = self.exposure * heads.exp()
        return rate, rate


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def halves(output, dim):
    size = output.shape[dim] // 2
    return output.narrow(dim, 0, size), output.narrow(dim, size, size)


def normal(mean, log_variance):
    return Normal(mean, (0.5 * log_variance).exp())


HALF_LOG_2PI = 0.5 * float(np.log(2 * np.pi))
# name: (likelihood, output shape, its distribution by hand, constant that the loss omits)
CASES = {
    "classification": (Classification(), (6, 4), lambda y: Categorical(logits=y), 0.0),
    "classes of tokens": (Classification(-1), (6, 3, 4), lambda y: Categorical(logits=y), 0.0),
    "classes of pixels": (Classification(), (6, 4, 3), lambda y: Categorical(logits=y.transpose(1, 2)), 0.0),
    "binary": (Binary(), (6, 3), lambda y: Bernoulli(logits=y), 0.0),
    "one binary": (Binary(), (6,), lambda y: Bernoulli(logits=y), 0.0),
    "regression": (Regression(tau=4.0), (6, 2), lambda y: Normal(y, 0.5), HALF_LOG_2PI - 0.5 * float(np.log(4.0))),
    "gaussian": (Gaussian(), (6, 4), lambda y: normal(*halves(y, 1)), HALF_LOG_2PI),
    "gaussian (3, 4, 2)": (Gaussian(), (3, 4, 2), lambda y: normal(*halves(y, 1)), HALF_LOG_2PI),
    "gaussian, last": (Gaussian(-1), (3, 5, 2), lambda y: normal(*halves(y, 2)), HALF_LOG_2PI),
    "a user's own": (Counts(exposure=2.0), (6, 3), lambda y: Poisson(2 * y.exp()), 0.0),
}


@pytest.fixture(params=CASES, ids=str)
def case(request):
    return CASES[request.param]


def test_the_loss_is_the_mean_negative_log_probability(case):
    likelihood, shape, distribution, left_out = case
    output = torch.randn(shape, generator=seeded(1))
    torch.manual_seed(2)
    target = distribution(output).sample()
    exact = -distribution(output).log_prob(target)
    torch.testing.assert_close(likelihood.nll(output, target).double(), exact.double(), rtol=1e-5, atol=1e-6)
    assert float(likelihood(output, target)) == pytest.approx(float(exact.mean()) - left_out, rel=1e-5)


def test_the_metrics_are_those_of_the_distribution(case):
    likelihood, shape, distribution, _ = case
    output = torch.randn(shape, generator=seeded(1))
    torch.manual_seed(2)
    target = distribution(output).sample()
    first, second, count = (float(part.sum()) for part in likelihood.figures(output, target))
    found = likelihood.metrics(first, second, count)
    assert found["nll"] == pytest.approx(-float(distribution(output).log_prob(target).mean()), rel=1e-5)
    mean = distribution(output)
    if likelihood.probabilities:
        answer = mean.logits.argmax(-1) if likelihood.classes else (mean.logits > 0).float()
        assert found["error"] == pytest.approx(100 * float((answer != target).float().mean()), rel=1e-5)
    else:
        assert found["rmse"] == pytest.approx(float((mean.mean - target).square().mean().sqrt()), rel=1e-5)
    assert set(found) == {likelihood.metric, "nll"}


@pytest.mark.parametrize("likelihood", [Regression(tau=4.0), Gaussian(), Counts()], ids=repr)
def test_figures_of_values_are_in_double_precision(likelihood):
    output = torch.randn(6, 4, generator=seeded(1))
    target = torch.ones_like(likelihood.moments(likelihood.heads(output))[0])
    assert [part.dtype for part in likelihood.figures(output, target)[:2]] == [torch.float64] * 2


@pytest.mark.parametrize("name", ["regression", "gaussian", "gaussian, last"])
def test_an_output_in_the_targets_own_units_is_of_the_scaled_variable(name):
    likelihood, shape, distribution, _ = CASES[name]
    output, shift, scale = torch.randn(shape, generator=seeded(1)), 30.0, 4.0
    before, after = (distribution(each) for each in (output, likelihood.in_units(output, shift, scale)))
    torch.testing.assert_close(after.mean, before.mean * scale + shift)
    if name != "regression":  # its noise is not part of the output
        torch.testing.assert_close(after.stddev, before.stddev * scale)


@pytest.mark.parametrize("likelihood", [Regression(tau=4.0), Regression(), Gaussian(), Counts()], ids=repr)
def test_metrics_in_other_units_are_of_the_scaled_targets(likelihood):
    """The density of `scale * y` is that of y divided by the scale."""
    first, second, count = 18.0, 30.0, 20.0
    plain_ones, scaled = (likelihood.metrics(first, second, count, scale) for scale in (1.0, 3.0))
    assert scaled["rmse"] == pytest.approx(3 * plain_ones["rmse"])
    assert scaled["nll"] == pytest.approx(plain_ones["nll"] + np.log(3.0))


def plain(likelihood, distribution, draws):
    """The statistics of draws (S, B, ...) from their definitions, in numpy."""
    made = [distribution(draw.double()) for draw in draws]
    if likelihood.classes:
        p = np.stack([each.probs.numpy() for each in made])
        label, entropy, axes = p * (1 - p), -(p * np.log(p)).sum(-1), -1
        whole = -(p.mean(0) * np.log(p.mean(0))).sum(axes)
        place = [np.moveaxis(part, -1, likelihood.dim) for part in (p.mean(0), label.mean(0), p.var(0))]
        return {**dict(zip(("mean", "aleatoric", "epistemic"), place, strict=True)), "entropies": (whole, entropy.mean(0))}
    mean = np.stack([each.mean.numpy() for each in made])
    noise = np.stack([each.variance.numpy() for each in made])
    found = {"mean": mean.mean(0), "aleatoric": noise.mean(0), "epistemic": mean.var(0)}
    if likelihood.probabilities:
        entropy = np.stack([each.entropy().numpy() for each in made])
        found["entropies"] = (Bernoulli(torch.from_numpy(mean.mean(0))).entropy().numpy(), entropy.mean(0))
    return found


def test_blocks_of_draws_and_graphs_say_what_the_definitions_say(case):
    likelihood, shape, distribution, _ = case
    draws = torch.randn((9, *shape), generator=seeded(3)) + torch.randn(shape, generator=seeded(4))
    expected = plain(likelihood, distribution, draws)

    sums = likelihood.sums(shape[0])
    for block in (draws[:4], draws[4:]):
        heads = [likelihood.heads(draw) for draw in block]
        pair = isinstance(heads[0], tuple)
        sums.add(tuple(map(torch.stack, zip(*heads, strict=True))) if pair else torch.stack(heads), 0)
    block = sums.prediction(9)
    statistics = likelihood.statistics(parts=True)
    totals = [sum(column) for column in zip(*map(statistics.of_draw, draws), strict=True)]
    graph = statistics.outputs(tuple(totals), torch.tensor(9))

    assert block.task == likelihood.name
    for name in ("mean", "aleatoric", "epistemic"):
        np.testing.assert_allclose(getattr(block, name), expected[name], rtol=1e-9, atol=1e-12, err_msg=name)
        np.testing.assert_allclose(graph[name], expected[name], rtol=1e-5, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(graph["variance"], block.variance, rtol=1e-5, atol=1e-6)
    if "entropies" in expected:
        for name, other, value in zip(
            ("entropy", "expected_entropy"), ("predictive_entropy", "expected_entropy"), expected["entropies"], strict=True
        ):
            np.testing.assert_allclose(getattr(block, name), value, rtol=1e-9)
            np.testing.assert_allclose(graph[other], value, rtol=1e-5)
        np.testing.assert_allclose(graph["mutual_information"], block.mutual_information, atol=1e-6)


@pytest.mark.parametrize("likelihood", [Binary(), Gaussian(), Regression(), Counts()], ids=repr)
def test_a_teacher_is_learnt_from_by_its_means(likelihood):
    output, teacher = torch.randn(6, 4, generator=seeded()), torch.randn(6, 4, generator=seeded(1))
    means = {"binary": teacher.sigmoid(), "gaussian": teacher[:, :2], "regression": teacher, Counts.name: teacher.exp()}
    seen = []
    likelihood.soft_loss(lambda output, target: seen.append(target), output, teacher, 1.0)
    torch.testing.assert_close(seen[0], means[likelihood.name])


@pytest.mark.parametrize(
    "likelihood", [Classification(-1), Binary(), Regression(2, tau=3.0), Gaussian(-1), Counts(2, 7.0)], ids=repr
)
def test_a_model_keeps_its_likelihood_through_copies_pruning_and_files(likelihood, tmp_path):
    torch.manual_seed(0)

    def make():
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))

    model: Any = svdc.set_likelihood(svdc.convert(make()).eval(), likelihood)
    with torch.no_grad():
        model[0].log_sigma2[:3] = 20.0
    small = svdc.prune(model, torch.randn(5, 4))
    svdc.save(small, tmp_path / "model.safetensors")
    loaded = svdc.load(tmp_path / "model.safetensors", make())
    for one in (small, loaded):
        found: Any = likelihood_of(one)
        assert type(found) is type(likelihood) and found.settings() == likelihood.settings()
    stored = svdc.read_manifest(tmp_path / "model.safetensors")["likelihood"]
    assert stored == {"name": likelihood.name, "settings": likelihood.settings()}


@pytest.mark.slow
def test_nor_does_its_monte_carlo_file(tmp_path):
    model = svdc.set_likelihood(svdc.convert(nn.Linear(4, 2)), "gaussian")
    exported = svdc.export_onnx(model, tmp_path / "mc.onnx", torch.randn(2, 4), monte_carlo=True, verify=False)
    assert exported.metadata["task"] == "gaussian" and "aleatoric" in exported.outputs
    svdc.set_likelihood(model, "regression", tau=torch.tensor([1.0, 2.0]))
    with pytest.raises(UsageError, match="one number"):
        svdc.export_onnx(model, tmp_path / "mc.onnx", torch.randn(2, 4), monte_carlo=True)


def test_a_model_that_has_a_likelihood_needs_no_task(tmp_path):
    torch.manual_seed(0)
    model = svdc.convert(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)))
    x = torch.randn(5, 4)
    asked = {task: svdc.mc_predict(model, x, 10, task=task, generator=seeded()) for task in ("classification", "gaussian")}
    assert svdc.mc_predict(model, x, 10, generator=seeded()).mean.equal(asked["classification"].mean)
    svdc.set_likelihood(model, "gaussian")
    found = svdc.mc_predict(model, x, 10, generator=seeded())
    assert found.task == "gaussian" and found.variance.equal(asked["gaussian"].variance)
    given = svdc.mc_predict(model, x, 10, task="classification", generator=seeded())
    assert given.mean.equal(asked["classification"].mean)
    svdc.set_likelihood(model, "regression", tau=4.0)
    assert float(svdc.mc_predict(model, x, 10).aleatoric.max()) == 0.25
    assert float(svdc.mc_predict(model, x, 10, tau=2.0).aleatoric.max()) == 0.5
    assert float(svdc.mc_predict(model, x, 10, task="regression").aleatoric.max()) == 0.0  # passing a task resets the settings
    svdc.set_likelihood(model, None)
    svdc.save(model, tmp_path / "model.safetensors")
    assert "likelihood" not in svdc.read_manifest(tmp_path / "model.safetensors")
    assert svdc.mc_predict(model, x, 10).task == "classification"


def test_a_file_without_a_likelihood_leaves_the_models_own(tmp_path):
    svdc.save(svdc.convert(nn.Linear(4, 2)), tmp_path / "model.safetensors")
    assert likelihood_of(svdc.load(tmp_path / "model.safetensors", nn.Linear(4, 2))) is None
    fresh = svdc.set_likelihood(nn.Linear(4, 2), "binary")
    assert type(likelihood_of(svdc.load(tmp_path / "model.safetensors", fresh))) is Binary


def test_what_is_wrong_with_a_likelihood_is_said(tmp_path):
    with pytest.raises(UsageError, match="another name"):
        type("Mine", (Likelihood,), {"name": "binary"})
    with pytest.raises(UsageError, match="no name of its own"):
        svdc.set_likelihood(nn.Linear(4, 2), type("Mine", (Gaussian,), {})())
    with pytest.raises(UsageError, match=r"gausian.*one of classification"):
        svdc.set_likelihood(nn.Linear(4, 2), "gausian")
    with pytest.raises(UsageError, match="tau: it is the constant precision"):
        svdc.set_likelihood(nn.Linear(4, 2), "gaussian", tau=1.0)
    with pytest.raises(UsageError, match="dim"):
        Classification(dim="1")  # type: ignore[arg-type]


def test_a_tau_for_each_output_and_one_of_numpy(tmp_path):
    model = svdc.set_likelihood(svdc.convert(nn.Linear(4, 2)).eval(), "regression", tau=[1.0, 100.0])
    found = svdc.mc_predict(model, torch.ones(3, 4), 5)
    assert found.aleatoric[0].tolist() == pytest.approx([1.0, 0.01])
    svdc.export_onnx(model, tmp_path / "model.onnx", torch.ones(2, 4))  # contains no noise
    with pytest.raises(UsageError, match="a file has one number for all outputs, not one for each"):
        svdc.export_onnx(model, tmp_path / "mc.onnx", torch.ones(2, 4), monte_carlo=True)
    own = likelihood_of(model)
    for use in (lambda: own.nll(torch.zeros(3, 2), torch.ones(3, 2)), lambda: own.metrics(1.0, 1.0, 3.0)):
        with pytest.raises(UsageError, match=r"tau: .* a single number for all outputs"):
            use()
    svdc.save(
        svdc.set_likelihood(model, Regression(tau=np.float32(2.0), mean_tau=torch.tensor([1.0, 3.0]))),
        tmp_path / "m.safetensors",
    )
    again = likelihood_of(svdc.load(tmp_path / "m.safetensors", nn.Linear(4, 2)))
    assert again.tau == 2.0 and again.mean_tau.tolist() == [1.0, 3.0]


def test_ways_to_draw_are_refused_where_nothing_is_drawn():
    model = svdc.convert(nn.Linear(4, 2))
    for how in ({"members": True}, {"local": True}, {"antithetic": True}):
        with pytest.raises(UsageError, match="draws nothing"):
            svdc.mc_predict(model, torch.ones(3, 4), 4, method="moments", **how)


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("of-nobody", {}, "'of-nobody' is not known here; define or import its class"),
        ("gaussian", {"tau": 3.0}, "do not fit 'gaussian'"),
        ("gaussian", {"dim": 1.5}, "dim: 1.5"),
        ("regression", {"tau": -1.0}, "tau: -1.0 is not a precision"),
        ("regression", {"tau": "x"}, "tau: 'x' is not a precision"),
        ("regression", {"tau": [[1.0], [1.0, 2.0]]}, "do not fit 'regression'"),
    ],
)
def test_a_likelihood_of_a_file_that_cannot_be_had_leaves_the_model_as_it_was(tmp_path, monkeypatch, name, settings, said):
    from svdcompress.checkpoint import _save

    monkeypatch.setattr(_save, "as_stored", lambda likelihood: {"name": name, "settings": settings})
    svdc.save(svdc.set_likelihood(svdc.convert(nn.Linear(4, 2)), "binary"), tmp_path / "model.safetensors")
    model = nn.Linear(4, 2)
    with pytest.raises(CheckpointError, match=said):
        svdc.load(tmp_path / "model.safetensors", model)
    assert type(model) is nn.Linear and likelihood_of(model) is None


@pytest.mark.slow
def test_a_likelihood_of_the_users_own_from_training_to_files(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(256, 3)
    rate = (0.5 * x[:, :1] + 1).exp()
    y = torch.poisson(rate, generator=seeded(1))

    def make():
        return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))

    likelihood = Counts()
    model = svdc.set_likelihood(svdc.convert(make()), likelihood)
    elbo = svdc.ELBO(model, likelihood, num_examples=256, schedule=0.1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(300):
        optimizer.zero_grad()
        elbo(model(x), y).backward()
        optimizer.step()
    found = svdc.mc_predict(model, x, 400, generator=seeded(2))
    assert found.task == Counts.name
    assert float((found.mean - rate).abs().mean() / rate.mean()) < 0.15
    torch.testing.assert_close(found.aleatoric, found.mean)  # a Poisson distribution
    torch.testing.assert_close(found.variance, found.aleatoric + found.epistemic)
    propagated = svdc.mc_predict(model, x, 400, method="moments", generator=seeded(3))
    assert float((propagated.mean - found.mean).abs().mean() / rate.mean()) < 0.05

    svdc.save(model, tmp_path / "model.safetensors")
    loaded = svdc.load(tmp_path / "model.safetensors", make())
    assert svdc.mc_predict(loaded, x, 400, generator=seeded(2)).variance.equal(found.variance)

    import onnxruntime

    exported = svdc.export_onnx(loaded, tmp_path / "mc.onnx", x[:2], monte_carlo=True)
    assert exported.metadata["task"] == Counts.name and exported.parity is not None
    session = onnxruntime.InferenceSession(str(exported.path), providers=["CPUExecutionProvider"])
    given = {"input": x.numpy(), "samples": np.array(2000), "seed": np.array(5)}
    file: Any = dict(zip(exported.outputs, session.run(None, given), strict=True))
    np.testing.assert_allclose(file["mean"], found.mean, rtol=0.1, atol=0.05)
    np.testing.assert_allclose(file["variance"], found.variance, rtol=0.15, atol=0.1)
