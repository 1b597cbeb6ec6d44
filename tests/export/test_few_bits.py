"""Weights in four and eight bits: as two runtimes read them, against numpy's own rounding."""

from __future__ import annotations

import copy

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from torch import nn

import svdcompress as svdc
from svdcompress.errors import ExportError, OutputError, UsageError
from svdcompress.export import (
    export_onnx,
    importance,
    pack,
    read_metadata,
    round_weights,
    unpack,
    weights_of,
    write_few_bits,
    write_half,
)


def model_of(path, arrays, opset=20):
    """A model file that returns each array times its input."""
    nodes = [helper.make_node("Mul", [name, "x"], [f"{name}_out"]) for name in arrays]
    outputs = [helper.make_tensor_value_info(f"{name}_out", 1, array.shape) for name, array in arrays.items()]
    constants = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    graph = helper.make_graph(nodes, "g", [helper.make_tensor_value_info("x", 1, [])], outputs, constants)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10), path)
    return path


def arrays():
    random = np.random.default_rng(0)
    odd = random.normal(size=(9, 11)).astype(np.float32)
    sparse = (random.normal(size=(60, 301)) * (random.random((60, 301)) < 0.03)).astype(np.float32)
    far = np.zeros((300, 400), np.float32)
    far[[0, 200, 299], [0, 7, 399]] = 1.5, -2.5, 3.25
    return {
        "odd": odd,
        "sparse": sparse,
        "far": far,
        "none": np.zeros((40, 40), np.float32),
        "small": random.normal(size=(3, 3)).astype(np.float32),
        "bias": random.normal(size=80).astype(np.float32),
    }


def given(path):
    """The arrays {name: array} as both runtimes read them."""
    onnx.checker.check_model(str(path), full_check=True)
    feed, names = {"x": np.array(1, np.float32)}, list(arrays())
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    both = [
        dict(zip(names, each, strict=True)) for each in (session.run(None, feed), ReferenceEvaluator(str(path)).run(None, feed))
    ]
    for name in names:
        assert np.allclose(both[0][name], both[1][name], rtol=1e-6, atol=0), name
    return both[0]


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_weights_come_back_as_steps(tmp_path, bits, compact):
    src = model_of(tmp_path / "m.onnx", arrays())
    assert weights_of(src) == ["odd", "sparse", "far", "none"]
    written = write_few_bits(src, tmp_path / "f.onnx", bits, compact=compact)
    assert written.bytes == (tmp_path / "f.onnx").stat().st_size and written.parity is None
    assert read_metadata(written.path)["precision"] == f"int{bits}"
    found, last = given(written.path), 2 ** (bits - 1) - 1
    for name in ("odd", "sparse", "far", "none"):
        before = arrays()[name]
        assert (found[name][before == 0] == 0).all()
        for ours, theirs in zip(found[name], before, strict=True):
            assert len(np.unique(ours)) <= 2 * last + 1
            step = max(float(np.abs(theirs).max()), 1e-30) / last
            nearest = np.round(theirs / step) * step
            assert ((ours - theirs) ** 2).sum() <= 1.01 * ((nearest - theirs) ** 2).sum() + 1e-6 * (theirs**2).sum()
    assert np.array_equal(found["small"], arrays()["small"])
    assert np.allclose(found["bias"], arrays()["bias"], rtol=1e-3)


def test_a_sparse_weight_takes_a_byte_and_a_half_a_number(tmp_path):
    sparse = arrays()["sparse"]
    src = model_of(tmp_path / "m.onnx", {"sparse": sparse})
    sizes = {bits: write_few_bits(src, tmp_path / f"{bits}.onnx", bits).bytes for bits in (4, 8)}
    count = int((sparse != 0).sum())
    assert count / 2 - 3 <= sizes[8] - sizes[4] <= 0.7 * count  # some of the values become 0
    assert sizes[4] < 1.5 * count + 60 * 2 + 700
    whole = write_few_bits(src, tmp_path / "whole.onnx", 4, compact=False).bytes
    assert whole == pytest.approx(sparse.size / 2, abs=60 * 2 + 700)


def test_bits_by_name_and_the_rest_in_two_bytes(tmp_path):
    src = model_of(tmp_path / "m.onnx", arrays())
    write_few_bits(src, tmp_path / "f.onnx", {"odd": 4, "sparse": 8})
    found = given(tmp_path / "f.onnx")
    assert all(len(np.unique(row)) <= 15 for row in found["odd"])
    assert np.abs(found["sparse"] - arrays()["sparse"]).max() < 0.51 * np.abs(arrays()["sparse"]).max() / 127
    assert np.allclose(found["far"], arrays()["far"], rtol=1e-3)


def test_a_file_of_fewer_bits_can_be_made_of_another(tmp_path):
    half = write_half(model_of(tmp_path / "m.onnx", arrays()), tmp_path / "half.onnx").path
    eight = write_few_bits(model_of(tmp_path / "m.onnx", arrays()), tmp_path / "eight.onnx", 8).path
    for src in (half, eight):
        again = write_few_bits(src, tmp_path / "again.onnx")
        assert len([entry for entry in onnx.load(again.path).metadata_props if entry.key == "precision"]) == 1
    assert read_metadata(eight)["precision"] == "int8" and onnx.load(eight).ir_version >= 10


def test_layers_whose_inputs_have_three_dimensions_keep_their_names(tmp_path):
    """The exporter turns them into a MatMul with a transposed weight."""
    torch.manual_seed(0)
    net = svdc.convert(nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 20), nn.Linear(20, 20))).eval()
    with torch.no_grad():
        for layer in (net[0], net[2], net[3]):
            layer.log_sigma2.uniform_(-16, -4)
    x = torch.randn(4, 6, 12)
    src = export_onnx(net, tmp_path / "m.onnx", x[:2]).path
    assert weights_of(src) == ["0.weight", "2.weight", "3.weight"]
    graph = {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(src).graph.initializer}
    for name in ("0", "2", "3"):
        assert np.array_equal(graph[f"{name}.weight"], (net[int(name)].weight * net[int(name)].relevant()).detach().numpy().T)
    known = importance(net)
    file = pack(src, tmp_path / "a.svdc", "int8", bits={f"{name}.weight": 3 for name in "023"}, importance=known)
    assert not file.missing
    back = onnx.load(unpack(file.path, tmp_path / "back.onnx").path)
    found = {tensor.name: numpy_helper.to_array(tensor).T for tensor in back.graph.initializer}
    for name in ("0", "2", "3"):
        weight, counts = (net[int(name)].weight * net[int(name)].relevant()).detach(), torch.from_numpy(known[f"{name}.weight"])
        assert all(len(np.unique(row)) <= 7 for row in found[f"{name}.weight"])  # one step size for each output
        alike = round_weights(copy.deepcopy(net), 3, by="errors")[int(name)].weight.detach()
        off = [float((counts * (other - weight) ** 2).sum()) for other in (torch.from_numpy(found[f"{name}.weight"]), alike)]
        assert off[0] < off[1]


def test_a_network_of_any_layers(tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.ConvTranspose2d(6, 5, 2), nn.Flatten(), nn.Linear(405, 12)
    ).eval()
    x = torch.randn(4, 1, 10, 10)
    src = export_onnx(net, tmp_path / "model.onnx", x[:2], metadata={"classes": ["a"]}).path
    written = write_few_bits(src, tmp_path / "f.onnx", 8)
    run = lambda path: onnxruntime.InferenceSession(str(path)).run(None, {"input": x.numpy()})[0]  # noqa: E731
    assert np.abs(run(written.path) - run(src)).max() < 0.02 * run(src).std()
    assert read_metadata(written.path)["classes"] == ["a"] and written.inputs == ["input"]
    transposed = write_few_bits(src, tmp_path / "g.onnx", {weights_of(src)[1]: 4})  # outputs are the second dimension
    assert np.abs(run(transposed.path) - run(src)).max() < 0.3 * run(src).std()


def test_latency_is_that_of_float(tmp_path):
    """The nodes that widen the weights are gone once onnxruntime has loaded the file."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(50, 40), nn.ReLU(), nn.Linear(40, 30))
    with torch.no_grad():
        net[0].weight[torch.rand(40, 50) < 0.95] = 0
    src = export_onnx(net.eval(), tmp_path / "model.onnx", torch.randn(2, 50)).path
    write_few_bits(src, tmp_path / "f.onnx")
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "loaded.onnx")
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    onnxruntime.InferenceSession(str(tmp_path / "f.onnx"), options)
    assert {node.op_type for node in onnx.load(str(tmp_path / "loaded.onnx")).graph.node} <= {"Gemm", "Relu", "FusedGemm"}


def test_what_cannot_be_is_refused(tmp_path):
    src = model_of(tmp_path / "m.onnx", arrays())
    with pytest.raises(UsageError, match="bits: 3 is not one of 4, 8"):
        write_few_bits(src, tmp_path / "f.onnx", 3)
    with pytest.raises(UsageError, match="bits: 16 is not one of"):
        write_few_bits(src, tmp_path / "f.onnx", {"odd": 16})
    with pytest.raises(UsageError, match=r"bits: 4\.0 is not one of"):
        write_few_bits(src, tmp_path / "f.onnx", 4.0)
    with pytest.raises(UsageError, match="has no weight 'nosuch'; it has odd, sparse, far, none"):
        write_few_bits(src, tmp_path / "f.onnx", {"nosuch": 4})
    damaged = onnx.load(str(src))
    damaged.graph.initializer[0].raw_data += b"x"
    onnx.save(damaged, tmp_path / "damaged.onnx")
    with pytest.raises(ExportError, match="the tensor 'odd' is damaged"):
        write_few_bits(tmp_path / "damaged.onnx", tmp_path / "f.onnx")
    local = onnx.load(str(src))
    local.functions.add(name="Twice", domain="my")
    onnx.save(local, tmp_path / "local.onnx")
    with pytest.raises(ExportError, match="has local functions"):
        write_few_bits(tmp_path / "local.onnx", tmp_path / "f.onnx")
    with pytest.raises(ExportError, match="no such file"):
        write_few_bits(tmp_path / "none.onnx", tmp_path / "f.onnx")
    with pytest.raises(OutputError, match="does not exist"):
        write_few_bits(src, tmp_path / "no" / "f.onnx")
    net = svdc.convert(nn.Sequential(nn.Linear(12, 10))).eval()
    mc = export_onnx(net, tmp_path / "mc.onnx", torch.randn(2, 12), monte_carlo=True, task="classification").path
    with pytest.raises(UsageError, match="a Monte-Carlo file must stay in floating point"):
        write_few_bits(mc, tmp_path / "f.onnx")
    assert not (tmp_path / "f.onnx").exists()
