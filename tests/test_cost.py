"""Costs against counts by hand, and latencies of files made in the tests."""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import svdcompress as svdc
from svdcompress import cost as costs
from svdcompress.cost import by_layer, compression, file_bytes, latencies, latency, macs, measure
from svdcompress.errors import ExportError, UsageError


def test_mlp_by_hand():
    model = nn.Sequential(nn.Linear(20, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3, bias=False))
    with torch.no_grad():
        model[0].weight[:, 0] = 0
        model[1].bias.fill_(0)
    cost = measure(model, torch.randn(5, 20))
    assert cost.parameters == 20 * 8 + 8 + 8 + 8 + 24
    assert cost.nonzero == cost.parameters - 8 - 8
    assert (cost.weights, cost.weights_nonzero) == (184, 176)
    assert cost.macs == 20 * 8 + 8 * 3
    assert cost.to_dict()["macs"] == cost.macs


@pytest.mark.parametrize(
    ("layer", "shape", "expected"),
    [
        (nn.Conv2d(4, 6, 3, groups=2, padding=1), (4, 9, 7), 9 * 7 * 6 * 2 * 9),
        (nn.Conv1d(4, 6, 3, stride=2), (4, 9), 4 * 6 * 4 * 3),
        (nn.ConvTranspose1d(4, 6, 3, groups=2), (4, 9), 9 * 4 * 3 * 3),
        (nn.LSTM(4, 3, batch_first=True), (5, 4), 5 * (4 * 12 + 3 * 12)),
        (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (5, 8), 5 * (4 * 64 + 2 * 128) + 2 * 5 * 5 * 8),
    ],
)
@pytest.mark.parametrize("batch", [1, 3])
def test_macs_of_one_example_by_hand(layer, shape, expected, batch):
    assert macs(layer, torch.randn(batch, *shape)) == expected


def test_a_variational_model_costs_what_its_dense_one_does_less_what_is_irrelevant():
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(20, 8), nn.ReLU(), nn.Linear(8, 3))
    before = measure(dense, torch.randn(2, 20))
    model = svdc.convert(dense, log_sigma2=-30)
    assert measure(model, torch.randn(2, 20)) == before
    with torch.no_grad():
        model[0].log_sigma2[:, :5] = 10.0
    after = measure(model, torch.randn(2, 20))
    assert after.nonzero == before.nonzero - 40 and after.weights_nonzero == before.weights_nonzero - 40
    assert (after.parameters, after.macs) == (before.parameters, before.macs)
    held = svdc.hold(model, {name: torch.zeros_like(m) for name, m in svdc.relevance(model).items()})
    assert measure(held, torch.randn(2, 20)).nonzero == 8 + 3


def test_shared_parameters_count_once():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(7, 4)
            self.head = nn.Linear(4, 7, bias=False)
            self.head.weight = self.embedding.weight
            self.twice = self.inner = nn.Linear(4, 4, bias=False)

        def forward(self, tokens):
            return self.head(self.twice(self.inner(self.embedding(tokens))))

    cost = measure(Tied(), torch.zeros(2, 3, dtype=torch.long))
    assert cost.parameters == 28 + 16 and cost.weights == 28 + 16
    assert cost.macs == 3 * (2 * 16 + 28)


def test_inputs_may_be_a_tuple_or_a_dict_and_the_model_is_left_as_it_was():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.drop = nn.Linear(3, 2), nn.Dropout()

        def forward(self, x, *, scale=None, table=None):
            return self.drop(self.a(x)) * (1 if scale is None else scale) + (0 if table is None else table.sum())

    model = Two().train()
    model.drop.eval()
    inputs = {"x": torch.randn(4, 3), "scale": torch.ones(4, 2), "table": torch.randn(9, 9)}
    assert measure(model, (torch.randn(4, 3),)).macs == measure(model, inputs).macs == 6
    assert model.training and model.a.training and not model.drop.training
    assert torch.backends.mha.get_fastpath_enabled()


# Files


def onnx_file(path, width=4, fixed=None):
    from onnx import TensorProto, helper, save

    weight = np.random.default_rng(0).normal(size=(3, width)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["input", "w"], ["h"]), helper.make_node("ReduceSum", ["h"], ["output"])],
        "g",
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, [fixed or "batch", 3])],
        [helper.make_tensor_value_info("output", TensorProto.FLOAT, None)],
        [helper.make_tensor("w", TensorProto.FLOAT, weight.shape, weight.ravel())],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    save(model, str(path))
    return path


def make_input(batch):
    return np.zeros((batch, 3), np.float32)


def test_the_larger_file_is_slower_and_every_batch_size_is_there(tmp_path):
    paths = {"small": onnx_file(tmp_path / "s.onnx"), "large": onnx_file(tmp_path / "l.onnx", width=400_000)}
    found = latencies(paths, make_input, (1, 7), seconds=0.05)
    assert set(found) == set(paths) and set(found["small"]) == {"batch_1", "batch_7"}
    assert 0 < found["small"]["batch_1"] < found["large"]["batch_1"]
    assert file_bytes(paths["large"]) > file_bytes(paths["small"]) == paths["small"].stat().st_size


def test_inputs_by_name_may_hold_more_than_a_file_takes(tmp_path):
    path = onnx_file(tmp_path / "s.onnx")
    found = latency(path, lambda n: {"samples": np.int64(3), "input": make_input(n)}, (2,), seconds=0.01)
    assert list(found) == ["batch_2"]


def test_files_that_cannot_run_are_named(tmp_path):
    (tmp_path / "no.onnx").write_bytes(b"nothing")
    with pytest.raises(ExportError, match=r"no\.onnx: onnxruntime cannot load"):
        latency(tmp_path / "no.onnx", make_input)
    with pytest.raises(ExportError, match=r"one\.onnx: onnxruntime cannot run it with a batch of 5"):
        latency(onnx_file(tmp_path / "one.onnx", fixed=1), make_input, (5,))
    with pytest.raises(UsageError, match="threads"):
        latency(tmp_path / "no.onnx", make_input, threads=0)


def test_external_data_counts(tmp_path):
    path = onnx_file(tmp_path / "m.onnx")
    alone = file_bytes(path)
    (tmp_path / "m.onnx.data").write_bytes(b"12345")
    assert file_bytes(path) == alone + 5


def test_compression_is_dense_over_sparse():
    dense = {"parameters": 100, "nonzero": 90, "bytes": 400, "latency_ms": {"batch_1": 1.0, "batch_128": 9.0}}
    sparse = {"parameters": 50, "nonzero": 0, "bytes": None, "macs": 4, "latency_ms": {"batch_1": 0.5}}
    assert compression(dense, sparse) == {"parameters": 2.0, "nonzero": 90.0, "latency": {"batch_1": 2.0}}


def test_layers_add_up_to_the_whole_and_those_that_never_ran_are_named():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.twice, self.spare = nn.Conv2d(2, 4, 3), nn.Linear(4, 4, bias=False), nn.Linear(4, 4)
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x):
            x = self.twice(self.twice(self.first(x).flatten(2).transpose(1, 2)))
            return self.attention(x, x, x)[0]

    model, x = svdc.convert(Net()), torch.randn(3, 2, 4, 4)
    found = by_layer(model, x)
    told = {name: (layer.parameters, layer.macs, layer.ran) for name, layer in found.items()}
    assert told["first"] == (4 * 18 + 4, 4 * 4 * 18, True)
    assert told["twice"] == (16, 2 * 4 * 16, True)
    assert told["spare"] == (20, 0, False)
    whole = measure(model, x)
    assert sum(layer.macs for layer in found.values()) == whole.macs
    assert sum(layer.parameters for layer in found.values()) == whole.parameters
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_slow_files_are_called_three_times_instead_of_ten():
    calls = {"slow": 0, "quick": 0}

    def slow():
        calls["slow"] += 1
        time.sleep(0.05)

    def quick():
        calls["quick"] += 1

    found = costs.take_turns({"slow": slow, "quick": quick}, seconds=0.001)
    assert len(found["slow"]) == calls["slow"] == 3 and len(found["quick"]) == 3
    assert len(costs.take_turns({"quick": quick}, seconds=0.001)["quick"]) >= 10


@pytest.mark.parametrize(
    ("took", "agreeing", "calls"),
    [
        ([3.0, 3.03], 0.02, 2),
        ([3.0, 3.2, 3.03], 0.02, 7),  # the second one differs, so it takes 20 s to be enough
        ([3.0, 3.03], 0.0, 7),
        ([1.0, 1.0], 0.02, 5),  # not before it has taken 5 s
        ([0.05], 0.02, 20),
    ],
)
def test_calls_that_agree_need_no_repetition(monkeypatch, took, agreeing, calls):
    now = [0.0]
    monkeypatch.setattr(costs.time, "perf_counter", lambda: now[0])
    rest = iter([*took, *[took[-1]] * 100])

    def run():
        now[0] += next(rest)

    found = costs.take_turns({"file": run}, seconds=1.0, clock=lambda: now[0], agreeing=agreeing)
    assert len(found["file"]) == calls


@pytest.mark.parametrize(("slow", "calls"), [(0.05, 1), (10.0, 3)])
def test_a_file_whose_first_call_is_slow_is_warmed_up_once(monkeypatch, slow, calls):
    class Session:
        ran = 0

        def get_inputs(self):
            return [SimpleNamespace(name="x")]

        def run(self, names, arrays):
            self.ran += 1
            time.sleep(0.06)

    monkeypatch.setattr(costs, "SLOW", slow)
    session = Session()
    costs._runner("file.onnx", session, {"x": None}, 128)
    assert session.ran == calls


class Waiting:
    """A session that waits for 20 ms, as for a core that another program has, and computes next to nothing."""

    def get_inputs(self):
        return [SimpleNamespace(name="x")]

    def run(self, names, arrays):
        time.sleep(0.02)


@pytest.mark.skipif(sys.platform != "linux", reason="the wall clock is used")
def test_one_thread_is_timed_by_its_own_cpu_time_and_several_by_the_wall_clock(monkeypatch):
    monkeypatch.setattr(costs, "_session", lambda path, threads: Waiting())
    alone = latency("file.onnx", make_input, (1,), seconds=0.1)["batch_1"]
    shared = latency("file.onnx", make_input, (1,), threads=2, seconds=0.1)["batch_1"]
    assert 0 < alone < 5 and shared >= 20


@pytest.mark.skipif(sys.platform != "linux", reason="the wall clock is used")
def test_onnxruntime_with_one_thread_computes_in_the_calling_thread_alone(tmp_path):
    session, given = costs._session(onnx_file(tmp_path / "l.onnx", width=400_000), 1), {"input": np.ones((7, 3), np.float32)}
    session.run(None, given)
    whole, own = time.process_time(), time.thread_time()
    while time.process_time() - whole < 0.3:
        session.run(None, given)
    own, whole = time.thread_time() - own, time.process_time() - whole
    assert own > 0.95 * whole, (own, whole)


def test_a_clock_with_coarse_steps_is_not_used(monkeypatch):
    steps = time.thread_time
    monkeypatch.setattr(costs.sys, "platform", "linux")
    for step, clock in ((0.01, time.perf_counter), (1e-6, None)):
        monkeypatch.setattr(costs.time, "thread_time", lambda step=step: steps() // step * step)
        costs._fine.cache_clear()
        assert costs.clock_of(1) is (clock or costs.time.thread_time)
        assert costs.clock_name(1) == ("CPU time" if clock is None else "wall-clock time")
    assert costs.clock_of(2) is time.perf_counter and costs.clock_name(2) == "wall-clock time"
    costs._fine.cache_clear()
