"""The variational layer for transformers' Conv1D (the Linear of GPT-2); imported only if transformers has been."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from svdcompress.layers._base import VariationalLayer
from svdcompress.layers._maps import TRANSPOSED, Map


class VariationalHFConv1D(VariationalLayer, Conv1D):
    """transformers' Conv1D with Gaussian weights, a Linear whose weight is (nx, nf); x: (*, nx) -> (*, nf)."""

    dense_class = Conv1D
    transposed = True

    def forward(self, x: Tensor) -> Tensor:  # Conv1D calls the argument x
        return super().forward(x)

    def _transform(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight.t(), bias)

    def _as_map(self, x: Tensor) -> tuple[Tensor, Map]:
        return x, TRANSPOSED

    def __repr__(self) -> str:
        return f"{type(self).__name__}(nf={self.nf}, nx={self.nx}{self.extra_repr()})"
