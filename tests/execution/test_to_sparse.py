"""Which layers become sparse, given timings made up by a test, and what the model then computes."""

from __future__ import annotations

import copy
import sys
import threading
import time
from dataclasses import FrozenInstanceError

import pytest
import torch
from sparse_models import FASTER, SAME, SLOWER, WIDE, Clock, by_hand, entry, kinds, network, thinned
from torch import Tensor, nn
from torch.nn import functional as F

import svdcompress as svdc
from svdcompress.errors import CheckpointError, ExportError, ModelError, UsageError
from svdcompress.execution import SparseLinear, _to_sparse, summary


@pytest.mark.parametrize("shape", [(1, WIDE), (2, WIDE), (33, WIDE), (4, 5, WIDE)])
def test_layers_that_measure_faster_are_sparse_and_the_outputs_stay(shape):
    model, x = network(), torch.randn(shape)
    result = _to_sparse.chosen(model, x, 1.1, Clock(FASTER, SLOWER, FASTER))
    assert kinds(result) == {"0": "SparseLinear", "2": "Linear", "4": "Linear"}
    assert set(kinds(model).values()) == {"Linear"}  # the given model is unchanged
    assert not result.training and not any(p.requires_grad for p in result.parameters())
    for other in (x, torch.randn(1, WIDE), torch.randn(65, WIDE), torch.randn(2, 3, WIDE)):
        torch.testing.assert_close(result(other), by_hand(model, other), rtol=1e-4, atol=1e-5)
    first, second, third = result.sparse_execution
    rows = x.numel() // WIDE
    assert (first.rows, first.dense_ms, first.sparse_ms, first.used, first.reason) == (rows, 2.0, 1.0, True, "")
    assert first.density == pytest.approx(float((model[0].weight != 0).double().mean()))
    assert "0.50 times as fast in sparse form, but at least 1.1 is required" in second.reason and second.dense_ms == 1.0
    assert third.reason.startswith("not timed: more than 50% of its weights are not 0") and third.dense_ms is None
    with pytest.raises(FrozenInstanceError):
        first.used = False


def test_a_converted_model_gives_its_mean_with_irrelevant_weights_at_0():
    torch.manual_seed(0)
    model = svdc.convert(nn.Sequential(nn.Linear(WIDE, WIDE), nn.ReLU(), nn.Linear(WIDE, 3)), log_sigma2=-40.0)
    irrelevant = torch.rand(WIDE, WIDE) < 0.95
    with torch.no_grad():
        model[0].log_sigma2[irrelevant] = 20.0
    x = torch.randn(8, WIDE)
    result = _to_sparse.chosen(model.train(), x, 1.1, Clock(FASTER, FASTER))
    hidden = F.relu(x @ model[0].weight.masked_fill(irrelevant, 0.0).T + model[0].bias)
    torch.testing.assert_close(result(x), (hidden @ model[2].weight.T + model[2].bias).detach(), rtol=1e-4, atol=1e-5)
    assert kinds(result) == {"0": "SparseLinear", "2": "Linear"} and model.training
    assert kinds(model) == {"0": "VariationalLinear", "2": "VariationalLinear"}
    assert copy.deepcopy(result)(x).equal(result(x)) and set(result.state_dict()) == {
        "0.weight",
        "0.bias",
        "2.weight",
        "2.bias",
    }


def test_how_much_faster_is_the_callers_choice():
    model, x = network(), torch.randn(4, WIDE)
    assert "1.05 times as fast" in entry(_to_sparse.chosen(model, x, 1.1, Clock(SAME, SAME)), "0").reason
    assert entry(_to_sparse.chosen(model, x, 1.04, Clock(SAME, SAME, FASTER)), "0").used
    for wrong in (0.9, 0.0, float("nan")):
        with pytest.raises(UsageError, match=r"at_least: .* is not 1 or more"):
            svdc.to_sparse(model, x, at_least=wrong)


@pytest.mark.parametrize("whole", [SLOWER, (1e-3, 1e-3), (1e-3, 0.99e-3)])
def test_nothing_is_sparse_where_the_whole_model_is_not_faster(whole):
    model, x = network(), torch.randn(4, WIDE)
    result = _to_sparse.chosen(model, x, 1.1, Clock(FASTER, SLOWER, whole))
    assert set(kinds(result).values()) == {"Linear"} and not any(one.used for one in result.sparse_execution)
    first = entry(result, "0")
    assert first.reason == f"faster by itself, but the whole model is not: {1e3 * whole[1]:g} ms sparse, 1 ms dense"
    assert first.dense_ms == 2.0 and "0.50 times as fast" in entry(result, "2").reason
    torch.testing.assert_close(result(x), by_hand(model, x), rtol=1e-4, atol=1e-5)


def test_a_gain_that_is_lost_in_the_whole_model_counts_as_chance():
    model, x = network(), torch.randn(4, WIDE)
    result = _to_sparse.chosen(model, x, 1.1, Clock(FASTER, SLOWER, (0.2, 0.1)))  # a layer's 1 ms can't make up 100 ms
    assert (
        entry(result, "0").reason == "faster by itself, but 1 ms saved are too small a part of the whole model's 200 ms to tell"
    )
    assert set(kinds(result).values()) == {"Linear"}


def test_a_model_without_zeros_is_neither_timed_nor_changed():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(WIDE, WIDE), nn.ReLU(), nn.Linear(WIDE, WIDE)), torch.randn(4, WIDE)
    with pytest.warns(UserWarning, match=r"to_sparse: no layer is sparse: 0 \(100% of the weights not 0, 4 rows\): not timed"):
        result = svdc.to_sparse(model, x)
    assert set(kinds(result).values()) == {"Linear"} and result(x).equal(model(x))
    with pytest.warns(UserWarning, match="the model has no Linear layer"):
        assert svdc.to_sparse(nn.ReLU(), x).sparse_execution == []


def test_a_model_that_is_a_layer_itself():
    model = thinned(nn.Linear(WIDE, WIDE), [""])
    x = torch.randn(3, WIDE)
    result = _to_sparse.chosen(model, x, 1.1, Clock(FASTER, FASTER))
    assert isinstance(result, SparseLinear) and summary(result.sparse_execution).startswith("sparse products in")
    torch.testing.assert_close(result(x), F.linear(x, model.weight, model.bias).detach(), rtol=1e-4, atol=1e-5)


def test_hooks_of_a_layer_go_along():
    model, x = network(), torch.randn(4, WIDE)
    model[0].register_forward_hook(lambda module, args, output: output + 1)
    model[2].register_forward_pre_hook(lambda module, args: (2 * args[0],))
    expected = model(x).detach()
    result = _to_sparse.chosen(model, x, 1.1, Clock(FASTER, FASTER, FASTER))
    assert kinds(result)["0"] == kinds(result)["2"] == "SparseLinear"
    torch.testing.assert_close(result(x), expected, rtol=1e-4, atol=1e-5)


def test_files_of_a_sparse_copy_are_refused_by_name(tmp_path):
    x = torch.randn(4, WIDE)
    result = _to_sparse.chosen(network(), x, 1.1, Clock(FASTER, SLOWER, FASTER))
    told = r"0\.weight: a sparse tensor, which .* that was passed to to_sparse"
    with pytest.raises(CheckpointError, match=told):
        svdc.save(result, tmp_path / "model.safetensors")
    for monte_carlo in (False, True):
        with pytest.raises(ExportError, match=told):
            svdc.export_onnx(result, tmp_path / "model.onnx", x, monte_carlo=monte_carlo)
    assert not list(tmp_path.iterdir())


def test_inputs_that_do_not_fit_are_told():
    with pytest.raises(ModelError, match="example_inputs: Sequential fails on them"):
        svdc.to_sparse(network(), torch.randn(4, 3))


def test_a_model_that_cannot_be_copied_is_told():
    model = network()
    model.lock = threading.Lock()
    with pytest.raises(ModelError, match="cannot be copied, but to_sparse returns a copy"):
        svdc.to_sparse(model, torch.randn(4, WIDE))


def test_random_models_are_compared_by_the_same_draws_and_leave_the_generator_alone():
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(WIDE, WIDE)

        def forward(self, x: Tensor) -> Tensor:
            y = self.fc(x)
            return y + torch.randn_like(y)

    class Deaf(Clock):
        def __call__(self, dense, sparse, seconds, device):
            dense(), sparse()
            return FASTER

    model = thinned(Noisy(), ["fc"])
    before = torch.get_rng_state()
    result = _to_sparse.chosen(model, torch.randn(4, WIDE, generator=torch.Generator().manual_seed(1)), 1.1, Deaf())
    assert entry(result, "fc").used and torch.get_rng_state().equal(before)


def test_the_clock_measures_both_in_turns():
    from svdcompress.execution._timing import WARM, in_turns

    order = []

    def fast():
        order.append("f")

    def slow():
        order.append("s")
        return sum(range(40_000))

    slow_time, fast_time = in_turns(slow, fast, 0.02, torch.device("cpu"))
    assert slow_time > fast_time > 0
    assert "".join(order[: 2 * WARM]) == WARM * "s" + WARM * "f"
    assert min(order.count("f"), order.count("s")) >= WARM + 10 and order.count("f") == order.count("s")


@pytest.mark.skipif(sys.platform != "linux", reason="the wall clock is used")
def test_on_one_thread_time_that_other_programs_have_does_not_count(monkeypatch):
    from svdcompress.execution._timing import in_turns

    def waits():
        time.sleep(0.01)

    for threads, counts in ((1, False), (2, True)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert (in_turns(waits, waits, 0.02, torch.device("cpu"))[0] >= 0.01) == counts
