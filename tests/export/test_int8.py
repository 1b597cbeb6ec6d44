"""Integer files and two-byte numbers, against numpy's own rounding of the same weights."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper
from torch import nn

import svdcompress as svdc
from svdcompress.errors import ExportError, UsageError
from svdcompress.export import Int8, export_onnx, read_metadata, write_half
from svdcompress.export._half import as_half


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 40), nn.ReLU(), nn.Linear(40, 5)
    )
    model[1].running_var.uniform_(0.5, 2)
    with torch.no_grad():
        model[4].weight[torch.rand_like(model[4].weight) < 0.9] = 0
    return model.eval(), torch.randn(64, 1, 8, 8)


@pytest.fixture(scope="module")
def file(network, tmp_path_factory):
    model, x = network
    return export_onnx(model, tmp_path_factory.mktemp("float") / "model.onnx", x[:2], metadata={"classes": ["a", "b"]}).path


def ran(path, x):
    return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(None, {"input": x.numpy()})[0]


def dequantised(path):
    """{output of a DequantizeLinear of a constant: (integers, scales, zero points, axis)}"""
    graph = onnx.load(str(path)).graph
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    found = {}
    for node in graph.node:
        if node.op_type == "DequantizeLinear" and node.input[0] in constants:
            axis = next((a.i for a in node.attribute if a.name == "axis"), 1)
            found[node.output[0]] = (*(constants[name] for name in node.input), axis)
    return graph, found


def test_weights_are_the_nearest_of_255_steps_of_each_channel(network, file, tmp_path):
    model, x = network
    form = Int8(file, [{"input": x.numpy()}])
    assert list(form.layers)[1:] == ["4", "6"] and len(form.layers) == 3
    written = form.write(tmp_path / "int8.onnx", compact=False)
    onnx.checker.check_model(str(written.path), full_check=True)
    graph, found = dequantised(written.path)
    seen = 0
    for node in graph.node:
        if node.op_type == "Gemm":
            q, scale, zero, axis = found[node.input[1]]
            weight = model[4 if "4" in node.input[1] else 6].weight.detach().numpy()
            assert q.dtype == np.int8 and (zero == 0).all() and axis == 0 and scale.shape == (len(weight),)
            assert np.allclose(scale, np.abs(weight).max(1) / 127, rtol=1e-5)
            expected = np.array([[round(float(w) / float(s)) for w in row] for row, s in zip(weight, scale, strict=True)])
            assert np.abs(q - expected).max() <= 1 and (q != expected).mean() < 0.01  # ties
            assert (q[weight == 0] == 0).all()
            seen += 1
    assert seen == 2
    gap = np.abs(ran(written.path, x) - ran(file, x))
    assert 0 < gap.max() < 0.1 * np.abs(ran(file, x)).max()


def test_it_says_what_the_float_file_says_of_itself(network, file, tmp_path):
    written = Int8(file, [{"input": network[1].numpy()}]).write(tmp_path / "int8.onnx")
    assert read_metadata(written.path) == {**read_metadata(file), "precision": "int8"} == written.metadata
    assert (written.inputs, written.outputs, written.parity) == (["input"], ["output"], None)


def test_compact_integers_are_the_same_integers(network, file, tmp_path):
    _, x = network
    form = Int8(file, [{"input": x.numpy()}])
    dense, compact = form.write(tmp_path / "a.onnx", compact=False), form.write(tmp_path / "b.onnx")
    assert compact.bytes < dense.bytes - 3000
    assert np.array_equal(ran(dense.path, x), ran(compact.path, x))


def test_layers_that_are_left_stay_in_float(network, file, tmp_path):
    _, x = network
    form = Int8(file, [{"input": x.numpy()}])
    written = form.write(tmp_path / "a.onnx", leave=["4"], compact=False)
    names = {tensor.name: tensor.data_type for tensor in onnx.load(str(written.path)).graph.initializer}
    assert names["4.weight"] == onnx.TensorProto.FLOAT
    assert sum(kind == onnx.TensorProto.INT8 and "weight" in name and "zero" not in name for name, kind in names.items()) >= 1
    all_float = form.write(tmp_path / "b.onnx", leave=list(form.layers), compact=False)
    with pytest.raises(UsageError, match=r"'5' is not a layer of model\.onnx; it has"):
        form.write(tmp_path / "c.onnx", leave=["5"])
    with pytest.raises(UsageError, match="'middle' is unknown; one of minmax, percentile, entropy"):
        form.write(tmp_path / "c.onnx", method="middle")
    kinds = {tensor.data_type for tensor in onnx.load(str(all_float.path)).graph.initializer if "weight" in tensor.name}
    assert onnx.TensorProto.FLOAT in kinds


def test_monte_carlo_files_stay_in_float(network, tmp_path):
    model = svdc.convert(nn.Sequential(nn.Linear(6, 4))).eval()
    path = export_onnx(model, tmp_path / "mc.onnx", torch.randn(2, 6), monte_carlo=True).path
    with pytest.raises(UsageError, match=r"mc\.onnx: a Monte-Carlo file must stay in floating point"):
        Int8(path, [{"input": np.zeros((2, 6), np.float32)}])
    with pytest.raises(ExportError, match="no such file"):
        Int8(tmp_path / "none.onnx", [{}])


@pytest.mark.parametrize("scale", [1.0, 1e-12, 1e-6, 1e30, 65_000.0])
def test_two_bytes_keep_eleven_bits(scale):
    array = (np.random.default_rng(0).normal(size=1000) * scale).astype(np.float32)
    half, factor = as_half(array)
    assert half.dtype == np.float16 and np.isfinite(half).all()
    back = half.astype(np.float64) * factor
    assert (np.abs(back - array) <= np.abs(array) / 2048 + np.abs(array).max() * 2.0**-38).all()
    assert float(np.log2(factor)).is_integer()


def test_a_file_in_two_bytes_computes_with_rounded_weights(network, file, tmp_path):
    model, x = network
    written = write_half(file, tmp_path / "half.onnx", compact=False)
    assert written.bytes < 0.65 * file.stat().st_size
    onnx.checker.check_model(str(written.path), full_check=True)
    with torch.no_grad():
        rounded = nn.Sequential(*model)
        before = {name: p.clone() for name, p in rounded.named_parameters()}
        for layer in (model[4], model[6]):
            layer.weight.copy_(layer.weight.half().float())
        expected = rounded(x).numpy()
        for name, p in rounded.named_parameters():
            p.copy_(before[name])
    assert np.abs(ran(written.path, x) - expected).max() < 1e-5
    compact = write_half(file, tmp_path / "both.onnx")
    assert compact.bytes < written.bytes - 5000 and np.array_equal(ran(written.path, x), ran(compact.path, x))


def test_what_the_check_raises_leaves_no_file(file, tmp_path):
    def refuse(path):
        assert path.is_file()
        raise ExportError("not like this")

    with pytest.raises(ExportError, match="not like this"):
        write_half(file, tmp_path / "half.onnx", check=refuse)
    assert list(tmp_path.iterdir()) == []


class Units(nn.Module):
    """A mean of tens of thousands and a log variance, in one output."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 2))

    def forward(self, x):
        mean, log_variance = self.body(x).chunk(2, 1)
        return torch.cat([1e5 + 6e4 * mean, 20 + log_variance], 1)


def test_what_follows_the_last_layer_stays_in_floating_point(tmp_path):
    """Values joined there would get one scale of some hundreds, and a log variance of 20 would be 0."""
    torch.manual_seed(0)
    model, x = Units().eval(), torch.randn(64, 3)
    src = export_onnx(model, tmp_path / "model.onnx", x[:2]).path
    made = Int8(src, [{"input": x.numpy()}]).write(tmp_path / "int8.onnx", compact=False).path
    assert "QuantizeLinear" in {node.op_type for node in onnx.load(str(made)).graph.node}
    off = np.abs(ran(made, x) - model(x).detach().numpy())
    assert off[:, 1].max() < 0.1 and off[:, 0].max() < 6e4 * 0.1


@pytest.mark.parametrize("wide", [False, True], ids=["rows", "positions"])  # Gemm; MatMul and Add
def test_answers_beyond_those_of_the_calibration_are_not_cut_off(tmp_path, wide):
    """All features of the last layer are within what was seen, but their sum was never as large."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(4).repeat(2, 1))
        model[0].bias.zero_()
        model[2].weight.fill_(1.0)
        model[2].bias.zero_()
    seen = torch.eye(4).repeat(4, 1)  # one feature at a time: sums of 2
    x, rare = (each[:, None].expand(-1, 3, -1).contiguous() if wide else each for each in (seen, torch.ones(2, 4)))
    src = export_onnx(model.eval(), tmp_path / "model.onnx", x[:2]).path
    made = Int8(src, [{"input": x.numpy()}]).write(tmp_path / "int8.onnx", compact=False).path
    graph, constants = dequantised(made)
    assert sum("weight" in name for name in constants) == 2  # both layers are in integers
    assert ran(made, rare) == pytest.approx(np.full_like(ran(src, rare), 8.0), rel=0.02)
    read = {name for node in graph.node for name in node.input}
    assert {tensor.name for tensor in graph.initializer} <= read
