"""The contract of every variational layer, against an oracle that draws weights and calls torch.nn."""

import copy
import pickle

import pytest
import torch
from layer_cases import CASES, layer_draws, weight_draws
from torch import nn

import svdcompress as svdc
from svdcompress.layers import Sampler, VariationalLinear, canonical, drawing

DRAWS = 3000


@pytest.fixture(params=CASES, scope="module")
def case(request):
    return CASES[request.param]


def gradients(case, layer, draws_of, rounds=12, draws=150):
    """Gradients (rounds, numbers) of a loss with a quadratic part, averaged over draws, for x and every parameter."""
    found = []
    for _ in range(rounds):
        x = case.x().requires_grad_()
        y = draws_of(case, layer, x, draws)
        slope = torch.linspace(-1, 1, y[0].numel()).view(y[0].shape)
        loss = (slope * y + y.square() / 2).sum() / draws
        found.append(torch.cat([grad.flatten() for grad in torch.autograd.grad(loss, [x, *layer.parameters()])]))
    return torch.stack(found)


def largest_z(one, other):
    """The largest difference between the means of two sets of independent rows, in standard deviations."""
    spread = one.var(0) / len(one) + other.var(0) / len(other)
    return ((one.mean(0) - other.mean(0)).abs() / (spread + 1e-12).sqrt()).max()


class TestContract:
    def test_mean_and_variance_of_outputs(self, case):
        layer, x = case.layer(), case.x()
        with torch.no_grad():
            ours, oracle = layer_draws(case, layer, x, DRAWS), weight_draws(case, layer, x, DRAWS)
        assert ours.shape == oracle.shape
        exact = case.dense(layer)(x)
        assert ((ours.mean(0) - exact).abs() / (oracle.std(0) / DRAWS**0.5 + 1e-6)).max() < 5
        some = oracle.std(0) > 1e-6  # with output_padding, some outputs depend on no weight
        assert (ours.std(0)[~some] < 1e-6).all()
        # The standard error of a normal sample's log variance is sqrt(2 / draws); here there are two of them.
        assert (ours.var(0) / oracle.var(0)).log()[some].abs().max() < 5 * (4 / DRAWS) ** 0.5

    def test_training_and_inference_draw_alike(self, case):
        layer, x = case.layer(), case.x()
        torch.manual_seed(3)
        with_gradient = layer(x)
        torch.manual_seed(3)
        with torch.no_grad():
            assert torch.allclose(layer(x), with_gradient, atol=1e-6)

    def test_gradients(self, case):
        layer = case.layer()
        ours, oracle = gradients(case, layer, layer_draws), gradients(case, layer, weight_draws)
        assert ours.abs().mean(0).min() > 0
        assert largest_z(ours, oracle) < 7  # several hundred t statistics with 22 degrees of freedom

    def test_gradcheck(self, case):
        layer, x = case.layer().double(), case.x().double().requires_grad_()
        names = [name for name, _ in layer.named_parameters()]

        def output(x, *parameters):
            torch.manual_seed(5)
            return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x,))

        assert torch.autograd.gradcheck(output, (x, *layer.parameters()), fast_mode=True)

    def test_only_the_gradients_that_are_asked_for(self, case):
        layer, x = case.layer(), case.x()
        for parameter in layer.parameters():
            torch.manual_seed(7)
            (alone,) = torch.autograd.grad(layer(x).square().sum(), [parameter])
            torch.manual_seed(7)
            together = torch.autograd.grad(layer(x).square().sum(), list(layer.parameters()))
            index = [id(p) for p in layer.parameters()].index(id(parameter))
            assert torch.allclose(alone, together[index], atol=1e-6)
        layer.requires_grad_(False)
        assert not layer(x).requires_grad
        assert layer(x.requires_grad_()).requires_grad

    @pytest.mark.parametrize("log_sigma2", [-float("inf"), -60.0])
    def test_without_variance_it_is_torch_nn(self, case, log_sigma2):
        layer, x = case.layer(), case.x().requires_grad_()
        layer.log_sigma2.data.fill_(log_sigma2)
        dense = case.dense(layer)
        y, expected = layer(x), dense(x)
        assert (y - expected).abs().max() < 1e-6
        ours = torch.autograd.grad(y.square().sum(), [x, layer.weight, layer.log_sigma2])
        theirs = torch.autograd.grad(expected.square().sum(), [x, dense.weight])
        assert all(grad.isfinite().all() for grad in ours)
        for one, other in zip(ours[:2], theirs, strict=True):
            assert torch.allclose(one, other, atol=1e-4, rtol=1e-4)

    def test_eval_is_the_mean_of_what_is_relevant(self, case):
        layer, x = case.layer(spread=6.0).eval(), case.x()
        keep = layer.log_sigma2 - layer.weight.square().add(1e-8).log() < 3
        assert 0 < keep.sum() < keep.numel()
        dense = case.dense(layer)
        dense.weight.data.mul_(keep)
        assert torch.equal(layer(x), dense(x))
        layer.weight.data.mul_(2)  # the change takes effect at once, whatever was computed before
        layer.threshold = dict.fromkeys(layer.threshold, 100.0)
        assert torch.equal(layer(x), case.dense(layer)(x))

    def test_held_mask(self, case):
        layer, x = case.layer(), case.x()
        layer.mask = torch.rand(layer.weight.shape) > 0.4
        with torch.no_grad():
            ours = layer_draws(case, layer, x, DRAWS)
            oracle = weight_draws(case, layer, x, DRAWS, layer.mask)
        some = oracle.std(0) > 1e-6
        assert (ours.std(0)[~some] < 1e-6).all()
        assert (ours.mean(0) - oracle.mean(0)).abs()[some].div(oracle.std(0)[some]).max() < 7 * (1 / DRAWS) ** 0.5
        assert (ours.var(0) / oracle.var(0)).log()[some].abs().max() < 5 * (4 / DRAWS) ** 0.5
        (layer(x).square().sum() + layer.kl()).backward()
        for grad in (layer.weight.grad, layer.log_sigma2.grad):
            assert (grad[~layer.mask] == 0).all()
            assert (grad[layer.mask] != 0).any()
        layer.eval()
        dense = case.dense(layer)
        dense.weight.data.mul_(layer.mask)
        assert torch.equal(layer(x), dense(x))

    def test_sampling_in_eval(self, case):
        layer, x = case.layer(spread=6.0).eval(), case.x()
        keep = layer.relevant()
        with svdc.sampling(layer, local=True), torch.no_grad():
            ours, oracle = layer_draws(case, layer, x, DRAWS), weight_draws(case, layer, x, DRAWS, keep)
        some = oracle.std(0) > 1e-6
        assert (ours.var(0) / oracle.var(0)).log()[some].abs().max() < 5 * (4 / DRAWS) ** 0.5
        assert torch.equal(layer(x), layer(x))

    def test_sampling_is_reproducible(self, case):
        layer, x = case.layer().eval(), case.x()

        def drawn(seed, **kwargs):
            with svdc.sampling(layer, generator=torch.Generator().manual_seed(seed), **kwargs):
                return layer(x), layer(x)

        for members in (False, True):
            one, again = drawn(1, members=members)
            assert torch.equal(one, drawn(1, members=members)[0])
            assert not torch.equal(one, drawn(2, members=members)[0])
            assert torch.equal(one, again) is members

    def test_members_draw_weights_once_with_the_same_moments(self, case):
        layer, x = case.layer().eval(), case.x()
        with svdc.sampling(layer, members=True) as sampler, torch.no_grad():
            if case.batched:
                twice = layer(torch.cat([x, x]))
                assert torch.allclose(twice[: len(x)], twice[len(x) :], atol=1e-6)
            draws = []
            for _ in range(400):
                sampler.resample()
                draws.append(layer(x))
            oracle = weight_draws(case, layer, x, DRAWS, layer.relevant())
        ours = torch.stack(draws)
        some = oracle.std(0) > 1e-6
        assert (ours.mean(0) - oracle.mean(0)).abs()[some].div(oracle.std(0)[some]).max() < 5 * (1 / 400) ** 0.5
        assert (ours.var(0) / oracle.var(0)).log()[some].abs().max() < 5 * (2 / 400) ** 0.5

    def test_variance_of_the_bias(self, case):
        layer, x = case.layer(), case.x()
        if layer.bias is None:
            pytest.skip("it has no bias")
        layer.log_sigma2.data.fill_(-60.0)
        layer.bias_sigma2 = torch.linspace(0.5, 2, len(layer.bias))
        with torch.no_grad():
            draws = layer_draws(case, layer, x, DRAWS)
        units = -1 - case.dims
        by_unit = draws.var(0).movedim(units, -1).log() - layer.bias_sigma2.log()
        assert by_unit.abs().max() < 5 * (2 / DRAWS) ** 0.5
        layer.eval()
        with svdc.sampling(layer, members=True) as sampler, torch.no_grad():
            members = []
            for _ in range(200):
                sampler.resample()
                members.append(layer(x))
        by_unit = torch.stack(members).var(0).movedim(units, -1).log() - layer.bias_sigma2.log()
        assert by_unit.abs().max() < 5 * (2 / 200) ** 0.5

    def test_state_dict(self, case):
        layer, x = case.layer(), case.x()
        dense = case.dense(layer)
        other = case.kind(**case.args)
        start = other.log_sigma2.clone()
        other.load_state_dict(dense.state_dict())
        assert torch.equal(other.weight, layer.weight)
        assert torch.equal(other.log_sigma2, start)
        layer.mask = torch.rand(layer.weight.shape) > 0.5
        if layer.bias is not None:
            layer.bias_sigma2 = torch.rand_like(layer.bias)
        other.load_state_dict(layer.state_dict())
        assert set(other.state_dict()) == set(layer.state_dict())
        for name, value in layer.state_dict().items():
            assert torch.equal(other.state_dict()[name], value), name
        assert torch.equal(other.eval()(x), layer.eval()(x))
        with pytest.raises(RuntimeError, match="size mismatch"):
            other.load_state_dict({**layer.state_dict(), "weight": torch.zeros(1)})

    @pytest.mark.parametrize("assign", [False, True])
    def test_a_dense_state_for_a_layer_made_without_values(self, case, assign):
        """Its variances begin at the level that conversion was given; they are no trained ones."""
        layer, x = case.layer(), case.x()
        dense = case.dense(layer)
        with torch.device("meta"):
            other = case.kind(**case.args, log_sigma2=-7.0)
        if not assign:
            other.to_empty(device="cpu")
        other.load_state_dict(dense.state_dict(), assign=assign)
        assert torch.equal(other.log_sigma2, torch.full_like(layer.weight, -7.0)) and not other.variance_moved
        other.train()(x)
        other.load_state_dict(layer.state_dict())
        other.double().load_state_dict(dense.state_dict())
        assert torch.equal(other.log_sigma2, layer.log_sigma2.double())  # its own now

    def test_what_is_held_goes_with_a_whole_state_alone(self, case):
        layer = case.layer()
        bare = {name: value.clone() for name, value in layer.state_dict().items()}
        layer.mask = mask = torch.rand(layer.weight.shape) > 0.5
        if layer.bias is not None:
            layer.bias_sigma2 = torch.rand_like(layer.bias)
        held = list(layer.state_dict())
        parameters = {name: parameter.detach().clone() for name, parameter in layer.named_parameters()}
        model = nn.Sequential(layer, nn.BatchNorm1d(2))
        for state in ({}, {f"0.{name}": value for name, value in parameters.items()}, {"0.weight": layer.weight.detach()}):
            missing = model.load_state_dict(state, strict=False).missing_keys
            assert torch.equal(layer.mask, mask) and list(layer.state_dict()) == held and "0.mask" in missing
        layer.load_state_dict(bare)
        assert layer.mask is None and layer.bias_sigma2 is None

    @pytest.mark.parametrize("copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
    def test_copies_are_independent(self, case, copied):
        layer, x = case.layer().eval(), case.x()
        with svdc.sampling(layer), torch.no_grad():
            layer(x)
        other = copied(layer)
        assert torch.equal(other(x), layer(x))
        other.weight.data.zero_()
        other.log_sigma2.data.fill_(-60.0)
        assert not torch.equal(other(x), layer(x))
        with svdc.sampling(other), torch.no_grad():
            assert other(x).abs().max() <= (0 if layer.bias is None else layer.bias.abs().max()) + 1e-6

    def test_dtype_and_device_moves(self, case):
        layer, x = case.layer(), case.x()
        expected = layer.eval()(x)
        assert torch.allclose(layer.double()(x.double()), expected.double(), atol=1e-6)
        assert layer.log_sigma2.dtype == torch.float64
        half = layer.to(torch.bfloat16).train()
        y = half(x.bfloat16())
        y.sum().backward()
        assert y.dtype == half.log_sigma2.grad.dtype == torch.bfloat16
        assert half.log_sigma2.grad.isfinite().all() and half.kl().isfinite()
        meta = layer.float().to("meta")
        y = meta(x.to("meta"))
        assert y.device.type == "meta" and y.shape == expected.shape
        assert meta.kl().device.type == meta.relevant().device.type == "meta"
        assert meta.eval()(x.to("meta")).shape == expected.shape

    def test_dense_and_back(self, case):
        layer, x = case.layer(), case.x()
        dense = case.dense(layer)
        weight, expected = dense.weight, dense(x)
        made = case.kind.from_dense(dense, prior="log-uniform", share=["weight", "input"], log_sigma2=-30.0)
        assert made is dense and made.weight is weight and type(made) is case.kind
        assert torch.equal(made.eval()(x), expected)
        made.variance_dtype = "float32"
        back = made.to_dense()
        assert type(back) is case.kind.dense_class
        assert set(back.state_dict()) == set(case.dense(layer).state_dict())
        assert not {"log_sigma2", "mask", "prior", "share", "threshold", "variance_dtype", "_cache"} & set(vars(back))
        assert torch.equal(back(x), expected)


@pytest.mark.parametrize("name", ["linear", "conv2d-groups", "transposed2d"])
def test_the_argument_has_the_name_that_torch_gives_it(name):
    case = CASES[name]
    layer = case.layer().eval()
    assert torch.equal(layer(input=case.x()), layer(case.x()))


def test_wrong_dense_class():
    with pytest.raises(TypeError, match="takes a Linear, not a Conv2d"):
        VariationalLinear.from_dense(nn.Conv2d(1, 1, 1))


def test_nested_sampling_contexts_restore_the_outer_one():
    model = svdc.convert(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))).eval()
    x, before = torch.randn(5, 3), {name: value.clone() for name, value in model.state_dict().items()}
    with svdc.sampling(model, members=True) as outer:
        member = model(x)
        with svdc.sampling(model):
            assert not torch.equal(model(x), model(x))
        assert model[0].sampler is outer
        assert torch.equal(model(x), member)
        with pytest.raises(ZeroDivisionError), svdc.sampling(model):
            raise ZeroDivisionError
        assert model[0].sampler is outer
    assert model[0].sampler is None and torch.equal(model(x), model(x))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_sampler_that_is_set_lasts_as_long_as_the_context_or_is_the_layers_own():
    layer, x, given = VariationalLinear(3, 2, log_sigma2=-1.0).eval(), torch.randn(5, 3), Sampler()
    layer.mask = torch.ones_like(layer.weight, dtype=torch.bool)
    with svdc.sampling(layer):
        layer.sampler = given
        assert layer.sampler is given
        layer.sampler = None
        assert torch.equal(layer(x), layer(x))
    assert layer.sampler is None and "_own" not in vars(layer)
    layer.sampler = given
    assert layer.sampler is given and not torch.equal(layer(x), layer(x))
    with drawing([layer], None):
        assert torch.equal(layer(x), layer(x))
    with svdc.sampling(layer) as inner:
        assert layer.sampler is inner
    assert layer.sampler is given and not hasattr(layer.to_dense(), "_own")


def test_canonical_view_of_each_layout():
    # (groups, outputs, inputs, kernel): the weight from input i to output o of its group, whatever the layout.
    weight = torch.arange(6 * 2 * 3).view(6, 2, 3)
    assert torch.equal(canonical(weight, 2, False)[1, 2, 0], weight[5, 0])
    transposed = torch.arange(4 * 3 * 2).view(4, 3, 2)
    assert torch.equal(canonical(transposed, 2, True)[1, 2, 0], transposed[2, 2])
    assert canonical(torch.zeros(3, 5), 1, False).shape == (1, 3, 5, 1)
