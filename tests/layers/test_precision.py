"""Lower precision, memory formats, checkpointing, accumulation: what training scripts do to the layers."""

import pytest
import torch
from layer_cases import CASES, layer_draws
from torch import nn
from torch.utils.checkpoint import checkpoint

import svdcompress as svdc
from svdcompress.errors import ModelError, UsageError
from svdcompress.layers import VARIATIONAL_CLASSES, VariationalConv2d, VariationalLinear, _precision
from svdcompress.layers._maps import Convolution, rows

SOME = ["linear", "conv2d-groups", "conv1d-circular-no-bias", "transposed2d", "conv3d"]


@pytest.fixture(params=SOME)
def case(request):
    return CASES[request.param]


def gradients(layer, x, scale=1.0):
    torch.manual_seed(3)
    y = layer(x)
    (y.float().square().sum() * scale).backward()
    found = [y.detach().float(), *(parameter.grad.float() / scale for parameter in layer.parameters())]
    layer.zero_grad()
    return found


def close(ours, theirs, tolerance):
    """Check equality to within a tolerance of the largest value."""
    return all((one - other).abs().max() <= tolerance * other.abs().max() for one, other in zip(ours, theirs, strict=True))


# The variance path


def test_bfloat16_variances_are_those_of_float32_within_its_rounding(case):
    exact = gradients(case.layer(variance_dtype="float32"), case.x())
    low = gradients(case.layer(variance_dtype="bfloat16"), case.x())
    assert close(low, exact, 0.02)
    assert not torch.equal(low[0], exact[0])
    layer = case.layer(variance_dtype="bfloat16")
    with torch.no_grad():
        draws, wide = layer_draws(case, layer, case.x(), 3000), layer_draws(case, case.layer(), case.x(), 3000)
    some = wide.std(0) > 1e-6
    assert (draws.var(0) / wide.var(0)).log()[some].abs().max() < 5 * (4 / 3000) ** 0.5 + 0.02
    assert draws.dtype == torch.float32


def test_the_mean_path_keeps_its_precision(case):
    layer = case.layer(variance_dtype="bfloat16")
    layer.log_sigma2.data.fill_(-60.0)
    assert torch.allclose(layer(case.x()), case.dense(layer)(case.x()), atol=1e-6)


def test_auto_takes_bfloat16_where_it_is_fast_and_large(monkeypatch):
    layer, x = VariationalLinear(512, 512), torch.randn(128, 512)
    choose = _precision.variance_dtype
    monkeypatch.setattr(_precision, "_FAST_CPU", False)
    assert choose("auto", None, x, layer.weight) == torch.float32
    monkeypatch.setattr(_precision, "_FAST_CPU", True)
    assert choose("auto", None, x, layer.weight) == torch.bfloat16
    assert choose("auto", None, x[:4], layer.weight) == torch.float32
    assert choose("auto", None, x.bfloat16()[:4], layer.weight) == torch.bfloat16
    assert choose("float32", None, x, layer.weight) == torch.float32
    assert choose("bfloat16", None, x[:1], layer.weight) == torch.bfloat16
    assert choose("bfloat16", None, x.double(), layer.weight.double()) == torch.float64
    assert choose("auto", None, x.to("meta"), layer.weight.to("meta")) == torch.float32


@pytest.mark.parametrize("name", SOME)
def test_size_of_the_matrix_product(name):
    """2 x rows x inputs x outputs is the number of operations that torch counts for the map."""
    from torch.utils.flop_counter import FlopCounterMode

    case = CASES[name]
    layer = case.layer()
    batch, map = layer._as_map(case.x())
    with FlopCounterMode(display=False) as counter:
        case.dense(layer)(case.x())
    groups = map.groups if isinstance(map, Convolution) else 1
    number = 2 * groups * torch.tensor(rows(map, batch, layer.weight)).prod()
    assert 0.4 < counter.get_total_flops() / number < 2.5  # borders are not counted exactly


def test_unknown_variance_dtype():
    with pytest.raises(ModelError, match="variance_dtype: unknown 'int8'; use one of auto, float32, bfloat16"):
        VariationalLinear(2, 2, variance_dtype="int8")
    with pytest.raises(ModelError, match="variance_dtype"):
        svdc.convert(nn.Sequential(nn.Linear(2, 2)), variance_dtype="half")
    model = svdc.convert(nn.Sequential(nn.Linear(2, 2)), variance_dtype="float32")
    assert model[0].variance_dtype == "float32"


# Automatic mixed precision


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(case, dtype):
    with torch.autocast("cpu", dtype):
        assert case.layer()(case.x()).dtype == case.dense(case.layer())(case.x()).dtype == dtype
        inside = gradients(case.layer(), case.x(), scale=2.0**5)  # the backward pass under autocast too, as in some scripts
    layer = case.layer()
    with torch.autocast("cpu", dtype):
        torch.manual_seed(3)
        y = layer(case.x())
    (y.float().square().sum() * 2.0**5).backward()
    outside = [y.detach().float(), *(parameter.grad.float() / 2.0**5 for parameter in layer.parameters())]
    assert all(parameter.grad.dtype == torch.float32 for parameter in layer.parameters())
    for found in (inside, outside):
        # The generator gives other numbers in another dtype: only noise-free values can be compared one by one.
        assert all(value.isfinite().all() for value in found)
    quiet = case.layer()
    quiet.log_sigma2.data.fill_(-60.0)
    reference = gradients(quiet, case.x())
    with torch.autocast("cpu", dtype):
        low = gradients(quiet, case.x())
    assert close(low[:2], reference[:2], 0.03)


def test_float16_autocast_keeps_small_variances(case):
    """float16 cannot represent exp(-20) or squares of small numbers: the variance must not be computed in it."""
    layer = case.layer()
    layer.weight.data.zero_()
    if layer.bias is not None:
        layer.bias.data.zero_()
    layer.log_sigma2.data.fill_(-20.0)
    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        low = layer_draws(case, layer, case.x(), 400).float()
    with torch.no_grad():
        exact = layer_draws(case, layer, case.x(), 400)
    some = exact.std(0) > 1e-6
    assert (low.std(0) / exact.std(0))[some].log().abs().max() < 0.3


def test_autocast_in_eval_and_sampling(case):
    layer = case.layer().eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert layer(case.x()).dtype == torch.bfloat16
        with svdc.sampling(layer):
            assert layer(case.x()).dtype == torch.bfloat16
        with svdc.sampling(layer, members=True):
            assert layer(case.x()).dtype == torch.bfloat16


# Memory formats


def test_noise_has_the_order_of_its_tensor_in_memory():
    """torch is several times slower at filling memory that is not contiguous."""
    from svdcompress.layers._reparam import _half_noise, normal_like

    x = torch.empty(40, 8, 9, 7).to(memory_format=torch.channels_last)
    for noise, std in ((normal_like(x), 1.0), (_half_noise(x), 0.5), (normal_like(x, torch.Generator().manual_seed(0)), 1.0)):
        assert noise.shape == x.shape and noise.stride() == x.stride()
        assert abs(noise.std() / std - 1) < 0.05 and abs(noise.mean()) < 0.05


def test_gradients_of_the_kl_can_be_added_to_in_place():
    """Autograd copies a gradient that is a view before it adds another gradient to it."""
    for layer in (VariationalLinear(3, 4), VariationalConv2d(4, 4, 3, groups=2, share=["weight", "input"])):
        for grad in torch.autograd.grad(layer.kl(), [layer.weight, layer.log_sigma2]):
            assert grad._base is None and grad.untyped_storage().nbytes() == grad.numel() * 4


def test_channels_last():
    torch.manual_seed(0)
    layer = VariationalConv2d(4, 6, 3, padding=1)
    layer.log_sigma2.data.normal_(-3, 1)
    x = torch.randn(2, 4, 5, 5)
    layer.eval()
    with svdc.sampling(layer, members=True, generator=torch.Generator().manual_seed(0)):
        expected = layer(x)
    layer.to(memory_format=torch.channels_last)
    assert layer.log_sigma2.is_contiguous(memory_format=torch.channels_last)
    x = x.to(memory_format=torch.channels_last)
    y = layer.train()(x)
    assert y.is_contiguous(memory_format=torch.channels_last)
    y.sum().backward()
    assert layer.log_sigma2.grad.is_contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        draws = layer(x.expand(2000, -1, -1, -1, -1).flatten(0, 1)).unflatten(0, (2000, 2))
    spread = layer._transform(x.square(), layer.log_sigma2.exp(), None)
    assert (draws.var(0) / spread).log().abs().max() < 5 * (2 / 2000) ** 0.5
    layer.log_sigma2.data.fill_(-60.0)
    layer.eval()
    layer.threshold = dict.fromkeys(layer.threshold, 100.0)
    assert expected.shape == layer(x).shape and torch.allclose(layer(x), layer.train()(x), atol=1e-6)


# Checkpointing, accumulation, optimizers


def network():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 3))
    return svdc.convert(model, log_sigma2=-3.0), torch.randn(6, 3, 4, 4)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_draws_the_same_noise_again(reentrant):
    model, x = network()
    x.requires_grad_()

    def run(forward):
        model.zero_grad()
        torch.manual_seed(4)
        y = forward(x)
        (grad,) = torch.autograd.grad(y.square().sum(), [x], retain_graph=not reentrant) if not reentrant else (None,)
        if reentrant:
            y.square().sum().backward()
        return y.detach(), grad, [parameter.grad for parameter in model.parameters()]

    plain, again = run(model), run(lambda x: checkpoint(model, x, use_reentrant=reentrant))
    assert torch.equal(plain[0], again[0])
    if reentrant:
        assert all(torch.equal(one, other) for one, other in zip(plain[2], again[2], strict=True))
    else:
        assert torch.equal(plain[1], again[1])


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", ["local", "members", "passes"])
def test_checkpointing_with_a_generator_is_refused(reentrant, kind):
    model, x = network()
    model.eval()
    x.requires_grad_()
    own = {"local": {"local": True}, "members": {"members": True}, "passes": {}}[kind]
    with svdc.sampling(model, generator=torch.Generator().manual_seed(0), **own) as sampler:
        model(x).sum().backward()
        sampler.resample()
        y = checkpoint(model, x, use_reentrant=reentrant)
        if kind == "members":
            sampler.resample()
        with pytest.raises(UsageError, match="with a generator, activation checkpointing would draw other noise"):
            y.sum().backward()


def test_accumulated_gradients_are_those_of_the_sum():
    model, x = network()
    losses = []
    torch.manual_seed(5)
    for part in x.chunk(3):
        loss = model(part).square().sum() + svdc.kl_divergence(model) / 3
        loss.backward()
        losses.append(loss.detach())
    accumulated = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    torch.manual_seed(5)
    total = sum(model(part).square().sum() for part in x.chunk(3)) + svdc.kl_divergence(model)
    total.backward()
    assert torch.allclose(total, sum(losses))
    for one, other in zip(accumulated, model.parameters(), strict=True):
        assert torch.allclose(one, other.grad, rtol=1e-4, atol=1e-6)


def test_two_backward_passes_through_one_graph():
    model, x = network()
    loss = model(x).square().sum() + svdc.kl_divergence(model)
    loss.backward(retain_graph=True)
    once = [parameter.grad.clone() for parameter in model.parameters()]
    loss.backward()
    for one, parameter in zip(once, model.parameters(), strict=True):
        assert torch.allclose(2 * one, parameter.grad)


def test_second_derivatives_are_refused_not_wrong():
    model, x = network()
    (grad,) = torch.autograd.grad(model(x).square().sum(), [model[0].weight], create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives are not supported through"):
        grad.sum().backward()
    converted = svdc.convert(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), include=["2"], log_sigma2=-30.0)
    x = torch.rand(8, 4, requires_grad=True)  # a penalty on the gradient with respect to the inputs, behind a constant
    (slope,) = torch.autograd.grad(converted(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"work through the layers \(docs/guides"):
        torch.autograd.grad(slope.square().sum(), converted[2].weight)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "how",
    [{}, {"share": "input"}, {"share": {"weight": 0.5, "output": 0.5}}, {"posterior": "rank-one"}, {"prior": "log-uniform"}],
    ids=str,
)
def test_second_derivatives_of_the_kl_are_refused_beside_right_ones_of_the_layers(how, masked):
    """A Hessian from the loss's graph would lack the KL's part, which torch does not report behind a constant gradient."""
    torch.manual_seed(0)
    model = svdc.convert(nn.Sequential(nn.Linear(30, 2), nn.Tanh(), nn.Linear(2, 2)), **how).eval()
    if masked:
        svdc.hold(model, {"0": torch.rand(2, 30) < 0.1, "2": torch.ones(2, 2, dtype=torch.bool)})
    x, y = torch.rand(4, 30), torch.rand(4, 2)
    nll, weight = nn.MSELoss(), model[0].weight
    (grad,) = torch.autograd.grad(nll(model(x), y), weight, create_graph=True)
    assert torch.autograd.grad(grad.sum(), weight)[0].abs().max() > 0
    for own in (weight, next(iter(model[0].variance_parameters().values()))):
        (grad,) = torch.autograd.grad(svdc.ELBO(model, nll, 10)(model(x), y), own, create_graph=True)
        with pytest.raises(RuntimeError, match="second derivatives are not supported through the KL"):
            torch.autograd.grad(grad.sum(), own)


def test_what_is_kept_for_the_backward():
    """Beyond what the dense layer keeps: one number for each output, nothing of the weight's size."""
    for kind in (nn.Linear, nn.Conv2d):
        dense = nn.Linear(50, 40) if kind is nn.Linear else nn.Conv2d(5, 8, 3)
        x = torch.randn(7, 50) if kind is nn.Linear else torch.randn(2, 5, 6, 6)
        outputs = dense(x).numel()
        layer = VARIATIONAL_CLASSES[kind].from_dense(dense)
        own = {tensor.data_ptr() for tensor in (x, *layer.parameters())}
        kept = []

        def keep(tensor, kept=kept):
            kept.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            layer(x)
        assert sum(tensor.numel() for tensor in kept if tensor.data_ptr() not in own) == outputs


@pytest.mark.parametrize("fused", [False, True])
def test_the_sampling_cache_sees_an_optimiser(fused):
    """Weights derived from the parameters are computed again after each way of changing them."""
    model, x = network()
    model.eval()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=fused, foreach=False if fused else None)

    def draw():
        with torch.no_grad():
            return model(x)

    with svdc.sampling(model) as sampler:
        sampler.generator = torch.Generator()

        def seeded():
            sampler.generator.manual_seed(0)
            return draw()

        before = seeded()
        assert torch.equal(seeded(), before)
        model(x).square().sum().backward()
        optimizer.step()
        changed = seeded()
        assert not torch.equal(changed, before)
        with torch.no_grad():
            model[3].weight.mul_(2)
        assert not torch.equal(seeded(), changed)
        changed = seeded()
        model[3].mask = torch.zeros_like(model[3].weight, dtype=torch.bool)
        assert not torch.equal(seeded(), changed)
        changed = seeded()
        model[5].threshold = dict.fromkeys(model[5].threshold, -100.0)
        assert not torch.equal(seeded(), changed)
        changed = seeded()
        model.load_state_dict({name: torch.zeros_like(value) for name, value in model.state_dict().items()})
        assert not torch.equal(seeded(), changed)
        with torch.inference_mode():
            model(x)
        assert model(x).requires_grad
