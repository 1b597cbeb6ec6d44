"""Monte-Carlo files: exact parity through the noise, and what is refused."""

from __future__ import annotations

import math
from pathlib import Path

import export_zoo as zoo
import numpy as np
import onnx
import pytest
import torch
from export_run import numbers, run, session
from torch import nn

import svdcompress as svdc
from svdcompress.errors import ExportError, UsageError
from svdcompress.export import _loop, export_onnx, read_metadata

ENTROPIES = ["predictive_entropy", "expected_entropy", "mutual_information"]
BATCHES = (1, 2, 7)  # none of them is the traced size
MLP = [{"layer": f"{2 * i}", "of": "output", "shape": [None, n]} for i, n in enumerate((8, 5, 3))]


def agree(got: dict[str, np.ndarray], expected: dict[str, np.ndarray], tolerance: float = 2e-6) -> None:
    for name, value in got.items():
        assert value.dtype == np.float32 and value.shape == expected[name].shape, name
        assert np.abs(value - expected[name]).max() < tolerance * max(1, np.abs(expected[name]).max()), name


# Exact parity


@pytest.fixture(scope="module")
def given(tmp_path_factory) -> Path:
    """The MLP with its noise as an input."""
    path = tmp_path_factory.mktemp("given") / "mc.onnx"
    exported = export_onnx(zoo.mlp(), path, torch.zeros(2, 6), monte_carlo=True, noise="input")
    assert exported.inputs == ["input", "samples", "noise"]
    assert exported.outputs == ["mean", "variance", *ENTROPIES]
    assert set(exported.parities) == {1, 3, 7} and exported.parity < 1e-5
    return path


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("samples", [1, 2, 40])
def test_the_same_noise_gives_what_pytorch_gives(given, batch, samples):
    x = torch.randn(batch, 6)
    noise = torch.randn(samples, 16 * batch)
    got = run(session(given), samples, input=x.numpy(), noise=noise.numpy())
    agree(got, zoo.classification(zoo.draws(zoo.mlp(), x, noise, MLP, len(x))))
    if samples == 1:
        assert np.abs(got["mutual_information"]).max() < 1e-12


def test_layout_of_the_noise(given):
    stored = read_metadata(given)
    assert stored["kind"] == "monte_carlo" and stored["task"] == "classification"
    assert stored["noise"] == MLP


def test_what_depends_on_no_noise_is_ahead_of_the_loop(given):
    graph = onnx.load(given).graph
    (loop,) = (node for node in graph.node if node.op_type == "Loop")
    body = loop.attribute[0].g
    assert [node.op_type for node in graph.node].count("Gemm") == 2  # mean and variance of the first layer
    assert [node.op_type for node in body.node].count("Gemm") == 4
    assert {value.name for value in body.node if value.op_type == "Tanh"}  # mean and variance of the first layer
    assert not any("Random" in node.op_type for node in (*graph.node, *body.node))


def test_sums_do_not_lose_a_small_mutual_information(given):
    x, samples = torch.randn(2, 6), 3000
    noise = 1e-4 * torch.randn(samples, 32)
    got = run(session(given), samples, input=x.numpy(), noise=noise.numpy())["mutual_information"]
    expected = zoo.classification(zoo.draws(zoo.mlp(), x, noise, MLP, len(x)))["mutual_information"]
    assert expected.max() < 1e-8 and np.abs(got / expected - 1).max() < 1e-2


@pytest.mark.slow
def test_convolutions_norms_residuals_and_dropout(tmp_path):
    model = zoo.convolutional()
    exported = export_onnx(model, tmp_path / "mc.onnx", torch.zeros(1, 1, 8, 8), monte_carlo=True, noise="input", parts=True)
    assert exported.outputs == ["mean", "variance", *ENTROPIES, "aleatoric", "epistemic"]
    layout = exported.metadata["noise"]
    drawn = ["first.weight", "first.bias", "twice.weight", "drop.output", "up.weight", "spread.output", "head.output"]
    assert [f"{call['layer']}.{call['of']}" for call in layout] == drawn
    for batch in BATCHES:
        x = torch.randn(batch, 1, 8, 8)
        noise = torch.randn(5, numbers(layout, batch))
        got = run(session(exported.path), 5, input=x.numpy(), noise=noise.numpy())
        agree(got, zoo.classification(zoo.draws(model, x, noise, layout, batch)), 1e-5)


@pytest.mark.slow
def test_attention_keyword_inputs_and_a_batch_that_is_not_first_inside(tmp_path):
    model = zoo.attention()
    exported = export_onnx(model, tmp_path / "mc.onnx", zoo.tokens(4), monte_carlo=True, noise="input")
    assert exported.inputs == ["tokens", "scale", "samples", "noise"]
    for batch in BATCHES:
        inputs = zoo.tokens(batch, seed=batch)
        layout = exported.metadata["noise"]
        noise = torch.randn(4, numbers(layout, batch))
        got = run(
            session(exported.path), 4, tokens=inputs["tokens"].numpy(), scale=inputs["scale"].numpy(), noise=noise.numpy()
        )
        agree(got, zoo.classification([y["logits"] for y in zoo.draws(model, inputs, noise, layout, batch)]), 1e-5)


@pytest.fixture(scope="module")
def in_rounds(tmp_path_factory) -> Path:
    """The MLP, with only a few draws in a round."""
    path = tmp_path_factory.mktemp("rounds") / "mc.onnx"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_loop, "ROUND", 5 * 8 * 7)  # 5 draws of 7 rows of the 8 units
        export_onnx(zoo.mlp(), path, torch.zeros(2, 6), monte_carlo=True, noise="input")
    return path


@pytest.mark.parametrize("batch", [1, 7, 50])
@pytest.mark.parametrize("samples", [1, 5, 6, 37])
def test_rounds_of_several_draws(in_rounds, batch, samples):
    x = torch.randn(batch, 6)
    noise = torch.randn(samples, 16 * batch)
    got = run(session(in_rounds), samples, input=x.numpy(), noise=noise.numpy())
    agree(got, zoo.classification(zoo.draws(zoo.mlp(), x, noise, MLP, len(x))))


class Mixing(nn.Module):
    """Rows depend on each other, so several draws cannot share a batch, and weights are drawn."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(6, 4), nn.Linear(4, 3)

    def forward(self, x):
        hidden = self.one(x)
        return self.two(hidden - hidden.mean(0))


@pytest.mark.slow
def test_rows_that_look_at_each_other(tmp_path):
    model = zoo.varied(Mixing())
    exported = export_onnx(model, tmp_path / "mc.onnx", torch.zeros(2, 6), monte_carlo=True, noise="input", verify=False)
    assert exported.parity is None and {part["of"] for part in exported.metadata["noise"]} == {"weight", "bias"}
    width = sum(math.prod(part["shape"]) for part in exported.metadata["noise"])
    x, noise = torch.randn(5, 6), torch.randn(9, width)
    got = run(session(exported.path), 9, input=x.numpy(), noise=noise.numpy())
    agree(got, zoo.classification(zoo.draws(model, x, noise, exported.metadata["noise"], len(x))))


class Positions(nn.Module):
    """Dropout on a tensor without a batch dimension, and rows that depend on each other."""

    def __init__(self, mixing: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.position = nn.Parameter(torch.randn(6))
        self.drop = nn.Dropout(0.4)
        self.head = nn.Linear(6, 3)
        self.mixing = mixing

    def forward(self, x):
        hidden = x + self.drop(self.position)
        return self.head(hidden - hidden.mean(0) if self.mixing else hidden)


@pytest.mark.slow
@pytest.mark.parametrize("mixing", [True, False])
def test_noise_without_a_batch_dimension(tmp_path, mixing):
    model = svdc.convert_dropout(zoo.varied(Positions(mixing)))
    exported = export_onnx(model, tmp_path / "mc.onnx", torch.zeros(2, 6), monte_carlo=True, noise="input")
    whole = [{"layer": "head", "shape": [3, 6], "of": "weight"}, {"layer": "head", "shape": [3], "of": "bias"}]
    by_row = [{"layer": "head", "of": "output", "shape": [None, 3]}]
    layout = [{"layer": "drop", "of": "output", "shape": [6]}, *(whole if mixing else by_row)]
    assert exported.metadata["noise"] == layout
    x, noise = torch.randn(5, 6), torch.randn(9, 6 + (18 + 3 if mixing else 15))
    got = run(session(exported.path), 9, input=x.numpy(), noise=noise.numpy())
    agree(got, zoo.classification(zoo.draws(model, x, noise, exported.metadata["noise"], len(x))))


@pytest.mark.slow
def test_layers_without_a_relevant_weight_draw_nothing(tmp_path):
    model = zoo.mlp()
    with torch.no_grad():
        model[2].mask = torch.zeros_like(model[2].weight, dtype=torch.bool)
        model[4].mask, model[4].bias_sigma2 = torch.zeros(3, 5, dtype=torch.bool), torch.full((3,), 0.2)
    exported = export_onnx(model, tmp_path / "mc.onnx", torch.zeros(2, 6), monte_carlo=True, noise="input")
    assert [call["layer"] for call in exported.metadata["noise"]] == ["0", "4"]
    x, noise = torch.randn(4, 6), torch.randn(6, 4 * 11)
    got = run(session(exported.path), 6, input=x.numpy(), noise=noise.numpy())
    agree(got, zoo.classification(zoo.draws(model, x, noise, exported.metadata["noise"], 4, quiet=["2"])))


class Heads(nn.Module):
    def __init__(self, pair: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.pair = nn.Linear(6, 4), pair

    def forward(self, x):
        y = self.linear(x)
        return y.chunk(2, 1) if self.pair else y


@pytest.mark.slow
@pytest.mark.parametrize("pair", [True, False])
def test_gaussian(tmp_path, pair):
    model = zoo.varied(Heads(pair))
    exported = export_onnx(model, tmp_path / "mc.onnx", torch.zeros(2, 6), monte_carlo=True, noise="input", task="gaussian")
    assert exported.outputs == ["mean", "variance", "aleatoric", "epistemic"]
    x, noise = torch.randn(5, 6), torch.randn(7, 20)
    outputs = [torch.cat(tuple(y), 1) if pair else y for y in zoo.draws(model, x, noise, exported.metadata["noise"], len(x))]
    expected = zoo.gaussian([y[:, :2] for y in outputs], [y[:, 2:] for y in outputs])
    agree(run(session(exported.path), 7, input=x.numpy(), noise=noise.numpy()), expected)


@pytest.mark.slow
@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("task", ["binary", "regression"])
def test_binary_and_regression(tmp_path, task, flat):
    torch.manual_seed(0)
    layers = [nn.Linear(6, 1), nn.Flatten(0)] if flat else [nn.Linear(6, 2)]
    model = zoo.varied(nn.Sequential(*layers))
    tau = 4.0 if task == "regression" and flat else None
    exported = export_onnx(
        model, tmp_path / "mc.onnx", torch.zeros(2, 6), monte_carlo=True, noise="input", task=task, tau=tau, parts=True
    )
    x, noise = 5 * torch.randn(5, 6), torch.randn(7, 5 * (1 if flat else 2))
    outputs = zoo.draws(model, x, noise, exported.metadata["noise"], len(x))
    expected = zoo.regression(outputs, tau) if task == "regression" else zoo.binary(outputs)
    got = run(session(exported.path), 7, input=x.numpy(), noise=noise.numpy())
    agree(got, expected)
    assert set(got) == set(expected)
    one = run(session(exported.path), 1, input=x.numpy(), noise=noise[:1].numpy())
    assert not one["epistemic"].any()


@pytest.mark.slow
def test_certain_and_masked_classes_have_no_nan(tmp_path):
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x):
            return self.linear(x).masked_fill(torch.tensor([False, False, True]), -torch.inf)

    model = zoo.varied(Masked())
    exported = export_onnx(model, tmp_path / "mc.onnx", torch.zeros(2, 3), monte_carlo=True, noise="input")
    x, noise = torch.tensor([[3e3, 0, 0], [0, 1, 0]]), torch.randn(4, 6)
    got = run(session(exported.path), 4, input=x.numpy(), noise=noise.numpy())
    assert all(np.isfinite(value).all() for value in got.values()) and not got["mean"][:, 2].any()
    agree(got, zoo.classification(zoo.draws(model, x, noise, exported.metadata["noise"], len(x))))


def test_too_few_rows_of_noise(given):
    with pytest.raises(Exception, match="noise_must_have_a_row_for_each_sample"):
        run(session(given), 3, input=np.zeros((2, 6), np.float32), noise=np.zeros((2, 32), np.float32))
    with pytest.raises(Exception, match="noise_must_have_the_batch's_numbers"):
        run(session(given), 3, input=np.zeros((2, 6), np.float32), noise=np.zeros((3, 31), np.float32))


# Refusals


def test_nothing_to_sample(tmp_path):
    with pytest.raises(ExportError, match="no uncertainty to sample"):
        export_onnx(nn.Linear(6, 3), tmp_path / "mc.onnx", torch.zeros(2, 6), monte_carlo=True)
    model = zoo.mlp()
    for layer in (model[0], model[2], model[4]):
        layer.mask, layer.bias_sigma2 = torch.zeros_like(layer.weight, dtype=torch.bool), None
    with pytest.raises(ExportError, match="no uncertainty to sample"):
        export_onnx(model, tmp_path / "mc.onnx", torch.zeros(2, 6), monte_carlo=True)
    unused = zoo.mlp()
    unused.forward = lambda x: x
    with pytest.raises(ExportError, match="no uncertainty to sample"):
        export_onnx(unused, tmp_path / "mc.onnx", torch.zeros(2, 6), monte_carlo=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"task": "ranking"}, "task"),
        ({"opset": 22}, "opset"),
        ({"noise": "none"}, "noise"),
        ({"tau": 2.0}, "tau"),
        ({"task": "regression", "tau": -1.0}, "tau"),
        ({"task": "regression", "tau": "one"}, "tau: 'one'"),
        ({"task": "regression", "tau": torch.ones(3)}, "one number"),
        ({"dim": 0}, "dim: 0"),
        ({"dim": 2}, "dim: 2"),
        ({"dim": -2}, "dim: -2"),
        ({"monte_carlo": False, "noise": "input"}, "monte_carlo=True"),
        ({"monte_carlo": False, "parts": True}, "monte_carlo=True"),
    ],
)
def test_options_that_do_not_go_together(tmp_path, options, text):
    with pytest.raises(UsageError, match=text):
        export_onnx(zoo.mlp(), tmp_path / "mc.onnx", torch.zeros(2, 6), **{"monte_carlo": True, **options})


def test_outputs_that_do_not_fit_the_task(tmp_path):
    one = zoo.varied(nn.Sequential(nn.Linear(6, 1)))
    with pytest.raises(ExportError, match="two logits or more"):
        export_onnx(one, tmp_path / "mc.onnx", torch.zeros(2, 6), monte_carlo=True)
    with pytest.raises(ExportError, match="even number of outputs, not 3"):
        export_onnx(zoo.mlp(), tmp_path / "mc.onnx", torch.zeros(2, 6), monte_carlo=True, task="gaussian")
    flat = zoo.varied(nn.Sequential(nn.Linear(6, 1), nn.Flatten(0)))
    with pytest.raises(ExportError, match="even number of outputs, not 1"):
        export_onnx(flat, tmp_path / "mc.onnx", torch.zeros(2, 6), monte_carlo=True, task="gaussian")
    turned = zoo.varied(nn.Sequential(nn.Linear(6, 3), nn.Flatten(0), nn.Unflatten(0, (3, -1))))
    with pytest.raises(ExportError, match="the first dimension must be the batch"):
        export_onnx(turned, tmp_path / "mc.onnx", torch.zeros(2, 6), monte_carlo=True, task="regression")


def test_inputs_that_the_file_needs_for_itself(tmp_path):
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 3)

        def forward(self, samples):
            return self.linear(samples)

    with pytest.raises(ExportError, match="input named 'samples'"):
        export_onnx(zoo.varied(Named()), tmp_path / "mc.onnx", {"samples": torch.zeros(2, 6)}, monte_carlo=True)
