"""A Linear layer whose weight is stored and multiplied without its zeros."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from svdcompress.errors import UsageError

LARGEST_INT32 = 2**31 - 1


def as_csr(weight: Tensor) -> Tensor:
    """A matrix (rows, columns) in CSR form, with int32 indices if they suffice: int64 ones take up to twice as long, as MKL
    converts them in each product."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta state")
        csr = weight.to_sparse_csr()
    index = torch.int32 if max(csr.values().numel(), csr.shape[1]) <= LARGEST_INT32 else torch.int64
    return _csr(csr.crow_indices().to(index), csr.col_indices().to(index), csr.values(), csr.shape)


def _csr(ends: Tensor, columns: Tensor, values: Tensor, shape: Any) -> Tensor:
    with warnings.catch_warnings():  # torch 2.11 warns although they are checked
        warnings.filterwarnings("ignore", message="Sparse invariant checks are implicitly disabled")
        return torch.sparse_csr_tensor(ends, columns, values, tuple(shape), check_invariants=True)


class SparseLinear(nn.Module):
    """y = x W^T + b like torch.nn.Linear, computed with W in CSR form. For inference only.

    Only `to_sparse` makes this layer: it changes the class of an nn.Linear in place, so that hooks and names are kept.
    Inputs (..., in), outputs (..., out), contiguous like those of nn.Linear. Weights that are 0 are not read: where an input
    is infinite or NaN, nn.Linear gives NaN for them, and this layer doesn't. Raises UsageError in `train()`.

    Attributes:
        weight: (out, in), a sparse CSR tensor; a buffer, without gradients.
        bias: (out), or None.
    """

    in_features: int
    out_features: int
    weight: Tensor
    bias: Tensor | None

    @classmethod
    def from_dense(cls, layer: nn.Linear) -> SparseLinear:
        """Turn an nn.Linear into this layer in place; returns the same object."""
        weight = as_csr(layer.weight.detach())
        changed: Any = layer
        del changed.weight
        changed.__class__ = cls
        changed.register_buffer("weight", weight)
        return changed

    def forward(self, input: Tensor) -> Tensor:
        """Map x (..., in) to (..., out)."""
        if self.training:
            raise UsageError("sparse layers are for inference: call eval(), or train the model that to_sparse was given")
        x = input.reshape(-1, self.in_features)
        if len(x) == 1:  # a matrix-vector product takes two thirds of the time
            y = self.weight @ x[0]
            y = y if self.bias is None else y + self.bias
        else:
            # F.linear(x, csr) takes 3 to 6 times as long, and so does writing to a transposed output.
            transposed = x.T
            y = self.weight @ transposed if self.bias is None else torch.addmm(self.bias[:, None], self.weight, transposed)
            y = y.T.contiguous()
        return y.view(*input.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        share = self.weight.values().numel() / max(self.in_features * self.out_features, 1)
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}, density={share:.3g}"

    def __getstate__(self) -> dict[str, Any]:
        """Store the weight as its parts: torch can't copy.deepcopy a CSR tensor."""
        buffers = dict(self._buffers)
        weight: Any = buffers.pop("weight")
        parts = (weight.crow_indices(), weight.col_indices(), weight.values(), tuple(weight.shape))
        return {**self.__dict__, "_buffers": buffers, "_csr": parts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        parts = state.pop("_csr")
        super().__setstate__(state)
        self._buffers["weight"] = _csr(*parts)
