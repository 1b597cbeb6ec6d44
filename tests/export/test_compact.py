"""The compact form of ONNX files, against the dense file in two runtimes and against steps added one by one."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from torch import nn

import svdcompress as svdc
from svdcompress.errors import ExportError, OutputError
from svdcompress.export import check_parity, export_onnx, write_compact
from svdcompress.export._gaps import gaps


def dense_file(path, arrays, opset=20):
    """A model that returns each array times its input (a scalar)."""
    nodes = [helper.make_node("Mul", [name, "x"], [f"{name}_out"]) for name in arrays]
    kinds = {name: helper.np_dtype_to_tensor_dtype(array.dtype) for name, array in arrays.items()}
    outputs = [helper.make_tensor_value_info(f"{name}_out", kinds[name], array.shape) for name, array in arrays.items()]
    x = helper.make_tensor_value_info("x", next(iter(kinds.values())), [])
    constants = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    graph = helper.make_graph(nodes, "g", [x], outputs, constants)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10), path)
    return path


def outputs(path, dtype=np.float32):
    """What a file returns for the input 1, in onnxruntime and in onnx's reference evaluator."""
    onnx.checker.check_model(str(path), full_check=True)
    feed = {"x": np.array(1, dtype)}
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return session.run(None, feed), ReferenceEvaluator(str(path)).run(None, feed)


def sparse(shape, places, seed=0, dtype=np.float32):
    array = np.zeros(int(np.prod(shape)), dtype)
    array[list(places)] = np.random.default_rng(seed).normal(size=len(places)).astype(dtype) + 3
    return array.reshape(shape)


CASES = {
    "random": {"a": sparse((784, 300), np.sort(np.random.default_rng(1).choice(784 * 300, 2000, replace=False)))},
    "nothing left": {"a": np.zeros((20, 30), np.float32)},
    "a vector with nothing left": {"a": np.zeros(300, np.float32)},
    "one number, first": {"a": sparse((40, 50), [0])},
    "one number, last": {"a": sparse((40, 50), [1999])},
    "a vector": {"a": sparse((900,), [3, 4, 500])},
    "gaps above 65,535": {"a": sparse((400, 1000), [5, 70_000, 70_001, 399_999])},
    "first and last of many": {"a": sparse((400, 1000), [399_999])},
    "a kernel": {"a": sparse((16, 8, 5, 5), range(7, 3200, 130))},
    "half precision": {"a": sparse((90, 50), [3, 80, 4000], dtype=np.float16)},
    "whole numbers, mostly of one kind": {"a": np.where(np.arange(3000) % 97, 31, np.arange(3000)).astype(np.int32)},
    "nearly dense": {"a": sparse((50, 50), range(2400))},
}


@pytest.mark.parametrize("arrays", CASES.values(), ids=CASES)
def test_outputs_are_those_of_the_dense_file(tmp_path, arrays):
    src = dense_file(tmp_path / "dense.onnx", arrays)
    before = src.read_bytes()
    written = write_compact(src, tmp_path / "compact.onnx")
    dtype = next(iter(arrays.values())).dtype
    for found in outputs(written.path, dtype):
        for name, array in zip(arrays, found, strict=True):
            assert array.dtype == dtype and np.array_equal(array, arrays[name]), name
    assert written.bytes == written.path.stat().st_size
    assert written.inputs == ["x"] and written.outputs == [f"{name}_out" for name in arrays]
    assert src.read_bytes() == before


@pytest.mark.parametrize("name", sorted(set(CASES) - {"nearly dense"}))
def test_smaller_where_it_pays(tmp_path, name):
    src = dense_file(tmp_path / "dense.onnx", CASES[name])
    size = src.stat().st_size
    left = sum(np.count_nonzero(array) for array in CASES[name].values())
    assert write_compact(src, tmp_path / "compact.onnx").bytes < min(size, 450 + 12 * left)


def test_a_tensor_that_would_not_be_smaller_stays(tmp_path):
    arrays = {"full": sparse((50, 50), range(2400)), "small": sparse((4, 4), [3]), "empty": sparse((90, 90), [17])}
    src = dense_file(tmp_path / "dense.onnx", arrays)
    model = onnx.load(str(write_compact(src, tmp_path / "compact.onnx").path))
    kept = {tensor.name for tensor in model.graph.initializer}
    assert {"full", "small"} <= kept and "empty" not in kept
    all_stay = dense_file(tmp_path / "all.onnx", {"full": arrays["full"]})
    assert write_compact(all_stay, tmp_path / "same.onnx").bytes == all_stay.stat().st_size


def test_numbers_in_the_same_places_share_their_steps(tmp_path):
    places = np.sort(np.random.default_rng(0).choice(30_000, 900, replace=False))
    one = write_compact(dense_file(tmp_path / "1.onnx", {"mean": sparse((100, 300), places)}), tmp_path / "1c.onnx").bytes
    both = {"mean": sparse((100, 300), places), "variance": sparse((100, 300), places, 1)}
    written = write_compact(dense_file(tmp_path / "2.onnx", both), tmp_path / "2c.onnx")
    assert written.bytes < one + 900 * 4 + 200  # the values, but no steps
    kinds = [node.op_type for node in onnx.load(str(written.path)).graph.node]
    assert kinds.count("CumSum") == 1 and kinds.count("ScatterElements") == 2
    assert all(np.array_equal(a, b) for a, b in zip(outputs(written.path)[0], both.values(), strict=True))
    fewer = {"mean": sparse((100, 300), places[:880]), "variance": sparse((100, 300), places, 1)}
    written = write_compact(dense_file(tmp_path / "3.onnx", fewer), tmp_path / "3c.onnx")
    assert [node.op_type for node in onnx.load(str(written.path)).graph.node].count("CumSum") == 1
    assert all(np.array_equal(a, b) for a, b in zip(outputs(written.path)[0], fewer.values(), strict=True))


def test_numbers_elsewhere_share_nothing(tmp_path):
    arrays = {"a": sparse((100, 300), range(0, 30_000, 100)), "b": sparse((100, 300), range(1, 30_000, 100))}
    written = write_compact(dense_file(tmp_path / "2.onnx", arrays), tmp_path / "2c.onnx")
    assert [node.op_type for node in onnx.load(str(written.path)).graph.node].count("CumSum") == 2
    assert all(np.array_equal(a, b) for a, b in zip(outputs(written.path)[0], arrays.values(), strict=True))


def walked(steps):
    """The places that the steps lead to."""
    place, found = 0, []
    for step in steps:
        place += int(step)
        found.append(place)
    return found


@pytest.mark.parametrize(
    ("places", "kind"),
    [
        ([0], np.uint8),
        ([255], np.uint8),
        (list(range(0, 25_500, 255)), np.uint8),
        ([*range(0, 20_000, 100), 20_000 + 300], np.uint8),  # one extra entry costs less than one more byte for every step
        (list(range(0, 300_000, 300)), np.uint16),
        ([65_535], np.uint16),
        ([*range(0, 3_000_000, 3000), 3_100_000], np.uint16),  # exceeds 65,535 once
        ([10**6, 2 * 10**6, 3 * 10**6], np.uint32),
    ],
)
def test_steps_come_to_the_places_in_the_smallest_form(places, kind):
    found = gaps(np.array(places), 4)
    assert found.steps.dtype == kind
    assert walked(found.steps) == list(found.places)
    between = sorted(set(found.places.tolist()) - set(places))
    assert set(places) <= set(found.places.tolist()) and len(found.places) == len(places) + len(between)
    size = len(found.steps) * (found.steps.itemsize + 4)
    for other in (np.uint8, np.uint16, np.uint32):  # counted step by step
        count, last = 0, 0
        for place in places:
            while place - last > np.iinfo(other).max:
                last, count = last + int(np.iinfo(other).max), count + 1
            last, count = place, count + 1
        assert size <= count * (np.dtype(other).itemsize + 4)


def test_minus_zero_is_zero(tmp_path):
    array = sparse((100, 50), [7])
    array[array == 0] = -0.0
    written = write_compact(dense_file(tmp_path / "a.onnx", {"a": array}), tmp_path / "c.onnx")
    assert written.bytes < 1000 and np.array_equal(outputs(written.path)[0][0], array)


def test_names_that_the_graph_has_are_left_to_it(tmp_path):
    arrays = {f"_{number}": sparse((100, 50), [number]) for number in range(12)}
    written = write_compact(dense_file(tmp_path / "a.onnx", arrays), tmp_path / "c.onnx")
    assert all(np.array_equal(a, b) for a, b in zip(outputs(written.path)[0], arrays.values(), strict=True))


def test_what_a_caller_may_feed_stays(tmp_path):
    path = dense_file(tmp_path / "a.onnx", {"a": sparse((100, 50), [7])})
    model = onnx.load(str(path))
    model.graph.input.append(helper.make_tensor_value_info("a", TensorProto.FLOAT, [100, 50]))
    onnx.save(model, str(path))
    written = write_compact(path, tmp_path / "c.onnx")
    feed = {"x": np.array(1, np.float32), "a": np.full((100, 50), 2, np.float32)}
    assert (onnxruntime.InferenceSession(str(written.path)).run(None, feed)[0] == 2).all()


def test_weights_beside_the_file_come_in(tmp_path):
    path = dense_file(tmp_path / "a.onnx", {"a": sparse((100, 500), [7, 9])})
    model = onnx.load(str(path))
    onnx.save(model, str(path), save_as_external_data=True, location="a.onnx.data", size_threshold=10)
    assert (tmp_path / "a.onnx.data").is_file()
    written = write_compact(path, tmp_path / "c.onnx")
    assert written.bytes < 1000 and np.count_nonzero(outputs(written.path)[0][0]) == 2


def test_what_is_no_file_of_onnx_is_refused(tmp_path):
    with pytest.raises(ExportError, match="no such file"):
        write_compact(tmp_path / "a.onnx", tmp_path / "c.onnx")
    (tmp_path / "a.onnx").write_bytes(b"hello")
    with pytest.raises(ExportError, match=r"a\.onnx: not an ONNX file"):
        write_compact(tmp_path / "a.onnx", tmp_path / "c.onnx")
    old = dense_file(tmp_path / "old.onnx", {"a": sparse((100, 50), [7])}, opset=9)
    with pytest.raises(ExportError, match=r"old\.onnx: a compact file needs opset 13"):
        write_compact(old, tmp_path / "c.onnx")
    good = dense_file(tmp_path / "good.onnx", {"a": sparse((100, 50), [7])})
    with pytest.raises(OutputError, match="is a folder"):
        write_compact(good, tmp_path)
    assert not (tmp_path / "c.onnx").exists()


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 12 * 12, 40), nn.Linear(40, 5)
    )
    svdc.convert(model)
    with torch.no_grad():
        for layer, share in zip((model[0], model[4], model[5]), (0.5, 0.95, 1.0), strict=True):
            gone = torch.rand_like(layer.weight) < share
            layer.weight[gone] = 0.01
            layer.log_sigma2[gone] = 3.0
    return model.eval(), torch.randn(2, 1, 28, 28)


def test_a_model_of_which_a_layer_has_nothing_left(tmp_path, network):
    model, x = network
    src = export_onnx(model, tmp_path / "model.onnx", x, metadata={"classes": ["a", "b"]})
    written = write_compact(src.path, tmp_path / "compact.onnx")
    assert written.bytes < src.bytes / 5
    assert check_parity(written.path, model, x) == src.parity
    assert svdc.export.read_metadata(written.path) == svdc.export.read_metadata(src.path) == written.metadata
    first, second = (ReferenceEvaluator(str(path)).run(None, {"input": x.numpy()})[0] for path in (src.path, written.path))
    assert np.array_equal(first, second)


def test_a_monte_carlo_file_draws_the_same(tmp_path, network):
    model, x = network
    src = export_onnx(model, tmp_path / "mc.onnx", x, monte_carlo=True)
    written = write_compact(src.path, tmp_path / "compact.onnx")
    assert written.bytes < src.bytes / 3
    feed = {"input": x.numpy(), "samples": np.array(7), "seed": np.array(3)}
    first, second = (onnxruntime.InferenceSession(str(path)).run(None, feed) for path in (src.path, written.path))
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    model = onnx.load(str(written.path))
    largest = max(model.graph.initializer, key=lambda tensor: tensor.ByteSize())
    assert largest.ByteSize() < 0.3 * written.bytes
