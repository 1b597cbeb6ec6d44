"""The sparse linear layer against a plain product of the masked matrix."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

from svdcompress.errors import UsageError
from svdcompress.execution import SparseLinear


def layer(density: float, bias: bool = True, rows: int = 7, columns: int = 11) -> nn.Linear:
    torch.manual_seed(0)
    made = nn.Linear(columns, rows, bias).requires_grad_(False).eval()
    made.weight.mul_(torch.rand(rows, columns) < density)
    return made


def by_hand(dense: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    y = torch.einsum("...i,oi->...o", x.double(), dense.weight.double())
    return (y if dense.bias is None else y + dense.bias.double()).float()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("density", [0.0, 0.2, 1.0])
@pytest.mark.parametrize(
    "shape", [(11,), (1, 11), (5, 11), (64, 11), (1, 1, 11), (2, 3, 11), (2, 3, 4, 11), (0, 11), (2, 0, 11)]
)
def test_outputs_are_those_of_the_masked_matrix(shape, density, bias):
    dense = layer(density, bias)
    x = torch.randn(shape)
    y = SparseLinear.from_dense(copy.deepcopy(dense))(x)
    assert y.shape == (*shape[:-1], 7) and y.is_contiguous()
    torch.testing.assert_close(y, by_hand(dense, x))


@pytest.mark.parametrize(("rows", "columns"), [(1, 11), (7, 1), (1, 1)])
def test_narrow_matrices(rows, columns):
    dense = layer(0.9, True, rows, columns)
    for batch in (1, 4):
        x = torch.randn(batch, columns)
        torch.testing.assert_close(SparseLinear.from_dense(copy.deepcopy(dense))(x), by_hand(dense, x))


def test_inputs_that_are_not_contiguous():
    dense = layer(0.3)
    x = torch.randn(11, 6, 2).permute(2, 1, 0)
    torch.testing.assert_close(SparseLinear.from_dense(copy.deepcopy(dense))(x), by_hand(dense, x))


def test_a_layer_keeps_what_it_is_and_stores_no_zeros():
    dense = layer(0.2)
    stored = int((dense.weight != 0).sum())
    sparse = SparseLinear.from_dense(dense)
    assert sparse is dense and sparse.weight.layout == torch.sparse_csr and sparse.weight.values().numel() == stored
    assert sparse.weight.shape == (7, 11) and [name for name, _ in sparse.named_parameters()] == ["bias"]
    assert f"density={stored / 77:.3g}" in repr(sparse)


def test_copies_files_and_other_dtypes():
    dense = layer(0.2)
    x = torch.randn(5, 11)
    sparse = SparseLinear.from_dense(copy.deepcopy(dense))
    twin = copy.deepcopy(sparse)
    twin.weight.values().zero_()
    torch.testing.assert_close(sparse(x), by_hand(dense, x))  # the copy does not share memory
    file = io.BytesIO()
    torch.save(sparse, file)
    torch.testing.assert_close(torch.load(io.BytesIO(file.getvalue()), weights_only=False)(x), by_hand(dense, x))
    assert set(sparse.state_dict()) == {"weight", "bias"}
    torch.testing.assert_close(sparse.double()(x.double()).float(), by_hand(dense, x))


def test_it_is_for_inference():
    sparse = SparseLinear.from_dense(layer(0.2))
    with pytest.raises(UsageError, match=r"call eval\(\), or train the model that to_sparse was given"):
        sparse.train()(torch.randn(5, 11))
    x = torch.randn(5, 11, requires_grad=True)  # gradients for inputs are supported
    sparse.eval()(x).sum().backward()
    torch.testing.assert_close(x.grad, layer(0.2).weight.sum(0).expand(5, -1))
