"""A variance of rank one: log sigma2 of a weight is a term of its output plus a term of its input.

The variance of an output is then `r_j sum_i c_i x_i^2`: the layer's map for a single output in place of a second full map,
and no second tensor of the weight's size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from svdcompress.layers._moments import Linear
from svdcompress.layers.posteriors._base import Posterior, Shaped
from svdcompress.layers.priors import ARD, Prior, kl_rank_one
from svdcompress.renamed import renamed_arguments


class RankOne(Posterior):
    """`log_sigma2 = row + column`, a row's term for each output unit and a column's term for each input and kernel position.

    Cheaper than a variance for each weight (benchmarks/results/rank_one.md) as long as no mask is frozen; with one it costs
    the same. `set_posterior` switches to a variance for each weight.
    """

    name = "rank-one"
    parameters = ("log_sigma2_row", "log_sigma2_column")

    def start(self, layer: Shaped, log_sigma2: Tensor) -> dict[str, Tensor]:
        """The least-squares fit, exact for log variances that are such a sum."""
        view = layer.canonical(log_sigma2)
        row = view.mean((2, 3), keepdim=True)
        column = view.mean(1, keepdim=True) - view.mean((1, 2, 3), keepdim=True)
        return {"log_sigma2_row": row, "log_sigma2_column": column}

    def log_sigma2(self, layer: Shaped) -> Tensor:
        """The sum of row and column, (groups, outputs, 1, 1) + (groups, 1, inputs, positions), in the weight's shape."""
        return layer.as_weight(layer.log_sigma2_row + layer.log_sigma2_column)

    @renamed_arguments(keep="mask")
    def spread(self, layer: Shaped, mask: Tensor | None) -> Factors | None:
        """Both factors; None if the mask leaves out a weight."""
        if mask is not None and (torch.compiler.is_compiling() or not bool(mask.all())):
            return None
        wide = torch.promote_types(layer.log_sigma2_row.dtype, torch.float32)
        row, column = layer.log_sigma2_row.to(wide).exp(), layer.log_sigma2_column.to(wide).exp()
        return Factors(row[..., 0, 0], layer.as_weight(column, outputs=1))

    def kl(self, layer: Shaped, prior: Prior, share: Mapping[str, float]) -> Tensor | None:
        """The KL to an ARD prior for each weight by itself; None in other cases."""
        weight = layer.weight
        plain = type(prior) is ARD and list(share) == ["weight"] and weight.dtype in (torch.float32, torch.float64)
        if not plain or layer.transposed or torch.compiler.is_compiling():
            return None
        return kl_rank_one(weight.contiguous(), layer.log_sigma2_row, layer.log_sigma2_column, layer.log_sigma2_column.shape[0])


class Factors(NamedTuple):
    """Variances of rank one.

    rows: of the outputs, (groups, outputs per group). columns: a weight of the layer's layout, with one output per group.
    """

    rows: Tensor
    columns: Tensor

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the variance path is computed."""
        return self.columns.dtype

    def through(self, linear: Linear, square: Tensor, bias_sigma2: Tensor | None) -> Tensor:
        """`r_j sum_i c_i x_i^2` for each output j, plus the variance of the bias."""
        groups, outputs = self.rows.shape
        space = (1,) * (self.columns.dim() - 2)
        channels = -1 - len(space)
        total = linear(square, self.columns, None)
        if groups > 1:
            spread = total.unflatten(channels, (groups, 1)) * self.rows.view(groups, outputs, *space)
            spread = spread.flatten(channels - 1, channels)
        else:
            spread = total * self.rows.view(outputs, *space)
        return spread if bias_sigma2 is None else spread + bias_sigma2.view(groups * outputs, *space)
