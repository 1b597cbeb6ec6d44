"""Sparse products on a GPU. Skipped without one; `make gpu` runs it where there is one."""

import pytest
import torch
from torch import nn

import svdcompress as svdc
from svdcompress.execution import SparseLinear, _to_sparse

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("rows", [1, 64])
def test_sparse_products_are_those_of_the_masked_matrix(rows):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 10)).cuda()
    with torch.no_grad():
        model[0].weight.mul_(torch.rand_like(model[0].weight) < 0.02)
    x = torch.randn(rows, 1024, device="cuda")
    result = _to_sparse.chosen(model, x, 1.0, lambda dense, sparse, seconds, device: (dense(), sparse(), (2.0, 1.0))[2])
    assert isinstance(result[0], SparseLinear), result.sparse_execution
    torch.testing.assert_close(result(x), model(x).detach(), rtol=1e-3, atol=1e-3)
    timed = svdc.to_sparse(model, x, at_least=1.0).sparse_execution[0]  # with the real clock, which waits for the GPU
    assert timed.dense_ms > 0.001 and timed.sparse_ms > 0.001
