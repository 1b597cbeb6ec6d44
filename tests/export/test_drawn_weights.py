"""Weights that a pass uses at several positions are drawn as a whole: the file against draws of weights by separate code."""

from __future__ import annotations

import copy
from collections.abc import Callable

import export_zoo as zoo
import numpy as np
import pytest
import torch
from export_run import run, session
from torch import Tensor, nn

import svdcompress as svdc
from svdcompress.export import export_onnx

DRAWS, SAMPLES = 4000, 20_000


@torch.no_grad()
def by_weights(model: nn.Module, dense: nn.Module, inputs: Callable[[nn.Module], Tensor], count: int = DRAWS) -> Tensor:
    """Outputs (count, batch, outputs) of `dense`, a model of the same architecture, with weights drawn from the posterior."""
    generator = torch.Generator().manual_seed(11)
    own, layers = dict(dense.named_modules()), dict(model.named_modules())
    names = [name for name, layer in layers.items() if hasattr(layer, "log_sigma2")]
    means = {
        name: (layers[name].weight.clone(), None if layers[name].bias is None else layers[name].bias.clone()) for name in names
    }
    dense.load_state_dict({k: v for k, v in model.state_dict().items() if k in dense.state_dict()})
    dense.eval()
    outputs = []
    for _ in range(count):
        drawn: dict[int, Tensor] = {}  # tied weights are one weight
        for name in names:
            layer, (mean, bias) = layers[name], means[name]
            keep = (layer.log_sigma2 - (mean * mean).log()) < 3 if layer.mask is None else layer.mask
            noise = drawn.setdefault(id(layer.weight), torch.randn(mean.shape, generator=generator))
            own[name].weight.data = (mean + layer.log_sigma2.exp().sqrt() * noise) * keep
            if layer.bias_sigma2 is not None:
                own[name].bias.data = bias + layer.bias_sigma2.sqrt() * torch.randn(bias.shape, generator=generator)
        outputs.append(inputs(dense))
    return torch.stack(outputs)


def agree(got: dict[str, np.ndarray], logits: Tensor, limit: float = 4.5) -> None:
    """z-tests of mean, epistemic variance and mutual information. logits: (draws, batch, classes)."""
    p = logits.double().softmax(-1).numpy()
    share = 1 / len(p) + 1 / SAMPLES  # variances of the two estimates add up
    mean, squares = p.mean(0), (p - p.mean(0)) ** 2
    entropies = -(p * np.log(p)).sum(-1)
    # each draw's influence on the mutual information, to first order
    influence = -((p - mean) * np.log(mean)).sum(-1) - (entropies - entropies.mean(0))
    information = -(mean * np.log(mean)).sum(-1) - entropies.mean(0)
    for name, ours, draws in (
        ("mean", mean, p),
        ("epistemic", squares.mean(0), squares),
        ("mutual_information", information, influence),
    ):
        z = (got[name] - ours) / np.sqrt(draws.var(0) * share)
        assert np.abs(z).max() < limit, (name, z)


def check(
    model: nn.Module, dense: nn.Module, path, example, feeds: dict[str, Tensor], call: Callable, main=lambda y: y
) -> None:
    exported = export_onnx(model.eval(), path, example, monte_carlo=True, parts=True)
    got = run(session(exported.path), SAMPLES, seed=np.array(1), **{name: x.numpy() for name, x in feeds.items()})
    agree(got, by_weights(model, dense, lambda net: main(call(net, feeds))))


class Pooled(nn.Module):
    """Convolutions and pooling."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 6, 3, groups=2)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.max_pool2d(torch.relu(self.one(x)), 2)
        return 4 * self.head(torch.relu(self.two(hidden)).mean((2, 3)))


def test_tokens_with_mean_pooling_have_the_deviation_of_a_drawn_weight(tmp_path):
    """64 tokens, as in the issue: separate noise for each token would give an eighth of the deviation."""
    model = nn.Sequential(nn.Linear(8, 2), nn.AdaptiveAvgPool2d((1, None)), nn.Flatten())
    svdc.convert(model, log_sigma2=-2.0)
    model[0].mask = torch.ones(2, 8, dtype=torch.bool)
    path = export_onnx(model.eval(), tmp_path / "mc.onnx", torch.zeros(2, 64, 8), monte_carlo=True, task="regression").path
    x = torch.randn(3, 64, 8) + torch.linspace(0, 1, 8)
    got = run(session(path), SAMPLES, input=x.numpy())
    expected = np.exp(-2.0) * (x.mean(1) ** 2).sum(1, keepdim=True).expand(3, 2).numpy()
    assert np.abs(got["epistemic"] / expected - 1).max() < 5 * np.sqrt(2 / SAMPLES)
    mean = model[0](x).mean(1).detach().numpy()
    assert np.abs((got["mean"] - mean) / np.sqrt(expected / SAMPLES)).max() < 4.5


def test_pooled_convolutions(tmp_path):
    model = zoo.varied(Pooled(), low=-4, high=-1)
    x = torch.randn(3, 1, 10, 10)
    assert model.one.bias_sigma2 is not None and model.two.mask is not None
    check(model, Pooled(), tmp_path / "mc.onnx", x, {"input": x}, lambda net, feeds: net(feeds["input"]))


class Patches(nn.Module):
    """A vision transformer: convolutional patches, attention, a block on tokens that is called twice, mean pooling."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patch = nn.Conv2d(1, 8, 4, stride=4)
        self.norm = nn.LayerNorm(8)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patch(x).flatten(2).transpose(1, 2)
        q, k, v = self.qkv(self.norm(tokens)).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        tokens = tokens + self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        for _ in range(2):
            tokens = tokens + self.down(nn.functional.gelu(self.up(self.norm(tokens))))
        return 3 * self.head(self.norm(tokens).mean(1))


@pytest.mark.slow
def test_a_vision_transformer(tmp_path):
    model, x = zoo.varied(Patches(), low=-5, high=-2), torch.randn(3, 1, 16, 16)
    check(model, Patches(), tmp_path / "mc.onnx", x, {"input": x}, lambda net, feeds: net(feeds["input"]))


class Sequences(nn.Module):
    """Tokens, convolutions along them, tied weights; without a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 6)
        self.one, self.two = nn.Conv1d(6, 6, 3, padding=1), nn.Conv1d(6, 6, 3, padding=1)
        self.head = nn.Linear(6, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = torch.relu(self.one(self.embed(tokens).transpose(1, 2)))
        hidden = hidden + torch.relu(self.two(hidden))
        return 2 * self.head(hidden.amax(2))


@pytest.mark.slow
@pytest.mark.parametrize("parts", [False, True])
def test_a_sequence_and_tied_weights(tmp_path, parts):
    model = zoo.varied(Sequences(), low=-5, high=-2)
    model.two.weight, model.two.log_sigma2, model.two.mask = model.one.weight, model.one.log_sigma2, model.one.mask
    if parts:  # each layer masks the shared weight differently
        keep = torch.rand(model.one.weight.shape, generator=torch.Generator().manual_seed(0))
        model.one.mask, model.two.mask = keep < 0.2, (keep > 0.1) & (keep < 0.3)
    tokens = torch.randint(0, 11, (3, 9))
    check(
        model,
        Sequences(),
        tmp_path / "mc.onnx",
        {"tokens": tokens},
        {"tokens": tokens},
        lambda net, feeds: net(feeds["tokens"]),
    )
    noise = svdc.export.read_metadata(tmp_path / "mc.onnx")["noise"]
    shapes = [call["shape"] for call in noise if call["of"] == "weight"]
    assert shapes == ([[int((model.one.mask | model.two.mask).sum())]] if parts else [[6, 6, 3]])


@pytest.mark.slow
def test_a_small_bert(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=12, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, num_labels=3
    )
    torch.manual_seed(0)
    dense = transformers.BertForSequenceClassification(config)
    dense.classifier.weight.data *= 40
    model, ids = zoo.varied(copy.deepcopy(dense).eval(), low=-6, high=-3), torch.randint(0, 20, (2, 7))
    feeds = {"input_ids": ids, "attention_mask": torch.tensor([[1] * 7, [1] * 5 + [0] * 2])}
    call = lambda net, feeds: net(**feeds)  # noqa: E731
    check(model, dense, tmp_path / "mc.onnx", feeds, feeds, call, lambda y: y.logits)


# The layout, and which noise is drawn


def test_only_weights_that_stay_are_drawn(tmp_path):
    model = zoo.varied(Pooled())
    model.one.mask = torch.zeros(4, 1, 3, 3, dtype=torch.bool)
    model.one.mask[1, 0, 2, 1] = model.one.mask[3, 0, 0, 0] = True
    model.two.mask = torch.ones_like(model.two.weight, dtype=torch.bool)
    model.head.bias_sigma2 = None
    exported = export_onnx(model.eval(), tmp_path / "mc.onnx", torch.zeros(2, 1, 10, 10), monte_carlo=True, noise="input")
    assert exported.metadata["noise"] == [
        {"layer": "one", "of": "weight", "shape": [2], "kept": True},
        {"layer": "one", "of": "bias", "shape": [4]},
        {"layer": "two", "of": "weight", "shape": [6, 2, 3, 3]},
        {"layer": "head", "of": "output", "shape": [None, 3]},
    ]
    x, noise = torch.randn(3, 1, 10, 10), torch.randn(5, 2 + 4 + 108 + 9)
    logits = []
    for row in noise.split(1):
        dense = Pooled()
        dense.load_state_dict({k: v for k, v in model.state_dict().items() if k in dense.state_dict()})
        with torch.no_grad():
            spread = (model.one.log_sigma2 / 2).exp()
            dense.one.weight.mul_(model.one.mask)
            dense.one.weight[1, 0, 2, 1] += spread[1, 0, 2, 1] * row[0, 0]
            dense.one.weight[3, 0, 0, 0] += spread[3, 0, 0, 0] * row[0, 1]
            dense.one.bias += model.one.bias_sigma2.sqrt() * row[0, 2:6]
            dense.two.weight += (model.two.log_sigma2 / 2).exp() * row[0, 6:114].view(6, 2, 3, 3)
            features = []
            dense.head.register_forward_pre_hook(lambda module, args, kept=features: kept.append(args[0]))
            dense(x)
            keep = (model.head.log_sigma2 - (model.head.weight**2).log()) < 3
            mean = features[0] @ (model.head.weight * keep).T + model.head.bias
            variance = features[0] ** 2 @ (model.head.log_sigma2.exp() * keep).T
            logits.append(4 * (mean + variance.sqrt() * row[0, 114:].view(3, 3)))
    got = run(session(exported.path), 5, input=x.numpy(), noise=noise.numpy())
    expected = zoo.classification(logits)
    for name, value in got.items():
        assert np.abs(value - expected[name]).max() < 1e-5, name


@pytest.mark.parametrize("kind", ["bernoulli", "gaussian"])
def test_dropout_keeps_at_its_rate(tmp_path, kind):
    layer = svdc.layers.BernoulliDropout(0.2) if kind == "bernoulli" else svdc.layers.GaussianDropout(0.2)
    model = nn.Sequential(layer).eval()
    path = export_onnx(model, tmp_path / "mc.onnx", torch.zeros(2, 50), monte_carlo=True, task="regression", verify=False).path
    got = run(session(path), 2000, input=np.full((4, 50), 3, np.float32))
    assert abs(got["mean"].mean() - 3) < 4.5 * 1.5 / np.sqrt(2000 * 200)
    assert abs(got["epistemic"].mean() - 9 * 0.25) < 0.05
    least = run(session(path), 1, input=np.full((4, 50), 3, np.float32))["mean"].min()
    assert (least == 0) == (kind == "bernoulli")
