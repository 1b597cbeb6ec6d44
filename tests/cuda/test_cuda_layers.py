"""Every kind of variational layer on a GPU, against the same layer on the CPU with the same noise."""

import copy

import pytest
import torch
from torch import nn

import svdcompress as svdc
from svdcompress.layers import BernoulliDropout, GaussianDropout, Sampler, keep_channels

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def hf_conv1d():
    return pytest.importorskip("transformers").pytorch_utils.Conv1D(3, 5)


IMAGE, SMALL = (6, 4, 5, 5), (6, 4, 3, 3)
CASES = {
    "linear": (lambda: nn.Linear(5, 3), (6, 5)),
    "linear, no bias": (lambda: nn.Linear(5, 3, bias=False), (6, 5)),
    "linear, tokens": (lambda: nn.Linear(5, 3), (6, 4, 5)),
    "Conv1D of transformers": (hf_conv1d, (6, 4, 5)),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1), (6, 4, 8)),
    "conv2d": (lambda: nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2)), IMAGE),
    "conv2d, 1x1": (lambda: nn.Conv2d(4, 6, 1, bias=False), IMAGE),
    "conv2d, same": (lambda: nn.Conv2d(4, 6, (2, 4), padding="same"), IMAGE),
    "conv2d, circular": (lambda: nn.Conv2d(4, 6, 3, padding=(1, 2), padding_mode="circular"), IMAGE),
    "conv2d, reflect": (lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), IMAGE),
    "conv2d, groups": (lambda: nn.Conv2d(4, 6, 3, padding=1, groups=2), IMAGE),
    "conv2d, depthwise": (lambda: nn.Conv2d(4, 8, 3, padding=1, groups=4, bias=False), IMAGE),
    "conv3d": (lambda: nn.Conv3d(4, 2, 2, padding=1), (6, 4, 3, 4, 4)),
    "transposed1d": (lambda: nn.ConvTranspose1d(4, 6, 3, stride=2, output_padding=1), (6, 4, 5)),
    "transposed2d": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, groups=2), SMALL),
    "transposed3d": (lambda: nn.ConvTranspose3d(4, 2, 2, stride=2), (6, 4, 2, 2, 3)),
}
every_case = pytest.mark.parametrize("case", CASES)
every_posterior = pytest.mark.parametrize("posterior", ["independent", "rank-one"])


@pytest.fixture(autouse=True)
def exact(monkeypatch):
    """Convolutions in full float32, not in TF32."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


class Noise(Sampler):
    """Draws the same noise on every device."""

    def normal(self, like):
        return torch.randn(like.shape, generator=torch.Generator().manual_seed(3)).to(like)


def made(case, posterior="independent", low=-5.0, high=-3.0, **more):
    """A layer in train(), with a different variance for each weight, and inputs."""
    make, shape = CASES[case]
    torch.manual_seed(0)
    layer = svdc.convert(nn.Sequential(make()), posterior=posterior, **more)[0]
    parts = layer.variance_parameters().values()
    for part in parts:
        part.data.uniform_(low / len(parts), high / len(parts))
    return layer, torch.randn(shape)


def passed(layer, x, half=False):
    """The output and all gradients of a pass, by name; computed on the layer's device and returned on the CPU."""
    layer, x = copy.deepcopy(layer), x.clone().requires_grad_()
    with torch.autocast(x.device.type, torch.bfloat16, enabled=half):
        y = layer(x)
    assert y.dtype == (torch.bfloat16 if half else torch.float32) or getattr(layer, "padding_mode", "") == "reflect"
    y = y.float()
    (torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.device) * y + y.square()).sum().backward()
    found = {"output": y.detach(), "input": x.grad, **{name: own.grad for name, own in layer.named_parameters()}}
    assert all(tensor.device == x.device for tensor in found.values())
    return {name: tensor.float().cpu() for name, tensor in found.items()}


def far(found, expected):
    """The largest relative distance of all tensors."""
    assert set(found) == set(expected)
    return max(float((found[name] - expected[name]).norm() / expected[name].norm()) for name in expected)


@every_posterior
@every_case
def test_a_draw_and_its_gradients_are_those_of_the_cpu(case, posterior):
    layer, x = made(case, posterior)
    layer.sampler = Noise()
    there = copy.deepcopy(layer).cuda()
    expected = passed(layer, x)
    assert far(passed(there, x.cuda()), expected) < 1e-3
    assert far(passed(there, x.cuda(), half=True), expected) < 0.05


@every_case
def test_what_a_mask_leaves_is_drawn_as_on_the_cpu(case):
    layer, x = made(case)
    layer.mask = torch.rand(layer.weight.shape, generator=torch.Generator().manual_seed(4)) > 0.4
    if layer.bias is not None:
        layer.bias_sigma2 = torch.rand(layer.bias.shape, generator=torch.Generator().manual_seed(5))
    layer.sampler = Noise()
    there = copy.deepcopy(layer).cuda()
    found = passed(there, x.cuda())
    assert far(found, passed(layer, x)) < 1e-3
    assert float(found["weight"][~layer.mask].abs().max()) == 0 and float(found["log_sigma2"][~layer.mask].abs().max()) == 0


@every_posterior
@every_case
def test_means_and_moments_are_those_of_the_cpu(case, posterior):
    """Some weights are irrelevant, so they are exactly 0 in eval()."""
    layer, x = made(case, posterior, low=-6.0, high=3.0)
    there, spread = copy.deepcopy(layer).cuda(), torch.rand(x.shape)
    assert 0 < int(layer.relevant().sum()) < layer.weight.numel()
    assert torch.equal(there.relevant().cpu(), layer.relevant())
    for mode in (True, False):
        layer.train(mode)
        there.train(mode)
        for given in (None, spread):
            found = there.moments(x.cuda(), variance=None if given is None else given.cuda())
            expected = layer.moments(x, variance=given)
            assert found.mean.is_cuda and found.variance.is_cuda
            torch.testing.assert_close(found.mean.cpu(), expected.mean, rtol=1e-3, atol=1e-4)
            torch.testing.assert_close(found.variance.cpu(), expected.variance, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(there(x.cuda()).cpu(), layer(x), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("graph", [False, True])
@every_case
def test_draws_have_the_moments_of_the_layer(case, graph, half):
    layer, x = made(case)
    layer, one = layer.cuda(), x[:1].cuda()
    expected, draws = layer.moments(one), 4000
    torch.manual_seed(0)
    with torch.set_grad_enabled(graph), torch.autocast("cuda", torch.bfloat16, enabled=half):
        y = layer(one.expand(draws, *one.shape[1:])).detach().float()
    some = expected.variance[0] > 1e-6  # with output_padding, some outputs depend on no weight
    std = expected.variance[0][some].sqrt().detach()
    rounding = 0.02 * y.abs().max() if half else 1e-4
    assert ((y.mean(0) - expected.mean[0])[some].abs() < 6 * std / draws**0.5 + rounding).all()
    assert ((y.std(0)[some] / std).log().abs() < 6 / (2 * draws) ** 0.5 + 0.03 * half).all()


@every_posterior
@pytest.mark.parametrize("prior", ["ard", "log-uniform"])
@every_case
def test_the_kl_of_each_share_is_that_of_the_cpu(case, prior, posterior):
    """When few weights are kept, a CPU computes the KL from those alone."""
    for share in ("weight", "input", "output", "layer", ["weight", "input"]) if prior == "ard" else ("weight",):
        here, _ = made(case, posterior, prior=prior, share=share)
        for kept in (1.0, 0.1):
            if kept < 1:
                here.mask = torch.rand(here.weight.shape, generator=torch.Generator().manual_seed(6)) < kept
                here.mask.view(-1)[0] = True
            there = copy.deepcopy(here).cuda()
            kls = [layer.kl() for layer in (here, there)]
            gradients = [
                torch.autograd.grad(kl, list(layer.parameters())[:1]) for kl, layer in zip(kls, (here, there), strict=True)
            ]
            assert kls[1].is_cuda and float(kls[1].detach()) == pytest.approx(float(kls[0].detach()), rel=1e-4, abs=1e-4)
            torch.testing.assert_close(gradients[1][0].cpu(), gradients[0][0], rtol=1e-3, atol=1e-5)


@every_case
def test_another_posterior_is_made_on_the_device(case):
    for begin, end in (("rank-one", "independent"), ("independent", "rank-one")):
        here, _ = made(case, begin)
        there = copy.deepcopy(here).cuda()
        svdc.set_posterior(here, end)
        svdc.set_posterior(there, end)
        assert all(own.is_cuda for own in there.variance_parameters().values()) and there.posterior == end
        torch.testing.assert_close(there.log_sigma2.cpu(), here.log_sigma2, rtol=1e-4, atol=1e-4)


@every_case
def test_a_model_is_converted_and_made_dense_where_it_is(case):
    make, shape = CASES[case]
    torch.manual_seed(0)
    model = nn.Sequential(make()).cuda().eval()
    x = torch.randn(shape).cuda()
    with torch.no_grad():
        before = model(x)
        svdc.convert(model, log_alpha=-6.0, threshold=50.0)
        assert all(own.is_cuda for own in model.parameters())
        torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(svdc.to_dense(model)(x), before, rtol=1e-4, atol=1e-5)


@every_case
def test_members_are_dense_layers_of_one_draw(case):
    """One draw of the weights for all rows, and the moments of the layer over many draws."""
    layer, x = made(case)
    layer, one, draws = layer.cuda().eval(), x[:1].cuda(), 1000
    expected = layer.moments(one)
    generator = torch.Generator("cuda").manual_seed(0)
    outputs = []
    with torch.no_grad(), svdc.sampling(layer, generator=generator, members=True) as sampler:
        both = layer(one.expand(3, *one.shape[1:]))
        torch.testing.assert_close(both[0], both[2], rtol=1e-4, atol=1e-5)
        for _ in range(draws):
            sampler.resample()
            outputs.append(layer(one)[0])
    y, some = torch.stack(outputs), expected.variance[0] > 1e-6
    std = expected.variance[0][some].sqrt().detach()
    assert y.is_cuda and ((y.mean(0) - expected.mean[0])[some].abs() < 6 * std / draws**0.5 + 1e-4).all()
    assert ((y.std(0)[some] / std).log().abs() < 6 / (2 * draws) ** 0.5 + 0.01).all()


@pytest.mark.parametrize("name", ["auto", "float32", "bfloat16"])
def test_the_noise_of_a_large_layer_is_as_large_in_each_precision(name):
    """The layer is large enough for "auto" to take bfloat16 on a GPU."""
    torch.manual_seed(0)
    layer = svdc.convert(nn.Sequential(nn.Linear(512, 256)), log_sigma2=-4.0, variance_dtype=name)[0].cuda()
    x = torch.randn(256, 512).cuda()
    expected = layer.moments(x).variance.sqrt().detach()
    for graph in (True, False):
        with torch.set_grad_enabled(graph):
            noise = (layer(x) - nn.functional.linear(x, layer.weight, layer.bias)).detach() / expected
        assert float(noise.std()) == pytest.approx(1, abs=0.02) and abs(float(noise.mean())) < 0.02


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("case", ["linear", "conv2d", "transposed2d"])
def test_layers_of_another_dtype_draw_in_it(case, dtype):
    layer, x = made(case)
    expected, draws = layer.moments(x[:1]), 4000
    layer, one = layer.to(dtype).cuda(), x[:1].to(dtype).cuda()
    with torch.no_grad():
        y = layer(one.expand(draws, *one.shape[1:]))
    assert y.dtype == dtype
    ratio = y.float().std(0).cpu() / expected.variance[0].sqrt()
    assert (ratio.log().abs() < 0.1).all()


def test_channels_last_computes_the_same_draw():
    layer, x = made("conv2d, groups")
    layer.sampler = Noise()
    layer = layer.cuda()
    expected = passed(layer, x.cuda())
    for tensor in layer.parameters():
        tensor.data = tensor.data.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor.data
    assert far(passed(layer, x.cuda().contiguous(memory_format=torch.channels_last)), expected) < 1e-3


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("kind", [BernoulliDropout, GaussianDropout])
def test_dropout_draws_on_the_device(kind, channels):
    layer, x = kind(0.2, channels=channels).eval(), torch.full((4000, 8, 3), 3.0).cuda()
    assert torch.equal(layer(x), x)
    with svdc.sampling(layer, generator=torch.Generator("cuda").manual_seed(0), local=True):
        y = layer(x)
    first = y[:, :, 0]
    assert y.is_cuda and float(first.mean()) == pytest.approx(3, rel=0.02)
    assert float(first.var()) == pytest.approx(9 * 0.2 / 0.8, rel=0.05)
    assert bool((y == y[:, :, :1]).all()) == channels
    with svdc.sampling(layer, members=True):
        one = layer(x)
        assert torch.equal(one, one[:1].expand_as(one)) and torch.equal(layer(x), one)


@pytest.mark.parametrize("half", [False, True])
def test_a_recurrence_and_an_attention_beside_variational_layers(half):
    """Layers that are not converted run as in torch, with cuDNN in train(); all parameters get gradients."""

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.rnn = nn.Embedding(20, 8), nn.GRU(8, 8, batch_first=True)
            self.attention, self.pair = nn.MultiheadAttention(8, 2, batch_first=True), nn.Bilinear(8, 8, 8)
            self.drop, self.head = nn.Dropout(0.1), nn.Linear(8, 3)

        def forward(self, ids):
            x = self.rnn(self.embedding(ids))[0]
            x = x + self.attention(x, x, x, need_weights=False)[0]
            return self.head(self.drop(self.pair(x, x)).mean(1))

    torch.manual_seed(0)
    model = svdc.convert(svdc.convert_dropout(Both()), log_sigma2=-5.0)
    there, ids = copy.deepcopy(model).cuda(), torch.randint(20, (6, 7))
    with torch.autocast("cuda", torch.bfloat16, enabled=half):
        loss = nn.functional.cross_entropy(there(ids.cuda()), torch.arange(6).cuda() % 3) + 1e-3 * svdc.kl_divergence(there)
    loss.backward()
    for name, own in there.named_parameters():
        assert own.grad is not None and own.grad.is_cuda and bool(own.grad.isfinite().all()), name
    model.eval()
    there.eval()
    with torch.no_grad():
        torch.testing.assert_close(there(ids.cuda()).cpu(), model(ids), rtol=1e-3, atol=1e-3)
    expected = svdc.mc_predict(model, ids, 2000, task="regression")
    found = svdc.mc_predict(there, ids.cuda(), 2000, task="regression")
    noise = 5 * (2 * expected.epistemic / 2000).sqrt()
    assert ((found.mean.cpu() - expected.mean).abs() < noise + 1e-4).all()


def test_channels_that_pruning_keeps_are_chosen_on_the_device():
    torch.manual_seed(0)
    norm, x = nn.LayerNorm(6), torch.randn(3, 6)
    expected = norm(x)[:, [0, 2, 3, 5]]
    keep_channels(norm, 1, [0, 2, 3, 5])
    torch.testing.assert_close(norm.cuda()(x.cuda()).cpu(), expected)
