"""Posteriors and temperatures fitted on a GPU, against those of the CPU."""

import copy

import pytest
import torch
from torch import nn

import svdcompress as svdc
from svdcompress.calibrate import (
    Joint,
    LowRank,
    draws_of,
    gauss_newton,
    held,
    joint_draws,
    kept_of,
    kronecker,
    low_rank,
    refit,
    with_variances,
)
from svdcompress.likelihoods import likelihood_for
from svdcompress.sources import InMemory
from svdcompress.uncertainty import fit_temperature, selective

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(autouse=True)
def exact(monkeypatch):
    """Convolutions in full float32, not in TF32."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def convnet():
    head = [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3)]
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Tanh(), *head)


class MeanAndVariance(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.mean, self.log_variance = nn.Linear(5, 6), nn.Linear(6, 1), nn.Linear(6, 1)

    def forward(self, x):
        h = self.body(x).tanh()
        return self.mean(h)[:, 0], self.log_variance(h)[:, 0].tanh()


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.rnn, self.head = nn.Linear(5, 4), nn.GRU(4, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.rnn(self.first(x))[0][:, -1])


MODELS = {
    "classification": (lambda: nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)), (5,)),
    "images": (convnet, (1, 4, 4)),
    "binary": (lambda: nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 1), nn.Flatten(0)), (5,)),
    "regression": (lambda: nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2)), (5,)),
    "gaussian": (MeanAndVariance, (5,)),
}


def task_of(name):
    return "classification" if name in ("images", "recurrent") else name


def model_of(name, n=160):
    """A sparse model in eval() with masks held, and examples drawn from it."""
    make, shape = MODELS.get(name, (Recurrent, (3, 5)))
    torch.manual_seed(0)
    model = svdc.convert(make()).eval()
    for layer in model.modules():
        if hasattr(layer, "log_sigma2"):
            layer.log_sigma2.data.uniform_(-4, -2)
            layer.mask = torch.rand(layer.weight.shape) < 0.6
    x = torch.randn(n, *shape)
    with torch.no_grad():
        heads = model(x)
    if task_of(name) == "classification":
        y = torch.multinomial((2 * heads).softmax(1), 1)[:, 0]
    elif name == "binary":
        y = (torch.rand(n) < heads.sigmoid()).float()
    else:
        mean = heads[0] if isinstance(heads, tuple) else heads
        y = mean + 0.3 * torch.randn(mean.shape)
    return model, InMemory(x, y)


def close(found, expected, rtol=1e-3):
    """Check equality to within a fraction of the largest value."""
    assert found.device.type == expected.device.type == "cpu"
    assert float((found - expected).abs().max()) < rtol * float(expected.abs().max())


def curvatures(model, examples, task, structure):
    """The curvatures of one copy on the CPU and of one on the GPU."""
    kept, likelihood, found = kept_of(model), likelihood_for(task), []
    for device in ("cpu", "cuda"):
        with held(copy.deepcopy(model).to(device)) as there:
            if structure == "kronecker":
                found.append(kronecker(there, kept, examples, likelihood, device=device))
            else:
                found.append(gauss_newton(there, kept, examples, likelihood, structure, device=device))
    return found


@pytest.mark.parametrize("structure", ["diagonal", "full", "last-layer", "kronecker"])
@pytest.mark.parametrize("name", MODELS)
def test_curvatures_are_those_of_the_cpu(name, structure):
    here, there = curvatures(*model_of(name), task_of(name), structure)
    for one, other in zip(there.blocks, here.blocks, strict=True):
        close(one.values, other.values)
        assert one.where == other.where and float(one.values.max()) > 0
        if one.vectors is not None:
            whole = [block.vectors * block.values @ block.vectors.T for block in (one, other)]
            close(*whole)


@pytest.mark.parametrize("kind", ["full", "kronecker", "low rank"])
def test_draws_of_a_joint_posterior_are_those_of_the_cpu(kind):
    """With the same noise."""
    model, examples = model_of("images")
    kept, likelihood, found = kept_of(model), likelihood_for("classification"), []
    for device in ("cpu", "cuda"):
        with held(copy.deepcopy(model).to(device)) as there:
            make = kronecker if kind == "kronecker" else gauss_newton
            if not found:  # one curvature for both: the signs of its eigenvectors are arbitrary
                curvature = make(there, kept, examples, likelihood, device=device)
            joint = LowRank(kept, *low_rank(curvature, 5, 10.0)) if kind == "low rank" else Joint(kept, curvature, 10.0)
            found.append(joint_draws(there, joint, examples, likelihood, 12, device=device))
    close(found[1].outputs, found[0].outputs)
    assert torch.equal(found[1].targets, found[0].targets) and torch.equal(found[1].owner, found[0].owner)


@pytest.mark.parametrize("name", MODELS)
def test_draws_for_calibration_come_to_the_cpu(name):
    model, examples = model_of(name)
    likelihood = likelihood_for(task_of(name))
    expected = draws_of(model, examples, likelihood, 0)
    there = copy.deepcopy(model).cuda()
    close(draws_of(there, examples, likelihood, 0, device="cuda").outputs, expected.outputs)
    drawn = draws_of(there, examples, likelihood, 400, device="cuda")
    assert drawn.outputs.device.type == "cpu" and drawn.samples == 400 and len(drawn) == len(expected)
    spread = draws_of(model, examples, likelihood, 400).outputs.std(0)
    assert float((drawn.outputs.std(0) / spread).median()) == pytest.approx(1, abs=0.05)


def test_variances_are_put_where_the_model_is():
    model, _ = model_of("images")
    kept, model = kept_of(model), model.cuda()
    new = with_variances(model, kept, torch.full((len(kept),), 0.25, dtype=torch.float64))
    for layer, old in ((new[0], model[0]), (new[5], model[5])):
        assert layer.log_sigma2.is_cuda and not torch.equal(layer.log_sigma2, old.log_sigma2)
        inside = layer.log_sigma2[old.mask]
        torch.testing.assert_close(inside, torch.full_like(inside, 0.25).log())


def test_a_refit_on_the_device_makes_the_bound_better():
    model, examples = model_of("images")
    likelihood = likelihood_for("classification")
    there = copy.deepcopy(model).cuda()
    before = {name: tensor.clone() for name, tensor in there.state_dict().items()}
    new = refit(there, examples, likelihood, epochs=15, device="cuda")
    assert all(tensor.is_cuda for tensor in new.state_dict().values())
    assert all(torch.equal(tensor, before[name]) for name, tensor in there.state_dict().items())

    def bound(model):
        elbo = svdc.ELBO(model, likelihood.loss, len(examples), 1.0)
        torch.manual_seed(0)
        with torch.no_grad(), svdc.sampling(model):
            return sum(float(elbo(model(examples.inputs.cuda()), examples.targets.cuda())) for _ in range(20)) / 20

    assert bound(new) < bound(there)
    here = refit(model, examples, likelihood, epochs=15)
    assert bound(new) == pytest.approx(bound(here.cuda()), rel=0.1)


@pytest.mark.parametrize("posterior", ["variational", "scaled", "refit", "laplace-diagonal", "auto"])
@pytest.mark.parametrize("name", ["images", "regression"])
def test_each_posterior_is_fitted_as_on_the_cpu(name, posterior):
    model, examples = model_of(name, 500)
    train, validation = examples.subset(torch.arange(300)), examples.subset(torch.arange(300, 500))
    found = {}
    for device in ("cpu", "cuda"):
        there = copy.deepcopy(model).to(device)
        found[device] = svdc.calibrate(there, train, validation, task_of(name), posterior=posterior, epochs=3, device=device)
    here, there = found["cpu"], found["cuda"]
    assert {tensor.device.type for tensor in there.model.state_dict().values()} == {"cuda"}
    for one, other in zip(there.tried, here.tried, strict=True):
        assert one.name == other.name and one.note == other.note
        assert one.nll is None or one.nll == pytest.approx(other.nll, rel=0.1, abs=0.03)
    assert there.mean.after == pytest.approx(here.mean.after, rel=0.02)
    assert there.samples.after == pytest.approx(here.samples.after, rel=0.1, abs=0.02)


def test_a_temperature_is_fitted_to_tensors_of_the_device():
    torch.manual_seed(0)
    logits = 4 * torch.randn(300, 3)
    targets = torch.multinomial((logits / 2).softmax(1), 1)[:, 0]
    assert fit_temperature(logits.cuda(), targets.cuda()) == pytest.approx(fit_temperature(logits, targets), rel=1e-3)


def test_risk_and_coverage_are_those_of_the_same_tensors_on_the_cpu():
    draw = torch.Generator().manual_seed(0)
    score, loss = (torch.rand(50, generator=draw) for _ in range(2))
    assert selective(score.cuda(), loss.cuda(), [0.5]) == selective(score, loss, [0.5])


def test_promises_are_those_of_the_same_probabilities_on_the_cpu():
    torch.manual_seed(0)
    p = (3 * torch.randn(400, 4)).softmax(1)
    y = torch.multinomial(p, 1)[:, 0]
    sets = svdc.conformal_sets(p, y, 0.9)
    there = svdc.conformal_sets(p.cuda(), y.cuda(), 0.9)
    assert there == sets and torch.equal(there.sets(p.cuda()).cpu(), sets.sets(p))
    values, spread = torch.randn(300), torch.rand(300) + 0.5
    seen = values + spread * torch.randn(300)
    intervals = svdc.conformal_intervals(values, spread, seen, 0.9)
    assert svdc.conformal_intervals(values.cuda(), spread.cuda(), seen.cuda(), 0.9) == intervals
    confidence, right = p.amax(1), p.argmax(1) == y
    assert svdc.answer_above(confidence.cuda(), right.cuda(), 0.8) == svdc.answer_above(confidence, right, 0.8)


@pytest.mark.parametrize("structure", ["kronecker", "diagonal", "full"])
def test_a_recurrence_has_a_curvature_in_eval(structure):
    """cuDNN has no gradients of a recurrence in eval()."""
    here, there = curvatures(*model_of("recurrent", 60), "classification", structure)
    for one, other in zip(there.blocks, here.blocks, strict=True):
        close(one.values, other.values)
