"""Masks filled with the smallest float32, as in transformers: no form of a file may turn them into infinities."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from svdcompress.export import pack, unpack, write_few_bits, write_half

LOWEST = np.finfo(np.float32).min
MASK = np.triu(np.full((10, 10), LOWEST, np.float32), 1)
MASK[0] = LOWEST  # a query that sees nothing attends to everything equally
WEIGHT = np.random.default_rng(0).normal(size=(10, 10)).astype(np.float32)


@pytest.fixture
def file(tmp_path):
    """softmax(x W + mask)."""
    nodes = [
        helper.make_node("MatMul", ["input", "weight"], ["scores"]),
        helper.make_node("Add", ["scores", "mask"], ["masked"]),
        helper.make_node("Softmax", ["masked"], ["output"], axis=-1),
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 10, 10]) for name in ("input", "output")]
    tensors = [numpy_helper.from_array(MASK, "mask"), numpy_helper.from_array(WEIGHT, "weight")]
    graph = helper.make_graph(nodes, "masked", ends[:1], ends[1:], tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    onnx.save(model, tmp_path / "m.onnx")
    return tmp_path / "m.onnx"


X = np.random.default_rng(1).normal(size=(3, 10, 10)).astype(np.float32)


def answer(path):
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return session.run(None, {"input": X})[0]


def expected():
    scores = (X.astype(np.float64) @ WEIGHT) + MASK
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def written(form, file, out):
    if form == "half":
        return write_half(file, out).path
    if form in (8, 4):
        return write_few_bits(file, out, form).path
    packed = pack(file, out.with_suffix(".svdc"), form)
    assert packed.largest < 0.1
    return unpack(packed.path, out).path


@pytest.mark.parametrize(
    ("form", "off"), [("half", 2e-3), (8, 0.05), (4, 0.5), ("float16", 2e-3), ("int8", 0.05), ("int4", 0.5)]
)
def test_every_form_answers_what_the_file_answers(file, tmp_path, form, off):
    path = written(form, file, tmp_path / "small.onnx")
    got = answer(path)
    assert np.isfinite(got).all()
    assert np.abs(got - expected()).max() < off
    assert np.abs(answer(file) - expected()).max() < 1e-6
    stored = sum(len(tensor.raw_data) for tensor in onnx.load(path).graph.initializer)
    assert form not in ("half", 8, 4) or stored < 1.7 * WEIGHT.nbytes  # the weight is rounded nevertheless
