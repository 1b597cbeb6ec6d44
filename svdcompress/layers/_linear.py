"""The variational fully connected layer."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from svdcompress.layers._base import VariationalLayer
from svdcompress.layers._maps import Map


class VariationalLinear(VariationalLayer, nn.Linear):
    """torch.nn.Linear with Gaussian weights; x: (*, in_features) -> (*, out_features)."""

    dense_class = nn.Linear

    def _transform(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    def _as_map(self, x: Tensor) -> tuple[Tensor, Map]:
        return x, None
