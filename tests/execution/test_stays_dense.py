"""What stays dense whatever the clock says, and the reason given."""

from __future__ import annotations

import re

import pytest
import torch
from sparse_models import FASTER, WIDE, Clock, by_hand, entry, kinds, network, thinned
from torch import Tensor, nn
from torch.nn import functional as F

import svdcompress as svdc
from svdcompress.execution import _to_sparse


def reason(model: nn.Module, x, name: str, *times: tuple[float, float]) -> str:
    """Why a layer stays dense although everything that is timed is faster."""
    clock = Clock(*times or [FASTER] * 9)
    result = _to_sparse.chosen(model, x, 1.1, clock)
    found = entry(result, name)
    assert not found.used and found.reason and kinds(result)[name] != "SparseLinear"
    return found.reason


def test_small_products_are_not_timed():
    assert reason(network(), torch.randn(0, WIDE), "0") == "not timed: too small, 0 multiply-accumulates in total"
    model = thinned(nn.Sequential(nn.Linear(100, 100)), ["0"])
    assert "too small, 20,000" in reason(model, torch.randn(2, 100), "0")
    assert _to_sparse.chosen(model, torch.randn(3, 100), 1.1, Clock(FASTER, FASTER)).sparse_execution[0].used


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_dtype_without_sparse_products_stays_dense(dtype, monkeypatch):
    def refuse(weight):
        raise NotImplementedError("not implemented for 'Half'")

    monkeypatch.setattr("svdcompress.execution._linear.as_csr", refuse)  # as on most processors, even if this one supports it
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
    assert re.fullmatch(
        r"its sparse product differs by \S+ of the outputs' spread", reason(network(), torch.randn(4, WIDE), "0")
    )


class Tied(nn.Module):
    """a and b share a weight; c is d; e's weight is read directly; f has its own forward; g is not called; h is plain."""

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
    assert told["a"] == "its weight is shared with 'b'" and told["b"] == "its weight is shared with 'a'"
    assert told["c"] == "shared: it is also 'd'" and "d" not in told
    assert told["e"] == "its weight is read directly by the model itself, bypassing the layer"
    assert told["f"] == "its forward method was replaced on the instance"
    assert told["g"] == "the model didn't call it on the example inputs"
    assert told["k"] == "a subclass of Linear: Twice"
    torch.testing.assert_close(result(x), model(x).detach(), rtol=1e-4, atol=1e-4)


def test_a_weight_that_is_computed_in_each_forward_stays_dense():
    import torch.nn.utils.prune as masks

    model = network()
    masks.l1_unstructured(model[0], "weight", amount=0.5)
    assert "svdcompress.fold_derived_weights turns it into a plain layer" in reason(model, torch.randn(4, WIDE), "0")


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
    """torch's fused encoder reads the layers' weights directly and only supports dense ones; with sparse ones it isn't used."""
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 512, 0.0, batch_first=True), 1).eval()
    thinned(model, ["layers.0.linear1", "layers.0.linear2", "layers.0.self_attn.out_proj"])
    x = torch.randn(4, 8, 32)
    expected = model(x).detach()
    model = svdc.convert(model, log_sigma2=-40.0) if converted else model
    result = _to_sparse.chosen(model, x, 1.1, Clock(FASTER, FASTER, FASTER))
    told = kinds(result)
    assert told["layers.0.linear1"] == told["layers.0.linear2"] == "SparseLinear"
    assert "a subclass of Linear" in entry(result, "layers.0.self_attn.out_proj").reason
    torch.testing.assert_close(result(x), expected, rtol=1e-3, atol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(result(x), expected, rtol=1e-3, atol=1e-4)
