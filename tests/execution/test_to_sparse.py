"""Which layers become sparse, by times that a test makes up; what the model computes then; and what is told of the others."""

from __future__ import annotations

import copy
import threading
from dataclasses import FrozenInstanceError

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import svdcompress as svdc
from svdcompress.errors import ModelError, UsageError
from svdcompress.execution import SparseLinear, _to_sparse, summary

WIDE = 200  # 40,000 weights: enough to be timed with one row


class Clock:
    """Times for `in_turns`, in order: of the layers that are timed, then of the whole model. Runs the work once."""

    def __init__(self, *times: tuple[float, float]) -> None:
        self.times, self.asked = list(times), 0

    def __call__(self, dense, sparse, seconds, device):
        torch.testing.assert_close(dense(), sparse(), rtol=1e-4, atol=1e-4)
        assert seconds > 0 and device.type == "cpu"
        self.asked += 1
        return self.times.pop(0)


FASTER, SLOWER, SAME = (2e-3, 1e-3), (1e-3, 2e-3), (1.05e-3, 1e-3)


def network(density: float = 0.05, **settings) -> nn.Module:
    """Plain, with zeros in the first two layers."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(WIDE, WIDE, **settings), nn.ReLU(), nn.Linear(WIDE, WIDE, **settings), nn.ReLU(), nn.Linear(WIDE, 3)
    )
    return thinned(model.eval(), ["0", "2"], density)


def thinned(model: nn.Module, names: list[str], density: float = 0.05) -> nn.Module:
    with torch.no_grad():
        for name in names:
            weight = model.get_submodule(name).weight
            weight.mul_(torch.rand_like(weight) < density)
    return model


def by_hand(model: nn.Module, x: Tensor) -> Tensor:
    """The network's plain products in double precision."""
    x = x.double()
    for at in (0, 2, 4):
        x = x @ model[at].weight.detach().double().T + model[at].bias.detach().double()
        x = x.relu() if at < 4 else x
    return x.float()


def kinds(model: nn.Module) -> dict[str, str]:
    return {name: type(module).__name__ for name, module in model.named_modules() if "Linear" in type(module).__name__}


def entry(model: nn.Module, name: str) -> svdc.SparseEntry:
    return next(one for one in model.sparse_execution if one.name == name)


def reason(model: nn.Module, x, name: str, *times: tuple[float, float]) -> str:
    """Why a layer stays dense although whatever is timed is faster."""
    clock = Clock(*times or [FASTER] * 9)
    result = _to_sparse.chosen(model, x, 1.1, clock)
    found = entry(result, name)
    assert not found.used and found.reason and kinds(result)[name] != "SparseLinear"
    return found.reason


@pytest.mark.parametrize("shape", [(1, WIDE), (2, WIDE), (33, WIDE), (4, 5, WIDE)])
def test_layers_that_measure_faster_are_sparse_and_the_outputs_stay(shape):
    model, x = network(), torch.randn(shape)
    result = _to_sparse.chosen(model, x, 1.1, Clock(FASTER, SLOWER, FASTER))
    assert kinds(result) == {"0": "SparseLinear", "2": "Linear", "4": "Linear"}
    assert set(kinds(model).values()) == {"Linear"}  # the given one stays as it is
    assert not result.training and not any(p.requires_grad for p in result.parameters())
    for other in (x, torch.randn(1, WIDE), torch.randn(65, WIDE), torch.randn(2, 3, WIDE)):
        torch.testing.assert_close(result(other), by_hand(model, other), rtol=1e-4, atol=1e-5)
    first, second, third = result.sparse_execution
    rows = x.numel() // WIDE
    assert (first.rows, first.dense_ms, first.sparse_ms, first.used, first.reason) == (rows, 2.0, 1.0, True, "")
    assert first.density == pytest.approx(float((model[0].weight != 0).double().mean()))
    assert "0.50 times as fast in sparse form, and at least 1.1 is asked for" in second.reason and second.dense_ms == 1.0
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
    assert entry(result, "0").reason == "faster by itself, but 1 ms saved are too little of the whole model's 200 ms to tell"
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


# What stays dense, and why


def test_small_products_are_not_timed():
    assert reason(network(), torch.randn(0, WIDE), "0") == "not timed: too small, 0 multiply-accumulates in all"
    model = thinned(nn.Sequential(nn.Linear(100, 100)), ["0"])
    assert "too small, 20,000" in reason(model, torch.randn(2, 100), "0")
    assert _to_sparse.chosen(model, torch.randn(3, 100), 1.1, Clock(FASTER, FASTER)).sparse_execution[0].used


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_dtype_without_sparse_products_stays_dense(dtype, monkeypatch):
    def refuse(weight):
        raise NotImplementedError("not implemented for 'Half'")

    monkeypatch.setattr("svdcompress.execution._linear.as_csr", refuse)  # as on most processors, whatever this one knows
    name = str(dtype).removeprefix("torch.")
    told = reason(network().to(dtype), torch.randn(4, WIDE, dtype=dtype), "0")
    assert told == f"torch has no sparse product for it ({name} on cpu): not implemented for 'Half'"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_does_not_fail(dtype):
    model, x = network().to(dtype), torch.randn(4, WIDE, dtype=dtype)
    result = _to_sparse.chosen(model, x, 1.1, Clock(*[FASTER] * 3))
    torch.testing.assert_close(result(x).float(), by_hand(model, x), rtol=0.1, atol=0.1)


def test_layers_under_autocast_stay_dense_where_torch_has_no_such_product():
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(WIDE, WIDE)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.fc(x)

    model, x = thinned(Mixed(), ["fc"]), torch.randn(4, WIDE)
    result = _to_sparse.chosen(model, x, 1.1, Clock(*[FASTER] * 2))
    torch.testing.assert_close(result(x).float(), model(x).detach().float(), rtol=0.1, atol=0.1)
    assert result.sparse_execution[0].used or "no sparse product" in result.sparse_execution[0].reason


def test_a_product_that_differs_stays_dense(monkeypatch):
    right = _to_sparse.SparseLinear.forward
    monkeypatch.setattr(_to_sparse.SparseLinear, "forward", lambda self, x: right(self, x) * 1.001)
    assert "of the outputs' spread off" in reason(network(), torch.randn(4, WIDE), "0")


class Tied(nn.Module):
    """a and b hold one weight; c is d; e's weight is read past it; f has its own forward; g is not called; h is plain."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.e, self.f, self.g, self.h = (nn.Linear(WIDE, WIDE) for _ in range(7))
        self.b.weight = self.a.weight
        self.d = self.c
        self.k = Twice(WIDE, WIDE)
        self.f.forward = lambda x: F.linear(x, torch.zeros(WIDE, WIDE))

    def forward(self, x: Tensor) -> Tensor:
        x = self.b(self.a(x)) + self.d(self.c(x)) + F.linear(x, self.e.weight) + self.e(x)
        return self.h(x) + self.f(x) + self.k(x)


class Twice(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_layers_that_others_share_or_read_stay_dense():
    torch.manual_seed(0)
    model = thinned(Tied().eval(), list("aceghk"))
    x = torch.randn(4, WIDE)
    result = _to_sparse.chosen(model, x, 1.1, Clock(FASTER, FASTER))
    told = {one.name: one.reason for one in result.sparse_execution}
    assert [name for name, why in told.items() if not why] == ["h"]
    assert told["a"] == "its weight is shared: it is 'b''s too" and told["b"] == "its weight is shared: it is 'a''s too"
    assert told["c"] == "shared: it is 'd' too" and "d" not in told
    assert told["e"] == "its weight is read past it, by the model itself"
    assert told["f"] == "its forward was replaced on the object itself"
    assert told["g"] == "the model didn't call it on the example inputs"
    assert told["k"] == "a Linear of a class of its own: Twice"
    torch.testing.assert_close(result(x), model(x).detach(), rtol=1e-4, atol=1e-4)


def test_a_weight_that_is_computed_in_each_forward_stays_dense():
    import torch.nn.utils.prune as masks

    model = network()
    masks.l1_unstructured(model[0], "weight", amount=0.5)
    assert "svdcompress.fold_derived_weights makes a plain layer of it" in reason(model, torch.randn(4, WIDE), "0")


def test_a_model_that_wants_dense_weights_stays_dense():
    class Transposing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(WIDE, WIDE)

        def forward(self, x: Tensor) -> Tensor:
            assert isinstance(self.fc, nn.Linear), "wants a Linear"
            return self.fc(x)

    told = reason(thinned(Transposing(), ["fc"]), torch.randn(4, WIDE), "fc")
    assert told == "faster by itself, but the model fails with sparse layers (wants a Linear)"


@pytest.mark.parametrize("converted", [False, True])
def test_attention_and_fused_encoders(converted):
    """torch's fused encoder reads weights past the layers, and knows dense ones alone: with sparse layers it isn't fused."""
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 512, 0.0, batch_first=True), 1).eval()
    thinned(model, ["layers.0.linear1", "layers.0.linear2", "layers.0.self_attn.out_proj"])
    x = torch.randn(4, 8, 32)
    expected = model(x).detach()
    model = svdc.convert(model, log_sigma2=-40.0) if converted else model
    result = _to_sparse.chosen(model, x, 1.1, Clock(FASTER, FASTER, FASTER))
    told = kinds(result)
    assert told["layers.0.linear1"] == told["layers.0.linear2"] == "SparseLinear"
    assert "class of its own" in entry(result, "layers.0.self_attn.out_proj").reason
    torch.testing.assert_close(result(x), expected, rtol=1e-3, atol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(result(x), expected, rtol=1e-3, atol=1e-4)


def test_inputs_that_do_not_fit_are_told():
    with pytest.raises(ModelError, match="example_inputs: Sequential fails on them"):
        svdc.to_sparse(network(), torch.randn(4, 3))


def test_a_model_that_cannot_be_copied_is_told():
    model = network()
    model.lock = threading.Lock()
    with pytest.raises(ModelError, match="can't be copied, and to_sparse returns a copy"):
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
