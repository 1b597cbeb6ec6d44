"""torch.compile takes the layers, their KL and the objective as one graph: no break (fullgraph), the same values."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from layer_cases import CASES
from torch import nn
from torch.utils.checkpoint import checkpoint

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


def steps(model, loss, x, y, count):
    """The last loss, and the accumulated gradients of `count` backward passes."""
    model.zero_grad()
    torch.manual_seed(2)
    for _ in range(count):
        value = loss(x, y) / count
        value.backward()
    return value.detach(), [parameter.grad.clone() for parameter in model.parameters()]


HOWS = {
    "plain": {},
    "bfloat16": {"amp": torch.bfloat16},
    "float16": {"amp": torch.float16},
    "channels last": {"channels_last": True},
    "checkpointed": {"checkpointed": True},
    "accumulated": {"count": 2},
    "all at once": {"amp": torch.bfloat16, "channels_last": True, "checkpointed": True, "count": 2},
}


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_training_step_is_one_graph(backend, how):
    asked = {"amp": None, "channels_last": False, "checkpointed": False, "count": 1} | HOWS[how]
    model, x, y = network()
    if asked["channels_last"]:
        model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    elbo = svdc.ELBO(model, nn.CrossEntropyLoss(), num_examples=100)

    def output_of(x):
        if asked["checkpointed"]:
            x = checkpoint(model[:3], x, use_reentrant=False)
            return model[3:](x)
        return model(x)

    def loss(x, y):
        with torch.autocast("cpu", asked["amp"] or torch.bfloat16, enabled=asked["amp"] is not None):
            output = output_of(x)
        return elbo(output.float(), y)

    compiled = torch.compile(loss, fullgraph=True, backend=backend)
    value, found = steps(model, compiled, x, y, asked["count"])
    assert value.isfinite() and all(grad.isfinite().all() and grad.any() for grad in found)
    # The same noise? Inductor has a generator of its own; a graph draws in the order of shapes, not of memory; and torch's
    # debugging backend "eager" draws again when it recomputes a checkpoint (the same with torch.nn.Dropout).
    alike = backend != "inductor" and not asked["channels_last"] and not (asked["checkpointed"] and backend == "eager")
    if alike and asked["amp"] is None:
        plain, expected = steps(model, loss, x, y, asked["count"])
        assert torch.allclose(value, plain, rtol=1e-4)
        for one, other in zip(found, expected, strict=True):
            assert torch.allclose(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_eval_is_one_graph(backend):
    model, x, _ = network()
    model.eval()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    with torch.no_grad():
        assert torch.allclose(compiled(x), model(x), atol=1e-6)
        model[4].weight.mul_(2)
        assert torch.allclose(compiled(x), model(x), atol=1e-6)


@pytest.mark.parametrize("posterior", ["independent", "rank-one"])
def test_a_compiled_model_draws_for_batches_of_several_sizes(posterior):
    """From the second size on, torch compiles for any; with and without a gradient, as a training and its validation do."""
    torch.manual_seed(0)
    model = svdc.convert(
        nn.Sequential(nn.Linear(6, 400), nn.Dropout(0.5), nn.Linear(400, 1)), log_sigma2=0.0, posterior=posterior
    )
    svdc.convert_dropout(model)
    compiled, one = torch.compile(model.train(), backend="aot_eager"), torch.ones(1, 6)
    for size in (800, 500, 300):
        with torch.no_grad():
            found, expected = (net(one.expand(size, 6)) for net in (compiled, model))
        assert found.std() == pytest.approx(float(expected.std()), rel=0.2) and float(found.std()) > 1
        compiled(one.expand(size - 1, 6)).sum().backward()


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_layers_that_draw_leave_the_graph(backend, in_place):
    """A graph cannot tell calls apart: under `sampling` the layers run outside of it, with the same noise as ever."""
    model, x, _ = network()
    model.eval()
    exact = model(x).detach()

    def drawn(model, **options):
        with torch.no_grad(), svdc.sampling(model, generator=torch.Generator().manual_seed(1), **options):
            return torch.stack([model(x), model(x)])

    ways = [{}, {"members": True}, {"local": True}, {}]
    plain = [drawn(model, **options) for options in ways]
    if in_place:
        model.compile(backend=backend)
    compiled = model if in_place else torch.compile(model, backend=backend)
    with torch.no_grad():
        for options, expected in zip(ways, plain, strict=True):
            assert torch.allclose(compiled(x), exact, atol=1e-6)
            assert torch.allclose(drawn(compiled, **options), expected, atol=1e-5), options
        with svdc.sampling(compiled), ThreadPoolExecutor(1) as pool:
            assert torch.allclose(pool.submit(compiled, x).result(), exact, atol=1e-6)
        assert torch.allclose(compiled(x), exact, atol=1e-6)
    assert torch.equal(compiled(x), compiled(x)) and not model._forward_hooks


def test_a_whole_graph_cannot_draw():
    model, x, _ = network()
    compiled = torch.compile(model.eval(), fullgraph=True, backend="eager")
    with torch.no_grad():
        exact = compiled(x)
        with svdc.sampling(model), pytest.raises(torch._dynamo.exc.Unsupported):
            compiled(x)
        assert torch.equal(compiled(x), exact)


@pytest.mark.parametrize(
    "wrap", [lambda m: torch.compile(m, backend="aot_eager"), nn.DataParallel], ids=["compiled", "parallel"]
)
def test_predictions_of_a_wrapped_model(wrap):
    model, x, _ = network()
    model.eval()
    make = lambda model: svdc.mc_predict(model, x, 6, generator=torch.Generator().manual_seed(1)).mean  # noqa: E731
    assert torch.equal(make(wrap(model)), make(model))


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
