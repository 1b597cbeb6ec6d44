"""`layer.moments` of each posterior against explicit samples of its weights, and its draws against those moments."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from layer_cases import CASES
from torch import Tensor
from torch.func import functional_call, vmap

import svdcompress as svdc
from svdcompress.layers import set_posterior
from svdcompress.layers.priors import _rank_one

DRAWS = 3000


def layer_of(case, posterior: str):
    """A layer in train mode, with a different variance for each weight."""
    layer = case.layer(spread=1.5)
    set_posterior([layer], posterior)
    return layer


def variances(layer) -> Tensor:
    """The oracle: the variance of each weight; for two terms, by loops over the canonical view."""
    if layer.posterior == "independent":
        return layer.log_sigma2.detach().exp()
    row, column = layer.log_sigma2_row.detach(), layer.log_sigma2_column.detach()
    found = torch.empty(layer.canonical(layer.weight).shape)
    for group, outputs in enumerate(found):
        for output, inputs in enumerate(outputs):
            for i, positions in enumerate(inputs):
                for k in range(len(positions)):
                    positions[k] = (row[group, output, 0, 0] + column[group, 0, i, k]).exp()
    view = found.transpose(1, 2) if layer.transposed else found
    return view.reshape(layer.weight.shape)


def samples(case, layer, x: Tensor, spread: Tensor | None = None, keep: Tensor | None = None) -> Tensor:
    """Outputs (DRAWS, *output) of the dense layer, with weights and inputs drawn for each."""
    torch.manual_seed(5)
    weights = layer.weight.detach() + variances(layer).sqrt() * torch.randn(DRAWS, *layer.weight.shape)
    weights = weights if keep is None else weights * keep
    inputs = x.expand(DRAWS, *x.shape)
    if spread is not None:
        inputs = inputs + spread.sqrt() * torch.randn(inputs.shape)
    dense = case.dense(layer)
    rest = {} if layer.bias is None else {"bias": layer.bias.detach()}
    return vmap(lambda weight, one: functional_call(dense, {"weight": weight, **rest}, (one,)))(weights, inputs)


def agree(moments, oracle: Tensor) -> None:
    some = oracle.std(0) > 1e-6  # with output_padding, some outputs depend on no weight
    assert ((moments.mean - oracle.mean(0)).abs() / (oracle.std(0) / DRAWS**0.5 + 1e-6)).max() < 5
    assert (moments.variance[~some] < 1e-12).all()
    kurtosis = ((oracle - oracle.mean(0)) ** 4).mean(0)[some] / oracle.var(0)[some] ** 2
    z = (moments.variance / oracle.var(0)).log()[some] / ((kurtosis - 1) / DRAWS).sqrt()
    assert z.abs().max() < 5


@pytest.mark.parametrize("posterior", ["independent", "rank-one"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
class TestMoments:
    def test_of_the_weights(self, case, posterior):
        layer, x = layer_of(case, posterior), case.x()
        agree(layer.moments(x), samples(case, layer, x))

    def test_of_uncertain_inputs(self, case, posterior):
        if case.args.get("padding_mode") in ("reflect", "replicate"):
            pytest.skip("a window meets copies of one number, which count as independent: see `moments`")
        layer, x = layer_of(case, posterior), case.x()
        spread = torch.rand(x.shape)
        agree(layer.moments(x, variance=spread), samples(case, layer, x, spread))

    def test_of_what_a_mask_leaves(self, case, posterior):
        layer, x = layer_of(case, posterior), case.x()
        layer.mask = torch.rand(layer.weight.shape) > 0.4
        agree(layer.moments(x), samples(case, layer, x, keep=layer.mask))

    def test_the_noise_of_the_bias_adds_up(self, case, posterior):
        layer, x = layer_of(case, posterior), case.x()
        if layer.bias is None:
            pytest.skip("it has no bias")
        before = layer.moments(x).variance
        layer.bias_sigma2 = torch.rand(layer.bias.shape)
        view = (-1, *[1] * case.dims)
        torch.testing.assert_close(layer.moments(x).variance, before + layer.bias_sigma2.view(view))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
class TestRankOne:
    def twin(self, layer):
        """The layer with the same variances, stored for each weight."""
        twin = copy.deepcopy(layer)
        set_posterior([twin], "independent")
        assert torch.allclose(twin.log_sigma2, variances(layer).log(), atol=1e-5)
        return twin

    def test_training_draws_as_a_layer_of_the_same_variances(self, case):
        """With the same noise; the gradient of a term is the sum of the gradients of the variances that contain it."""
        layer = layer_of(case, "rank-one")
        twin = self.twin(layer)
        found = []
        for one in (layer, twin):
            x = case.x().requires_grad_()
            torch.manual_seed(9)
            y = one(x)
            slope = torch.linspace(-1, 1, y.numel()).view(y.shape)
            (slope * y + y.square()).sum().backward()
            found.append((y, x.grad))
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(layer.weight.grad, twin.weight.grad, rtol=1e-3, atol=1e-5)
        dense = layer.canonical(twin.log_sigma2.grad)
        torch.testing.assert_close(layer.log_sigma2_row.grad, dense.sum((2, 3), keepdim=True), rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(layer.log_sigma2_column.grad, dense.sum(1, keepdim=True), rtol=1e-3, atol=1e-4)

    def test_the_kl_is_that_of_the_same_variances(self, case):
        layer = layer_of(case, "rank-one")
        twin = self.twin(layer)
        layer.kl().backward()
        twin.kl().backward()
        torch.testing.assert_close(layer.kl(), twin.kl(), rtol=1e-5, atol=1e-4)
        dense = layer.canonical(twin.log_sigma2.grad)
        torch.testing.assert_close(layer.log_sigma2_row.grad, dense.sum((2, 3), keepdim=True), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(layer.log_sigma2_column.grad, dense.sum(1, keepdim=True), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(layer.weight.grad, twin.weight.grad, rtol=1e-4, atol=1e-6)

    def test_the_kl_by_blocks_is_the_same(self, case, monkeypatch):
        layer = layer_of(case, "rank-one").double()
        parameters = [layer.weight, layer.log_sigma2_row, layer.log_sigma2_column]
        whole = torch.autograd.grad(layer.kl() * 3, parameters)
        monkeypatch.setattr(_rank_one, "BLOCK", 7)
        for one, other in zip(torch.autograd.grad(layer.kl() * 3, parameters), whole, strict=True):
            torch.testing.assert_close(one, other)
        layer.weight.requires_grad_(False)
        layer.zero_grad()
        layer.kl().backward()
        assert layer.weight.grad is None and layer.log_sigma2_row.grad.abs().sum() > 0

    def test_gradients_of_weights_far_below_their_noise(self, case):
        """`0.5 (sigma2 / m - 1)` would be 0 in float32 for each of these."""
        layer = layer_of(case, "rank-one")
        if layer.transposed:
            pytest.skip("the general KL, in float32")
        with torch.no_grad():
            layer.weight.mul_(1e-2)
            layer.log_sigma2_row.fill_(4.0)
            layer.log_sigma2_column.zero_()
        layer.kl().backward()
        exact = layer.canonical(-0.5 * (layer.weight.detach().double().square() + 1e-8) / math.exp(4))
        torch.testing.assert_close(layer.log_sigma2_row.grad.double(), exact.sum((2, 3), keepdim=True), rtol=1e-3, atol=0)

    def test_members_and_masks_draw_as_a_layer_of_the_same_variances(self, case):
        layer = layer_of(case, "rank-one").eval()
        layer.threshold = dict.fromkeys(layer.threshold, 1.0)
        twin, x = self.twin(layer), case.x()
        for ways in ({"members": True}, {"local": True}, {}):
            found = []
            for one in (layer, twin):
                with torch.no_grad(), svdc.sampling(one, generator=torch.Generator().manual_seed(1), **ways):
                    found.append(one(x))
            torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_the_fit_of_variances_that_are_no_sum_is_the_nearest():
    """Least squares: no other pair of terms is closer."""
    layer = CASES["conv2d-groups"].layer(spread=2.0)
    wanted = layer.log_sigma2.detach().clone()
    set_posterior([layer], "rank-one")
    best = (layer.log_sigma2 - wanted).square().sum()
    best.backward()
    for own in layer.variance_parameters().values():
        assert own.grad.abs().max() < 1e-4
    assert best > 1


def test_another_posterior_starts_where_the_old_one_was():
    layer = layer_of(CASES["linear"], "rank-one")
    before = layer.log_sigma2.detach().clone()
    assert {name for name, _ in layer.named_parameters()} == {"weight", "bias", "log_sigma2_row", "log_sigma2_column"}
    set_posterior([layer], "independent")
    assert torch.equal(layer.log_sigma2, before) and not layer.variance_moved
    set_posterior([layer], "rank-one")
    torch.testing.assert_close(layer.log_sigma2, before)
    with torch.no_grad():
        layer.log_sigma2_row.add_(1)
    assert layer.variance_moved


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_training_step_is_one_graph(backend):
    torch.compiler.reset()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(16, 3))
    svdc.convert(model, log_sigma2=-4.0, posterior="rank-one")
    elbo = svdc.ELBO(model, torch.nn.CrossEntropyLoss(), num_examples=10)
    x, y = torch.randn(5, 3, 4, 4), torch.tensor([0, 1, 2, 0, 1])

    def loss(x, y):
        return elbo(model(x), y)

    found = []
    for step in (loss, torch.compile(loss, fullgraph=True, backend=backend)):
        torch.manual_seed(2)
        value = step(x, y)
        found.append([value, *torch.autograd.grad(value, list(model.parameters()))])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    torch.compiler.reset()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes(dtype):
    layer = layer_of(CASES["conv2d"], "rank-one")
    x = CASES["conv2d"].x()
    expected = layer.moments(x)
    found = layer.to(dtype).moments(x.to(dtype))
    rough = dtype == torch.bfloat16
    torch.testing.assert_close(found.mean.float(), expected.mean, rtol=0.05 if rough else 1e-5, atol=0.05 if rough else 1e-5)
    torch.testing.assert_close(found.variance.float(), expected.variance, rtol=0.1 if rough else 1e-5, atol=1e-3)
    layer(x.to(dtype)).sum().backward()
    assert layer.log_sigma2_row.grad.isfinite().all() and layer.log_sigma2_row.grad.dtype == dtype
