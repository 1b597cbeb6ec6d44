"""A tidied graph computes the same in two runtimes, with fewer nodes."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from torch import nn

import svdcompress as svdc
from svdcompress.export import export_onnx
from svdcompress.export._tidy import tidy


def both(model, feed):
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, feed), ReferenceEvaluator(model).run(None, feed)


@pytest.mark.parametrize("opset", [18, 20, 23])
def test_a_network_computes_the_same(tmp_path, opset):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(2, 6, 3, stride=2, padding=1, groups=2),
        nn.BatchNorm2d(6),
        nn.LeakyReLU(0.3),
        nn.MaxPool2d(2, ceil_mode=True),
        nn.Conv2d(6, 4, 3, dilation=1),
        nn.Flatten(),
        nn.LayerNorm(16),
        nn.Linear(16, 5, bias=False),
        nn.Softmax(1),
    ).eval()
    x = torch.randn(3, 2, 15, 15)
    model = onnx.load(export_onnx(net, tmp_path / "m.onnx", x, opset=opset).path)
    before, size = both(model, {"input": x.numpy()}), model.ByteSize()
    weights = [tensor.name for tensor in model.graph.initializer]
    tidy(model)
    onnx.checker.check_model(model, full_check=True)
    for ours, theirs in zip(both(model, {"input": x.numpy()}), before, strict=True):
        assert np.array_equal(ours[0], theirs[0])
    assert model.ByteSize() < size
    assert [tensor.name for tensor in model.graph.initializer] == weights
    assert [value.name for value in model.graph.input] == ["input"]
    assert all(not node.name for node in model.graph.node)
    conv = next(node for node in model.graph.node if node.op_type == "Conv")
    kept = {attribute.name for attribute in conv.attribute}
    assert {"strides", "pads", "group"} <= kept and "auto_pad" not in kept
    assert "group" not in {a.name for a in [n for n in model.graph.node if n.op_type == "Conv"][1].attribute}


def test_names_that_numbers_would_take_stay(tmp_path):
    nodes = [
        helper.make_node("Add", ["0", "1"], ["sum"]),
        helper.make_node("Dropout", ["sum"], ["out", ""]),
        helper.make_node("Foo", ["out"], ["2"], domain="custom"),
    ]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in ("0", "1", "2")]
    graph = helper.make_graph(nodes, "g", values[:2], values[2:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20), helper.make_opsetid("custom", 1)])
    tidy(model)
    assert [list(node.input) + list(node.output) for node in model.graph.node] == [
        ["0", "1", "3"],
        ["3", "4", ""],
        ["4", "2"],
    ]


def test_a_loop_keeps_the_names_that_its_body_means(tmp_path):
    torch.manual_seed(0)
    net = svdc.convert(nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))).eval()
    path = export_onnx(net, tmp_path / "mc.onnx", torch.randn(2, 6), monte_carlo=True, task="classification").path
    model = onnx.load(path)
    names = [list(node.output) for node in model.graph.node]
    feed = {"input": np.ones((2, 6), np.float32), "samples": np.array(4), "seed": np.array(3)}
    before = both(model, feed)[0]
    tidy(model)
    assert [list(node.output) for node in model.graph.node] == names
    assert all(np.array_equal(a, b) for a, b in zip(both(model, feed)[0], before, strict=True))
