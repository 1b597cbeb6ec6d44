"""torch.compile takes the layers, their KL and the objective as one graph: no break (fullgraph), the same values."""

import pytest
import torch
from layer_cases import CASES
from torch import nn

import svdcompress as svdc

BACKENDS = ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def network():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.ConvTranspose2d(4, 4, 2, stride=2), nn.Flatten(), nn.Linear(256, 3)
    )
    svdc.convert(model, log_sigma2=-4.0, share=["weight", "input"])
    return model, torch.randn(5, 3, 4, 4), torch.tensor([0, 1, 2, 0, 1])


@pytest.mark.parametrize("amp", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_training_step_is_one_graph(backend, amp):
    model, x, y = network()
    elbo = svdc.ELBO(model, nn.CrossEntropyLoss(), num_examples=100)

    def loss(x, y):
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            output = model(x)
        return elbo(output.float(), y)

    compiled = torch.compile(loss, fullgraph=True, backend=backend)
    for parameter in model.parameters():
        parameter.grad = None
    torch.manual_seed(2)
    value = compiled(x, y)
    value.backward()
    found = [parameter.grad.clone() for parameter in model.parameters()]
    assert value.isfinite() and all(grad.isfinite().all() and grad.any() for grad in found)
    if backend != "inductor" and not amp:  # inductor has a generator of its own
        model.zero_grad()
        torch.manual_seed(2)
        plain = loss(x, y)
        plain.backward()
        assert torch.allclose(value, plain, rtol=1e-4)
        for one, parameter in zip(found, model.parameters(), strict=True):
            assert torch.allclose(one, parameter.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_eval_and_sampling_are_one_graph(backend):
    model, x, _ = network()
    model.eval()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    with torch.no_grad():
        assert torch.allclose(compiled(x), model(x), atol=1e-6)
        with svdc.sampling(model):
            assert not torch.equal(compiled(x), compiled(x))
        assert torch.equal(compiled(x), compiled(x))
        model[4].weight.mul_(2)
        assert torch.allclose(compiled(x), model(x), atol=1e-6)


@pytest.mark.parametrize("name", ["linear-one", "conv1d", "conv2d-circular", "conv2d-same-even", "conv2d-one", "transposed3d"])
def test_each_kind_of_layer(name):
    case = CASES[name]
    layer, x = case.layer(), case.x().requires_grad_()
    layer.mask = torch.rand(layer.weight.shape) > 0.3
    compiled = torch.compile(lambda x: (layer(x), layer.kl()), fullgraph=True, backend="aot_eager")
    y, kl = compiled(x)
    (y.sum() + kl).backward()
    assert y.shape == case.dense(layer)(x).shape
    assert torch.allclose(kl, layer.kl())
    assert (layer.weight.grad[~layer.mask] == 0).all()


@pytest.mark.slow
def test_inductor_draws_have_the_right_moments():
    layer = CASES["linear"].layer()
    x = CASES["linear"].x()
    draws = torch.compile(layer, fullgraph=True)(x.expand(4000, -1, -1).flatten(0, 1)).unflatten(0, (4000, len(x)))
    spread = x.square() @ layer.log_sigma2.exp().t()
    assert (draws.var(0) / spread).log().abs().max() < 5 * (2 / 4000) ** 0.5
    assert ((draws.mean(0) - CASES["linear"].dense(layer)(x)).abs() / (spread / 4000).sqrt()).max() < 5
